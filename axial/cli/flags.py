"""Flags of the commands. The function of a verb takes a `Flags`, a frozen dataclass whose fields are `Flag`s.

This module declares the flags that several commands share. Such a flag has the same meaning in all commands.
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
    str: absl.DEFINE_multi_string,  # verbs of one command may take the same flag once or several times
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
        kind: type of the value. A list flag takes items separated by commas. A tuple flag may be given several times.
        meaning: help text.
        default: value if the flag is not given.
        choices: allowed values.
        least, most: smallest and largest allowed number.
        path: function of the flag's name and a path, which raises InputError for an invalid path; see `IN_FILE`. None
            if the value is no path, or if the path is checked later.
        needed: whether the flag is required.
        needs: name of another flag that this flag requires.
        alone: names of flags that exclude this flag.
        read: function of the flag's name and text, which returns the value or raises InputError. A tuple flag calls it
            for each of its values.
        old: older names, which the help omits.
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

    but = dataclasses.replace  # copies the declaration with changes

    @property
    def needed_meaning(self):
        """The help text without the default."""
        return f"{self.meaning.partition('; by default')[0].rstrip('.')}."

    def define(self, name):
        """Defines the flag and its older names for absl. absl gets no default, because `Flags` has the defaults."""
        for one in (name, *self.old):
            if self.kind in (int, float):
                _DEFINE[self.kind](one, None, self.meaning, lower_bound=self.least, upper_bound=self.most)
                absl.register_validator(one, lambda x: x is None or x == x, "expected a number")  # refuses nan
            else:
                _DEFINE[self.kind](one, None, self.meaning)

    def value(self, name, given):
        """Converts a value that absl has parsed. Raises InputError."""
        if given is None:
            return () if self.kind is tuple else None
        if self.kind is str and isinstance(given, list):
            given = given[-1]
        if isinstance(given, list):
            given = tuple(given)
        if self.choices and given not in self.choices:
            expected = f"expected one of {', '.join(self.choices)}{nearest(given, self.choices)}"
            raise InputError(f"--{name}={given}: {expected}")
        if self.read and self.kind is tuple:
            return tuple(self.read(name, one) for one in given)
        return self.read(name, given) if self.read else given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags and arguments of a verb. A subclass has a `Flag` per flag, and becomes a dataclass.

    Attributes:
        verb: name of the verb.
        arguments: arguments that are not flags.
    """

    verb: str = ""
    arguments: tuple = ()
    takes: typing.ClassVar[str] = ""  # form of `arguments`: 'NAME' is one, '[NAME]' at most one, 'NAME ...' several

    def __init_subclass__(cls):
        for name, flag in list(vars(cls).items()):
            if isinstance(flag, Flag):
                cls.__annotations__[name] = flag.kind
                setattr(cls, name, dataclasses.field(default=flag.value(name, flag.default), metadata={"flag": flag}))
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def declared(cls):
        """dict from flag names to `Flag`s."""
        return {f.name: f.metadata["flag"] for f in dataclasses.fields(cls) if "flag" in f.metadata}

    @classmethod
    def names(cls):
        """Set of all flag names, including older ones."""
        return {one for name, flag in cls.declared().items() for one in (name, *flag.old)}

    @classmethod
    def define(cls):
        """Defines the flags that absl does not have yet."""
        for name, flag in cls.declared().items():
            if name not in absl.FLAGS:
                flag.define(name)

    @classmethod
    def parsed(cls, verb, arguments=()):
        """Makes an instance with the values that absl has parsed. Raises InputError if a check fails."""
        values = {}
        for name, flag in cls.declared().items():
            for one in (name, *flag.old):
                if absl.FLAGS[one].present:
                    if name in values:
                        raise InputError(f"--{one} is the older name of --{name}; give one of them")
                    values[name] = flag.value(one, absl.FLAGS[one].value)
                    if one != name and name == "model":
                        values[name] = as_path(values[name])
        given = cls(verb=verb, arguments=tuple(arguments), **values)
        given._check_together()
        given.check()
        given.look()
        return given

    def changed(self, *names):
        """dict from names to values of the flags that differ from their defaults; only flags in `names`, if given."""
        fields = {f.name: f.default for f in dataclasses.fields(self) if f.name in (names or self.declared())}
        return {name: vars(self)[name] for name, default in fields.items() if vars(self)[name] != default}

    def need(self, name):
        """The value of a flag. Raises InputError if it is not set."""
        value = vars(self)[name]
        if value in (None, "", ()):
            raise InputError(f"--{name} is needed: {self.declared()[name].needed_meaning.rstrip('.')}")
        return value

    def check(self):
        """Raises InputError for invalid combinations of flags. Runs before `look`. Subclasses override it."""

    def look(self):
        """Raises InputError if inputs or splits are missing or outputs cannot be written. Subclasses extend it."""
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


# === Checks of paths and models ===
#
# These checks run before the import of TensorFlow, which takes seconds. Paths in buckets are checked later, because
# TensorFlow reads them. Each function below, except the first, raises InputError.


def as_path(path):
    """The value of a flag that takes only paths: prefers a local folder over a shipped model of the same name."""
    return f"./{path}" if path in shipped_names() and os.path.isdir(path) else path


def _existing(what, exists):
    """A function for `Flag.path` that checks that a local file or folder exists."""

    def look(name, path):
        if not gfile.is_remote(path) and not exists(path):
            raise InputError(f"--{name}={path}: no such {what}{nearest(path, ())}")

    return look


IN_FILE, IN_FOLDER = _existing("file", os.path.exists), _existing("folder", os.path.isdir)
OUT_FILE, OUT_FOLDER, NEW_FOLDER = try_file, try_folder, try_new_folder
OUT_CSV = functools.partial(try_file, suffixes=(".csv",))
OUT_PICTURE = functools.partial(try_file, suffixes=(".png", ".jpg", ".jpeg"))


def check_checkpoint(_, path):
    """For `Flag.path`: checks a checkpoint prefix, a safetensors file, or a folder with one."""
    if not gfile.is_remote(path):
        resolve(path, no_checkpoint)


def check_run(model_dir, bindings=()):
    """Checks the folder of a run or the name of a shipped model, and gin bindings that override its recipe."""
    gfile.check_plain(model_dir)
    if not gfile.is_remote(model_dir):
        recipes.read([run_file(shipped_folder(as_path(model_dir)))], bindings)


def check_model(what, bindings=()):
    """The `Source` that an argument of `axial.load` names. Checks gin bindings that override the recipe of a run."""
    source = resolve(what)
    if source.kind == "run" and not gfile.is_remote(source.path):
        gfile.check_plain(source.path)
        recipes.read([run_file(source.folder)], bindings)
    return source


# === Values ===


def numbers(expected, fit):
    """A function for `Flag.read` that converts a list flag to a tuple of numbers. fit(numbers) must be true."""

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


def _are_ious(values):
    return len(set(values)) == len(values) and all(0 < x <= 1 for x in values)


_ious = numbers("different IoUs, above 0 and at most 1, as in 0.5,0.75", _are_ious)


def checked(convert):
    """A function for `Flag.read` that returns the text after convert(--NAME, text) has accepted it."""

    def read(name, text):
        convert(f"--{name}", text)
        return text

    return read


def matched(pattern, expected, fit=lambda *_: True):
    """A function for `Flag.read` that returns the integers in the groups of a pattern. fit(*integers) must be true."""

    def read(name, text):
        match = re.fullmatch(pattern, text)
        values = tuple(number and int(number) for number in match.groups()) if match else ()
        if not match or not fit(*values):
            raise InputError(f"--{name}={text}: expected {expected}")
        return values

    return read


# === Flags of several verbs ===

GIN_FILE = Flag(tuple, "gin files, on disk or in experiments/; later files override earlier ones.")
GIN_BINDING = Flag(tuple, "gin bindings that override the recipe or run, like 'TrainingConfig.steps = 100'.")
CHANGE = Flag(list, "hyperparameters that may differ from the resumed run's, like batch,learning_rate.", ())
DATA_DIR = Flag(str, "folder of converted data; by default the recipe's or run's, or samples.", path=IN_FOLDER)
SPLIT = Flag(tuple, "splits of the data; by default the run's evaluation split, or all splits of the samples.")
MODEL_DIR = Flag(str, "a run of axial-train: the folder of its checkpoints, summaries and scores.")
CHECKPOINT = Flag(str, "one checkpoint of the run in --model_dir, by prefix.", path=check_checkpoint, needs="model_dir")
AVERAGE = Flag(int, "number of the run's latest checkpoints to average.", 1, least=1, needs="model_dir")
MODEL = Flag(
    str,
    "a model that axial ships, like nuclei; or a run (its best checkpoint), one of its checkpoints, an export, a "
    "safetensors file with its recipe, or hf://OWNER/REPO.",
    old=("saved_model",),
)
JSON = Flag(str, "JSON file for all scores or numbers, not in percent.", path=OUT_FILE)
CSV = Flag(str, "CSV table; each split appends a row of scores.", path=OUT_FILE)
FIGURE = Flag(str, "picture to write, .png or .jpg.", path=OUT_PICTURE)
HTML = Flag(str, "HTML page to write.", path=OUT_FILE)
BATCH = Flag(int, "global batch size; by default the recipe's, or 1.", least=1, most=65536)
DIAMETER = Flag(
    str,
    "median diameter of the objects in pixels, or 'auto'; scales photos to the object sizes of the training data.",
    read=checked(convert_diameter),
    alone=("image_size",),
)
PICTURE = Flag(str, "picture of the first photos with ground truth and prediction, or of curves.", path=OUT_PICTURE)
THRESHOLDS = Flag(list, "IoUs at which to score TP / (TP + FP + FN) of things, counted over all photos.", read=_ious)
LISTEN = Flag(
    str,
    "who can reach the server: this machine (loopback) or all. It has no authentication: with 'all' a firewall must "
    "keep strangers out (SECURITY.md).",
    "loopback",
    choices=("loopback", "all"),
)


class Devices(Flags):
    """Flags of the devices that a network runs on."""

    strategy = Flag(str, "devices to run on.", "default", choices=("default", "mirrored", "tpu"))
    tpu = Flag(str, "with --strategy=tpu: 'local' on a TPU VM, a TPU's name, or grpc://HOST:PORT.", "local")


class Looks(Flags):
    """Flags of the scales and mirror images that predictions are averaged over."""

    scales = Flag(list, "scales of the canvas to average over.", ("1",), read=positive_numbers, alone=("multi_scale",))
    flip = Flag(bool, "also averages over the mirror image; not for exports.", False)
    multi_scale = Flag(bool, "averages over the recipe's own scales, with --flip; not for exports.", False)
