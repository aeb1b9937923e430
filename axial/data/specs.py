"""Classes of data sets. A frozen `DatasetSpec` holds their names, ids and colours.

A spec may be a user's YAML file. For example:

    name: mine
    classes:
      - {id: 1, name: road, color: [128, 64, 128]}
      - {id: 2, name: car, thing: true, color: [0, 0, 142]}
    ignored_ids: [0, 255]

`json_spec` makes a spec from the categories of a JSON in COCO's panoptic format.

Colours are optional, but either all classes have one or none has. ignored_ids are the ids of unlabelled pixels.
label_divisor and ignore are optional too; see `DatasetSpec`.
"""

import base64
import collections
import colorsys
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import typing

import msgspec
import numpy as np

from axial.data.levels import DEPTH
from axial.errors import InputError, named, nearest
from axial.io import gfile, schemas
from axial.io.check import shortened
from axial.io.paths import inside
from axial.io.read import LARGEST_TEXT, convert, first_line, read_json, read_yaml
from axial.io.schemas import Category, Color, Strict, Text


class _AnySpec(Strict, kw_only=True):
    """Fields that `StoredSpec` and `SpecFile` share."""

    name: Text
    ignored_ids: list[Category] = []
    label_divisor: typing.Annotated[int, msgspec.Meta(ge=1, le=2**24)] = 1000
    # The largest panoptic label is (ignore + 1) x label_divisor and must fit an int32.
    ignore: typing.Annotated[int, msgspec.Meta(ge=1, le=2**15)] = 255


class StoredSpec(_AnySpec, kw_only=True):
    """A `DatasetSpec` or `TextSpec` as JSON files store it; these classes describe the fields."""

    class_names: list[Text]
    category_ids: list[Category]
    things: list[bool]
    palette: list[Color] = []
    levels: typing.Literal["depth", "percentiles"] = "depth"
    languages: list[Text] = []  # only a `TextSpec` has languages and a vocabulary
    vocabulary: str = ""


class ClassRow(Strict):
    id: Category
    name: Text
    thing: bool = False
    color: Color | None = None


class SpecFile(_AnySpec, kw_only=True):
    """Content of a user's YAML file of classes; see the module."""

    classes: typing.Annotated[list[ClassRow], msgspec.Meta(min_length=1)]


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """The classes of a data set, in the order of the model's outputs.

    Attributes:
        name: name of the data set.
        class_names: name of each class.
        category_ids: id of each class in the data set's own files.
        things: for each class, whether it is a thing: a class of countable objects.
        label_divisor: a panoptic label is class x label_divisor + instance.
        ignore: class index of unlabelled pixels.
        palette: (red, green, blue) of each class, 0 to 255. If it is empty, `colors` chooses them.
        ignored_ids: the data set's ids whose pixels count as unlabelled.
        levels: rule that scales photos of more than 8 bits to 8 bits, in the conversion and for the data set's models;
            see `data.levels.eight_bits`. Older versions of axial stored no `levels` and had only the rule 'depth'.
    """

    name: str
    class_names: tuple
    category_ids: tuple
    things: tuple
    label_divisor: int = 1000
    ignore: int = 255
    palette: tuple = ()
    ignored_ids: tuple = ()
    levels: str = dataclasses.field(default=DEPTH, compare=False)

    def __post_init__(self):
        if not len(self.class_names) == len(self.category_ids) == len(self.things):
            raise InputError(f"spec {self.name!r}: one name, id and thing flag for each class")
        ids, classes = (*self.category_ids, *self.ignored_ids), len(self.class_names)
        for values, what in ((ids, "category ids"), (self.class_names, "class names")):
            twice = [value for value, count in collections.Counter(values).items() if count > 1]
            if twice:
                raise InputError(f"spec {self.name!r}: {what} must differ, {twice[0]!r} is there twice")
        for right, expected in (
            ((classes + 1) * self.label_divisor <= 1 << 24, "label_divisor makes ids beyond 24 bits"),
            (len(self.palette) in (0, classes), "one colour for each class, or none at all"),
            (classes <= self.ignore, f"at most {self.ignore} classes"),
            ((self.ignore + 1) * self.label_divisor <= 1 << 31, "ignore x label_divisor makes labels beyond 31 bits"),
        ):
            if not right:
                raise InputError(f"spec {self.name!r}: {expected}")

    @property
    def num_classes(self):
        return len(self.class_names)

    @property
    def void(self):
        """Panoptic label of void pixels."""
        return self.ignore * self.label_divisor

    @functools.cached_property
    def thing_classes(self):
        return tuple(i for i, thing in enumerate(self.things) if thing)

    @functools.cached_property
    def class_of_category(self):
        return {category: i for i, category in enumerate(self.category_ids)}

    @functools.cached_property
    def colors(self):
        """uint8 [num_classes, 3]: the palette; if it is empty, hues at golden-section steps, paler for stuff."""
        if self.palette:
            return np.array(self.palette, np.uint8)
        shades = [(0.85, 0.95) if thing else (0.45, 0.75) for thing in self.things]
        rows = [colorsys.hsv_to_rgb(i * 0.618034 % 1, *shade) for i, shade in enumerate(shades)]
        return np.round(255 * np.array(rows)).astype(np.uint8)

    def class_index(self, category):
        """Class index of one of the data set's ids: `ignore` for an ignored id, None for an unknown id."""
        return self.class_of_category.get(category, self.ignore if category in self.ignored_ids else None)

    def to_json(self):
        usual = {"palette": (), "ignored_ids": (), "levels": DEPTH}
        return {k: v for k, v in dataclasses.asdict(self).items() if v != usual.get(k)}

    @classmethod
    def from_schema(cls, path, spec):
        """Makes the spec from a `StoredSpec` that was read from the file `path`: a `TextSpec` if it has a vocabulary.

        Raises:
            InputError: the fields do not fit each other; the message names the file.
        """
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in msgspec.structs.asdict(spec).items()}
        languages, vocabulary = fields.pop("languages"), fields.pop("vocabulary")
        with named(path):
            return TextSpec(spec.name, languages, vocabulary) if vocabulary else cls(**fields)

    @classmethod
    def from_yaml(cls, path):
        """Reads the spec in a user's YAML file. Raises InputError."""
        content = read_yaml(path, SpecFile)
        rows = content.classes
        with named(path):
            return cls(
                name=content.name,
                class_names=tuple(row.name for row in rows),
                category_ids=tuple(row.id for row in rows),
                things=tuple(row.thing for row in rows),
                palette=tuple(row.color for row in rows if row.color),
                ignored_ids=tuple(content.ignored_ids),
                label_divisor=content.label_divisor,
                ignore=content.ignore,
            )

    @classmethod
    def read(cls, path):
        """Reads the spec in a spec.json. Raises InputError."""
        return cls.from_schema(path, read_json(path, StoredSpec, LARGEST_TEXT)[1])


@dataclasses.dataclass(frozen=True)
class TextSpec:
    """The languages of a data set of sentence pairs, and their joint vocabulary.

    Attributes:
        name: name of the data set.
        languages: source language and target language.
        vocabulary: the SentencePiece model as base64, so that a spec needs no other file. Piece id 0 is the padding and
            the start token of targets.
    """

    name: str
    languages: tuple
    vocabulary: str

    def __post_init__(self):
        if len(self.languages) != 2:
            raise InputError(f"spec {self.name!r}: languages: expected two, of the sources and of the targets")
        _ = self.pieces  # reads and checks the model

    @functools.cached_property
    def model(self):
        """Bytes of the SentencePiece model."""
        try:
            return base64.b64decode(self.vocabulary, validate=True)
        except ValueError:
            raise InputError(f"spec {self.name!r}: vocabulary: not base64") from None

    @functools.cached_property
    def pieces(self):
        """The `SentencePieceProcessor` of the vocabulary."""
        return read_pieces(f"spec {self.name!r}: vocabulary", self.model)

    @property
    def num_classes(self):
        """Number of pieces in the vocabulary."""
        return self.pieces.vocab_size()

    @property
    def end(self):
        """Piece id that ends a sentence."""
        return self.pieces.eos_id()

    @property
    def class_names(self):
        """The vocabulary's pieces, in order of their ids."""
        return tuple(self.pieces.id_to_piece(i) for i in range(self.num_classes))

    def encode(self, text):
        """Piece ids of a sentence, followed by `end`."""
        return [*self.pieces.encode(text), self.end]

    def decode(self, ids):
        """The sentence of a sequence of piece ids, up to the first `end`. Padding is skipped."""
        before_end = itertools.takewhile(lambda i: i != self.end, map(int, ids))
        return self.pieces.decode([i for i in before_end if i])

    def to_json(self):
        lists = {"class_names": [], "category_ids": [], "things": []}  # required fields of `StoredSpec`
        return {"name": self.name, **lists, "languages": list(self.languages), "vocabulary": self.vocabulary}


Spec = DatasetSpec | TextSpec


def difference(spec, expected):
    """Describes the first field in which two specs differ, with both values; '' if no compared field differs.

    Only fields that decide the meaning of a record are compared: of a `DatasetSpec`, class_names, category_ids and
    things. A record holds class indices, its own segment table, 0 for unlabelled pixels, and an 8-bit photo. If both
    specs have one thing class and at most one other class, names and ids may differ: a nucleus may be called a cell.

    >>> difference(CAMVID, CITYSCAPES)
    'it has 11 class_names, not 19'
    >>> difference(NUCLEI, plain_spec("cells", {1: "cell"}, "rest"))
    ''
    """
    one, other = _record_fields(spec), _record_fields(expected)
    if all(isinstance(s, DatasetSpec) and s.num_classes <= 2 and sum(s.things) == 1 for s in (spec, expected)):
        one = {"things": spec.things}
    differences = (field_difference(name, values, other.get(name)) for name, values in one.items())
    return next(filter(None, differences), "")


def _record_fields(spec):
    """dict of the fields that decide the meaning of a record."""
    if isinstance(spec, TextSpec):
        return {"languages": spec.languages, "vocabulary": spec.vocabulary}
    return {"class_names": spec.class_names, "category_ids": spec.category_ids, "things": spec.things}


def field_difference(name, one, other):
    """Describes how two values of a field, possibly lists, differ; '' if they are equal.

    >>> field_difference("things", [True, False], (True, True))
    'its things[1] is False, not True'
    """
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return f"it has {len(one)} {name}, not {len(other)}"
        pairs = ((f"{name}[{i}]", *pair) for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1])
        name, one, other = next(pairs, (name, None, None))
    return f"its {name} is {shortened(one)}, not {shortened(other)}" if one != other else ""


def read_pieces(where, model):
    """The `SentencePieceProcessor` of a model, given as bytes.

    Raises:
        InputError: `model` is not a SentencePiece model, or its padding id is not 0, or it has no id that ends a
            sentence. The message starts with `where`.
    """
    import sentencepiece  # imported here, because only translation needs it

    try:
        pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, ValueError):
        raise InputError(f"{where}: not a SentencePiece model") from None
    if pieces.pad_id() != 0 or pieces.eos_id() < 1:
        numbers = f"pad_id is {pieces.pad_id()} and eos_id {pieces.eos_id()}"
        raise InputError(f"{where}: {numbers}; expected a SentencePiece model with --pad_id=0 and an eos_id")
    return pieces


# Hint in messages about a JSON's categories.
ANOTHER_SPEC = "; choose another --spec (json takes the JSON's own, of COCO's layout)"


def check_categories(path, categories, spec, hint=""):
    """Raises InputError, which names the first difference, unless a JSON's categories agree with the spec.

    Names are compared without case. Spaces, hyphens and underscores count as equal. `isthing` is not compared for a
    spec without things, which merges instances on purpose. Categories that the spec lacks or ignores are skipped.

    Args:
        path: path of the JSON.
        categories: list of `schemas.CategoryRow`.
        spec: `DatasetSpec`.
        hint: end of the message.
    """
    for row in categories:
        index = spec.class_of_category.get(row.id)
        if index is None:
            continue
        name, thing = spec.class_names[index], spec.things[index]
        renamed = row.name is not None and bare(row.name) != bare(name)
        if renamed or (any(spec.things) and row.isthing is not None and bool(row.isthing) != thing):
            kind = {None: "", 0: " (stuff)", 1: " (thing)"}[row.isthing]
            theirs = f"category {row.id} is {row.name if row.name is None else str(row.name)!r}{kind}"
            ours = f"the spec {spec.name!r} calls it {name!r} ({'thing' if thing else 'stuff'})"
            raise InputError(f"{path}: {theirs}, {ours}{hint}")


def bare(name):
    """A class name without case; spaces, hyphens and underscores are one space. Names that agree in this are equal."""
    return re.sub(r"[\s_-]+", " ", str(name)).strip().casefold()


_FOLDER = pathlib.Path(__file__).parent
_FILES = (*sorted(_FOLDER.glob("classes/*.yaml")), _FOLDER / "nuclei_sample/spec.yaml")
SPECS = {spec.name: spec for spec in (DatasetSpec.from_yaml(str(path)) for path in _FILES)}
COCO, CITYSCAPES, CAMVID, NUCLEI = (SPECS[name] for name in ("coco", "cityscapes", "camvid", "nuclei"))


# === Specs that the user names ===


def find_spec(name):
    """The published spec called `name`, or the spec in a .yaml or .yml file at the path `name`.

    Raises:
        InputError: neither exists, or the file does not have the module's form. The message names the field.
    """
    if name in SPECS:
        return SPECS[name]
    if name.endswith((".yaml", ".yml")):
        return DatasetSpec.from_yaml(name)
    raise InputError(f"--spec={name}: {', '.join(SPECS)}, or a .yaml file of your own{nearest(name, SPECS)}")


def json_spec(input_dir, splits):
    """The `DatasetSpec` of the categories in a panoptic JSON, from the first split that has one.

    Raises:
        InputError: there is no such JSON; a category lacks its name or isthing; see also `DatasetSpec`.
    """
    paths = [inside(input_dir, f"annotations/panoptic_{split}.json", "--split") for split in splits]
    path = next((path for path in paths if gfile.exists(path)), None)
    if path is None:
        raise InputError(f"--spec=json: {paths[0]}: no such file{boxes_alone(input_dir, splits[0])}")
    rows = read_json(path, schemas.Panoptic)[1].categories
    if not rows:
        raise InputError(f"--spec=json: {path}: categories: empty")
    for row in rows:
        if None in (row.name, row.isthing):
            field = "name" if row.name is None else "isthing"
            raise InputError(f"--spec=json: {path}: category {row.id}: is missing the field {field}")
    colors = [row.color for row in rows]
    with named(f"--spec=json: {path}"):
        return DatasetSpec(
            name=os.path.basename(os.path.abspath(input_dir)) or "json",
            class_names=tuple(str(row.name) for row in rows),
            category_ids=tuple(row.id for row in rows),
            things=tuple(bool(row.isthing) for row in rows),
            palette=tuple(convert("categories: color: ", colors, list[Color])) if all(colors) else (),
            ignore=max(255, len(rows)),
        )


def plain_spec(input_dir, names, rest):
    """The `DatasetSpec` of thing classes and, unless it is None, the stuff class `rest`, which comes first.

    Args:
        input_dir: folder of the data; its name becomes the name of the spec.
        names: dict from category ids to the names of the things.
        rest: name of the stuff class. Its id is 0, or else the smallest id above all others.
    """
    ids, classes = [*names], [*names.values()]
    if rest is not None:
        ids, classes = [0 if 0 not in names else max(names) + 1, *ids], [rest, *classes]
    fields = {
        "name": os.path.basename(os.path.abspath(input_dir)) or "folder",
        "class_names": classes,
        "category_ids": ids,
        "things": [False] * (rest is not None) + [True] * len(names),
        "label_divisor": min(65536, 2**24 // (len(ids) + 1)),
        "ignore": max(255, len(ids)),
    }
    return DatasetSpec.from_schema(input_dir, convert(f"{input_dir}: ", fields, StoredSpec))


def boxes_alone(input_dir, split):
    """End of a message about a missing panoptic JSON: what to do if COCO's detection JSON exists; else ''."""
    path = inside(input_dir, f"annotations/instances_{split}.json", "--split")
    return f"; {path} is there, which axial-convert instances reads" if gfile.exists(path) else ""


def text_operations():
    """The module tensorflow_text, whose ops a translator's export uses. Raises InputError if it is missing."""
    import tensorflow as tf

    try:
        import tensorflow_text
    except (ImportError, tf.errors.OpError) as error:
        raise InputError(f"a translator's export needs pip install tensorflow-text ({first_line(error)})") from None
    return tensorflow_text
