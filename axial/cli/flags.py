"""Flags. A verb takes a frozen dataclass of them, a `Flags`, each field of which is declared by a `Flag`.

A flag that several commands take is declared here, once, and means one thing in all of them.
"""

import dataclasses
import functools
import os
import re
import typing

from absl import flags as absl

from axial import recipes
from axial.errors import InputError, nearest
from axial.io import gfile
from axial.io.check import convert_diameter
from axial.io.write import try_file, try_folder, try_new_folder
from axial.weights.source import no_checkpoint, resolve, run_file, shipped_folder, shipped_names

_DEFINE = {
    str: absl.DEFINE_string,
    bool: absl.DEFINE_bool,
    list: absl.DEFINE_list,
    tuple: absl.DEFINE_multi_string,
    int: absl.DEFINE_integer,
    float: absl.DEFINE_float,
}


@dataclasses.dataclass(frozen=True)
class Flag:
    """The declaration of a flag.

    Attributes:
        kind: type of its value: a list is separated by commas, a tuple is of a flag that may be given several times.
        meaning: its help.
        default: its value if it is not given.
        choices: the values that it takes.
        least, most: bounds of a number.
        path: function of its name and of a path that it names, which raises InputError for a path that will not do;
            see `IN_FILE`. None if it names no path, or one that is looked at later.
        needed: whether it must be given.
        needs: name of another flag that it needs.
        alone: names of flags that it does not go with.
        read: function of its name and text that returns its value, or raises InputError.
        old: older names, which the help does not show.
    """

    kind: type
    meaning: str
    default: typing.Any = None
    choices: tuple = ()
    least: float | None = None
    most: float | None = None
    path: typing.Callable | None = None
    needed: bool = False
    needs: str = ""
    alone: tuple = ()
    read: typing.Callable | None = None
    old: tuple = ()

    but = dataclasses.replace  # the same declaration with changes

    @property
    def needed_meaning(self):
        """The meaning where there is no default."""
        return f"{self.meaning.partition('; by default')[0].rstrip('.')}."

    def define(self, name):
        """Defines the flag for absl, and its older names. What absl has no value of has our own default."""
        for one in (name, *self.old):
            if self.kind in (int, float):
                _DEFINE[self.kind](one, None, self.meaning, lower_bound=self.least, upper_bound=self.most)
                absl.register_validator(one, lambda x: x is None or x == x, "expected a number")  # nan is in all bounds
            else:
                _DEFINE[self.kind](one, None, self.meaning)

    def value(self, name, given):
        """The value of what absl has parsed."""
        if given is None:
            return () if self.kind is tuple else None
        if isinstance(given, list):
            given = tuple(given)
        if self.choices and given not in self.choices:
            expected = f"expected one of {', '.join(self.choices)}{nearest(given, self.choices)}"
            raise InputError(f"--{name}={given}: {expected}")
        return self.read(name, given) if self.read else given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags and arguments of a verb. A subclass has a `Flag` for each of its flags, and becomes a dataclass.

    Attributes:
        verb: its name.
        arguments: those that are no flags.
    """

    verb: str = ""
    arguments: tuple = ()
    takes: typing.ClassVar[str] = ""  # its arguments: 'NAME' for one, '[NAME]' for at most one, 'NAME ...' for several

    def __init_subclass__(cls):
        for name, flag in list(vars(cls).items()):
            if isinstance(flag, Flag):
                cls.__annotations__[name] = flag.kind
                setattr(cls, name, dataclasses.field(default=flag.value(name, flag.default), metadata={"flag": flag}))
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def declared(cls):
        """dict from the names of the flags to their `Flag`s."""
        return {f.name: f.metadata["flag"] for f in dataclasses.fields(cls) if "flag" in f.metadata}

    @classmethod
    def names(cls):
        """Set of the names of all flags, older ones too."""
        return {one for name, flag in cls.declared().items() for one in (name, *flag.old)}

    @classmethod
    def define(cls):
        """Defines the flags for absl that it does not have yet."""
        for name, flag in cls.declared().items():
            if name not in absl.FLAGS:
                flag.define(name)

    @classmethod
    def parsed(cls, verb, arguments=()):
        """The flags that absl has parsed. Raises InputError unless they go together and name what is there."""
        values = {}
        for name, flag in cls.declared().items():
            for one in (name, *flag.old):
                if absl.FLAGS[one].present:
                    if name in values:
                        raise InputError(f"--{one} is the older name of --{name}; give one of them")
                    values[name] = flag.value(one, absl.FLAGS[one].value)
                    if one != name and flag.kind is str:
                        values[name] = as_path(values[name])
        given = cls(verb=verb, arguments=tuple(arguments), **values)
        given._check_together()
        given.check()
        given.look()
        return given

    def changed(self, *names):
        """dict of the flags, of all or of those of some names, that have another value than by default."""
        fields = {f.name: f.default for f in dataclasses.fields(self) if f.name in (names or self.declared())}
        return {name: vars(self)[name] for name, default in fields.items() if vars(self)[name] != default}

    def need(self, name):
        """The value of a flag. Raises InputError if it is not set."""
        value = vars(self)[name]
        if value in (None, "", ()):
            raise InputError(f"--{name} is needed: {self.declared()[name].needed_meaning.rstrip('.')}")
        return value

    def check(self):
        """Raises InputError for what a verb does not take, before anything is looked for. For subclasses."""

    def look(self):
        """Raises InputError unless what paths and splits name is there, and outputs can be written. For subclasses."""
        given = vars(self)
        for name, flag in self.declared().items():
            value = given[name] if flag.path else None
            for path in value if isinstance(value, tuple) else filter(None, [value]):
                flag.path(name, path)
        if given.get("split") and given.get("data_dir") and not gfile.is_remote(given["data_dir"]):
            from axial.data.files import find_manifest

            for split in given["split"]:
                find_manifest(given["data_dir"], split)

    def _check_together(self):
        declared = self.declared()
        for name in self.changed():
            flag = declared[name]
            if flag.needs in declared and not vars(self)[flag.needs]:
                raise InputError(f"--{name} needs --{flag.needs}")
            for other in self.changed(*flag.alone) if flag.alone else ():
                raise InputError(f"--{name} does not go with --{other}")
        for name, flag in declared.items():
            if flag.needed:
                self.need(name)


# === What flags name ===
#
# It is looked for, and outputs are tried, before TensorFlow is imported, which takes seconds. A path of a bucket is
# left for later, as TensorFlow reads it. Each of these functions but the first raises InputError.


def as_path(path):
    """The value of a flag that takes paths alone: a folder here may have the name of a model that axial ships."""
    return f"./{path}" if path in shipped_names() and os.path.isdir(path) else path


def _existing(what, exists):
    """A function for `Flag.path`, which looks for a local file or folder."""

    def look(name, path):
        if not gfile.is_remote(path) and not exists(path):
            raise InputError(f"--{name}={path}: no such {what}{nearest(path, ())}")

    return look


IN_FILE, IN_FOLDER = _existing("file", os.path.exists), _existing("folder", os.path.isdir)
OUT_FILE, OUT_FOLDER, NEW_FOLDER = try_file, try_folder, try_new_folder
OUT_PICTURE = functools.partial(try_file, suffixes=(".png", ".jpg", ".jpeg"))


def check_checkpoint(_, path):
    """A checkpoint by its prefix, a safetensors file, or a folder of one, for `Flag.path`."""
    if not gfile.is_remote(path):
        resolve(path, no_checkpoint)


def check_run(model_dir, bindings=()):
    """A run, or the name of a shipped model, and gin bindings over it."""
    gfile.check_plain(model_dir)
    if not gfile.is_remote(model_dir):
        recipes.read([run_file(shipped_folder(as_path(model_dir)))], bindings)


def check_model(what, bindings=()):
    """The `Source` of what `axial.load` takes, and gin bindings over its recipe if it has one."""
    source = resolve(what)
    if source.kind == "run" and not gfile.is_remote(source.path):
        gfile.check_plain(source.path)
        recipes.read([run_file(source.folder)], bindings)
    return source


# === Values ===


def numbers(expected, fit):
    """A function for `Flag.read`: tuple of the numbers of a list flag, which fit as a whole."""

    def read(name, texts):
        try:
            values = tuple(map(float, texts))
        except ValueError:
            values = ()
        if not values or not fit(values):
            raise InputError(f"--{name}={','.join(texts)}: expected {expected}")
        return values

    return read


positive_numbers = numbers("positive numbers, as in 0.5,1,2", lambda values: all(0 < x < float("inf") for x in values))
_ious = numbers(
    "different IoUs, above 0 and at most 1, as in 0.5,0.75",
    lambda values: len(set(values)) == len(values) and all(0 < x <= 1 for x in values),
)


def diameter(name, text):
    """A diameter in pixels, or 'auto', as text. Raises InputError, which names the flag."""
    convert_diameter(f"--{name}", text)
    return text


def matched(pattern, expected, fit=lambda *_: True):
    """A function for `Flag.read`: the whole numbers in a text that matches a pattern, and which fit as a whole."""

    def read(name, text):
        match = re.fullmatch(pattern, text)
        values = tuple(number and int(number) for number in match.groups()) if match else ()
        if not match or not fit(*values):
            raise InputError(f"--{name}={text}: expected {expected}")
        return values

    return read


# === Flags of several verbs ===

GIN_FILE = Flag(tuple, "gin files, on disk or of experiments/; a later one overrides.")
GIN_BINDING = Flag(tuple, "gin bindings over the recipe or the run, like 'TrainingConfig.steps = 100'.")
CHANGE = Flag(list, "settings that a resumed run may change, like batch,learning_rate.", ())
DATA_DIR = Flag(str, "what axial-convert wrote; by default data of the recipe or run, or samples.", path=IN_FOLDER)
SPLIT = Flag(tuple, "splits of the data; by default the run's evaluation split, or all splits of the samples.")
MODEL_DIR = Flag(str, "a run of axial-train: the folder of its checkpoints, summaries and scores.")
CHECKPOINT = Flag(
    str, "one checkpoint of the run in --model_dir, by its prefix.", path=check_checkpoint, needs="model_dir"
)
AVERAGE = Flag(int, "averages the weights of so many of the run's latest checkpoints.", 1, least=1, needs="model_dir")
MODEL = Flag(
    str,
    "a model that axial ships, like nuclei; or a run (its best checkpoint), one of its checkpoints, an export, a "
    "safetensors file with its recipe, or hf://OWNER/REPO.",
    old=("saved_model",),
)
JSON = Flag(str, "file for all scores or numbers, in plain units.", path=OUT_FILE)
CSV = Flag(str, "table to write; scores are appended, a row for each split.", path=OUT_FILE)
FIGURE = Flag(str, "picture to draw, .png or .jpg.", path=OUT_PICTURE)
HTML = Flag(str, "page to write.", path=OUT_FILE)
MARKDOWN = Flag(str, "new file for a table, or one that holds the two comments around the table.", path=OUT_FILE)
BATCH = Flag(int, "images of a step, over all replicas; by default the recipe's, or 1.", least=1, most=65536)
DIAMETER = Flag(
    str,
    "median diameter of the objects in pixels, or 'auto': photos are scaled to the sizes of the training.",
    read=diameter,
    alone=("image_size",),
)
PICTURE = Flag(str, "first photos with truth and prediction, or curves.", path=OUT_PICTURE)
CAPTION = Flag(str, "title of the picture and the report.", "")
THRESHOLDS = Flag(list, "IoUs: at each TP / (TP + FP + FN) of the things, counted over all photos.", read=_ious)
LISTEN = Flag(
    str,
    "who reaches the server: this machine, or all. It has no authentication: with 'all' a firewall must keep strangers "
    "out (SECURITY.md).",
    "loopback",
    choices=("loopback", "all"),
)


class Devices(Flags):
    """Where a network runs."""

    strategy = Flag(str, "devices to run on.", "default", choices=("default", "mirrored", "tpu"))
    tpu = Flag(str, "with --strategy=tpu: 'local' on a TPU VM, a TPU's name, or grpc://HOST:PORT.", "local")


class Looks(Flags):
    """How often a network looks at a photo."""

    scales = Flag(list, "scales of the canvas to average over.", ("1",), read=positive_numbers, alone=("multi_scale",))
    flip = Flag(bool, "averages over the mirror image as well; not of an export.", False)
    multi_scale = Flag(bool, "averages over the recipe's own scales, with --flip; not of an export.", False)
