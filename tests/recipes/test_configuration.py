"""Every gin file parses, every recipe trains one step with its file in tiny/, and hostile gin files are refused."""

import codecs
import os
import pathlib
import re
import time

import gin
import pytest

from axial import recipes
from axial.data.specs import NUCLEI
from axial.errors import InputError
from axial.io.paths import experiments_dir
from axial.recipes import configuration
from axial.recipes.settings import read_settings

ROOT = pathlib.Path(experiments_dir())
ARGUMENTS = read_settings()
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.gin"))
# A leaf is a recipe that sets its model. The keys are names of recipes that leaves include. The values are (a leaf that
# includes this recipe, the model in the file of the same name in tiny/).
RECIPES = {
    "panoptic": ("sample/overfit.gin", "axial_deeplab_nano"),
    "classification": ("imagenet/axial_resnet_s.gin", "axial_resnet_nano"),
    "segmentation": ("cityscapes/ccnet.gin", "ccnet_nano"),
    "detection": ("sample/detection_overfit.gin", "faster_rcnn_resnet_nano"),
    "translation": ("multi30k/transformer_nano.gin", "transformer_nano"),
}
LEAVES = [name for name in FILES if pathlib.Path(name).stem not in RECIPES]


def recipe_of(name):
    """Returns the key of `RECIPES` for a gin file: the file's name, or the name of the recipe that it includes."""
    if pathlib.Path(name).stem in RECIPES:
        return pathlib.Path(name).stem
    return recipe_of(re.search("^include '(.+)'$", (ROOT / name).read_text(), re.M)[1])


@pytest.mark.parametrize("name", FILES)
def test_every_file_parses(name):
    # Included recipes and files in tiny/ lack the macros that leaves set, so they are loaded after a leaf.
    configuration.load([RECIPES[recipe_of(name)][0], name] if name not in LEAVES else [name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAVES)
def test_every_leaf_trains_a_step_of_its_tiny_twin(name, succeed, request, tmp_path):
    recipe = recipe_of(name)
    data = {"classification": "colours_dir", "translation": "texts_dir"}
    data_dir = request.getfixturevalue(data.get(recipe, "sample_dir"))
    files = (f"--gin_file={name}", f"--gin_file=tiny/{recipe}.gin")
    succeed("train", *files, f"--data_dir={data_dir}", f"--model_dir={tmp_path}")
    assert (tmp_path / "ckpt-1.index").exists()
    assert RECIPES[recipe][1] in (tmp_path / "operative_config.gin").read_text()


WRONG = {
    "MODEL = %MODEL": "the macro 'MODEL' is set to itself",
    "MODEL = 'resnet_50'": "for classification; a model for panoptic is expected",
    "INIT = 5": "init_checkpoint = 5: expected str",
    "STEPS = (1": "not gin's syntax",
    "PostprocessConfig.center_threshold = 1e999": "expected float <= 1.0",
    "TrainingConfig.precision = 'mixed_bfloat'": "did you mean 'mixed_bfloat16'",
    "RAdamLookahead.learning_rate = @WarmupPoly": r"expected a number >= 0 or a schedule, like @WarmupPoly\(\)",
    "BatchNormConfig.momentum = '" + 300 * "b" + "'": "bbb...: expected float",
    "PanopticTask.model = @PanopticTask()": "an argument of itself",
    "from os import path": "imports are refused",
    "STEPS = " + "(" * 3000: "not gin's syntax",
    "foo/TrainingConfig.steps = 3": "foo/TrainingConfig: scopes are refused",
    "Nothing:\n  steps = 3": "nothing is called 'Nothing'",
    "INIT = '\\ud800'": "surrogates not allowed",
    "STEPS = 0x" + "f" * 5000: r"a number above 2\*\*64",
    "STEPS = " + "x" * 10**5: r"x{500}\.\.\. is no value",
    f"INIT = 'a' {'b ' * 3000!r}": "a text of more than 4096 bytes",
}


@pytest.mark.parametrize("binding", WRONG, ids=lambda b: b[:40])
def test_wrong_values_are_named(binding, sample_dir):
    with pytest.raises(InputError, match=WRONG[binding]) as caught:
        configuration.load(["sample/overfit.gin"], [binding])
        configuration.build(data_dir=sample_dir)
    assert "\n" not in str(caught.value)


def chain(number, end, value="%A{0}"):
    """Returns text that sets each of `number` macros to the next macro, and ends with `end`."""
    macros = (f"A{n} = {value.format(n + 1)}" for n in range(number))
    return "\n".join(["TrainingConfig.partitions = %A0", *macros, end])


@pytest.mark.parametrize(
    "text,words",
    [
        ("ModelConfig.name = %A\nA = %B\nB = %A", "the macro 'B' is set to itself|the macro 'A' is set to itself"),
        ("experiment.task = %A\nA = [{'a': (%A,)}]", "the macro 'A' is set to itself"),
        (chain(4000, "A4000 = 1"), "leads to more than 100 references"),
        (chain(60, "A60 = 1", "[%A{0}, %A{0}]"), "leads to more than 100 references"),
        ("STEPS = 1\n" * 20000, "at most 131072 characters"),
    ],
)
def test_no_text_takes_long(text, words):
    """These texts once took minutes or longer. Now each of them is refused within 20 seconds."""
    started = time.monotonic()
    with pytest.raises(InputError, match=words):
        recipes.read([], [text], whole=False)
    assert time.monotonic() - started < 20


VALUES = ("'x'", "7", "None", "[1, 'a']", "@BatchNormConfig()")
# dict from configurables that the panoptic recipe does not build to a recipe that builds them.
RECIPE_OF = {
    **dict.fromkeys(("ClassificationTask", "ClassificationData"), "classification"),
    **dict.fromkeys(("DetectionTask", "DetectionData"), "detection"),
    **dict.fromkeys(("TranslationTask", "TextData"), "translation"),
    "SegmentationTask": "segmentation",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_takes_a_value_or_refuses_it_in_one_line(name, request):
    """For each argument, each of five values of different types is accepted or raises InputError."""
    recipe = RECIPE_OF.get(name, "panoptic")
    data = {"classification": "colours_dir", "translation": "texts_dir"}
    data_dir = request.getfixturevalue(data.get(recipe, "sample_dir"))
    taken = 0
    for argument in ARGUMENTS[name]:
        for value in VALUES:
            try:
                configuration.load([RECIPES[recipe][0], f"tiny/{recipe}.gin"], [f"{name}.{argument} = {value}"])
                built = name if argument == "data_dir" or not name.endswith("Task") else "experiment"
                configuration.build(built, data_dir=None if argument == "data_dir" else data_dir)
                taken += 1
            except InputError as error:
                assert "\n" not in str(error), (argument, value)
            except Exception as error:
                pytest.fail(f"{name}.{argument} = {value}: {type(error).__name__}: {error}")
    assert taken or not ARGUMENTS[name] or name == "experiment"


@pytest.mark.parametrize(
    "text,words",
    [
        (b"STEPS = '\xe9'", "not UTF-8"),
        (b"include 'a.gin'", "which includes it"),
        (b"import os\n", "imports are refused"),
        (b"\ninclude 'gs://bucket/b.gin'", "a.gin:2: includes gs://bucket/b.gin: a local file is expected"),
        (b"include '/dev/zero'", "a.gin:1: includes /dev/zero: a pipe, device or socket"),
        (b"include 'fifo'", "a.gin:1: includes fifo: a pipe, device or socket"),
        (b"include 'b.gin'", "a.gin:1: includes b.gin: no such gin file"),
    ],
)
def test_gin_files_of_strangers_are_only_read(tmp_path, monkeypatch, text, words):
    """A hostile gin file is refused if it imports a module, or includes a remote file, a device or itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gin").write_bytes(text)
    os.mkfifo("fifo")
    with pytest.raises(InputError, match=words):
        configuration.load(["a.gin"])


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_a_gin_file_of_a_windows_editor_is_read(tmp_path, ends):
    """Files with a byte order mark, and with Unix or Windows line ends, are read."""
    lines = [b"TrainingConfig.steps = 7", b"include 'b.gin'"]
    (tmp_path / "a.gin").write_bytes(codecs.BOM_UTF8 + ends.join(lines).replace(b"b.gin", bytes(tmp_path / "b.gin")))
    (tmp_path / "b.gin").write_bytes(codecs.BOM_UTF8 + b"TrainingConfig.seed = 5" + ends)
    configuration.load([str(tmp_path / "a.gin")])
    assert "TrainingConfig.steps = 7" in configuration.text() and "TrainingConfig.seed = 5" in configuration.text()


def test_files_that_include_each_other_twice_are_refused(tmp_path, monkeypatch):
    """If 30 files each include the next file twice, gin would read the last file 2^30 times."""
    monkeypatch.chdir(tmp_path)
    for number in range(30):
        (tmp_path / f"{number}.gin").write_text(f"include '{number + 1}.gin'\n" * 2)
    (tmp_path / "30.gin").write_text("")
    with pytest.raises(InputError, match="at most 131072 characters with its includes"):
        configuration.load(["0.gin"])


# === Our parser and gin's parser agree ===

# Texts with a statement that quotes, continued lines or comments hide, or only seem to hide.
TEXTS = (
    "STEPS = 'include'",
    "STEPS = '''\ninclude 'part.gin'\n'''",
    'STEPS = """\n include "other.gin"\n"""',
    'STEPS = "\\\nimport os"',
    "STEPS = \\\n  [(\n 'a' 'b',  # include 'part.gin'\n), %BATCH]",
    "TrainingConfig.keep =\t{@WarmupPoly: -1e-3}",
    "include 'part.gin'\nSTEPS = 5",
    "include 'pa' 'rt.gin'",
    "include \\\n  'other.gin'",
    "#\\\ninclude 'part.gin'",
    "TrainingConfig:\n  steps = %STEPS\n\n  # include 'part.gin'\n  batch = -3",
)
REFUSED = (
    "STEPS = r'\\'\ninclude 'part.gin'",
    "  # '''\nimport os",
    "from __gin__ import dynamic_registration",
    "include 'missing.gin'",
)
FILES_OF = {"part.gin": "BATCH = 7\n", "other.gin": "include 'part.gin'\nRATE = 1e-3\n"}
# This text sets and uses every macro, so that few of the texts are refused because of a macro's name.
NAMES = "STEPS = 1\nBATCH = 2\nRATE = 3\nModelConfig.name = [%STEPS, %BATCH, %RATE, @TrainingConfig()]\n"


class _Imported(Exception):
    """Raised when gin would import a module."""


def _refuse_import(*_):
    raise _Imported


@pytest.mark.parametrize("text", [*TEXTS, *REFUSED])
def test_gin_reads_the_same_statements(text):
    """For every text that `load` accepts, gin's parser gives the same configuration and imports nothing."""
    files = {"main.gin": NAMES + text, **FILES_OF}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "find_file", lambda name: name if name in files else refuse(name))
        patch.setattr(recipes, "read_text", files.__getitem__)
        patch.setattr(gin.config.ParseContext, "process_import", _refuse_import)
        patch.setattr(gin.config, "parse_config_file", lambda name, _: parse(files[name]))
        try:
            configuration.load(["main.gin"])
        except InputError as error:
            assert text in REFUSED and "\n" not in str(error)
            return
        assert text in TEXTS
        loaded = configuration.text()
        gin.clear_config()
        with gin.unlock_config():
            parse(files["main.gin"])
        assert gin.config_str() == loaded


def parse(text):
    gin.parse_config(text)  # gin's own reader


def refuse(name):
    raise InputError(f"{name}: no such gin file")


def test_only_a_run_may_have_a_macro_without_a_use(sample_dir, tmp_path):
    """A binding replaces the only use of MODEL. A run's config.gin loads, and the same text as a user's file fails."""
    configuration.load(["sample/overfit.gin"], ["ModelConfig.name = 'axial_deeplab_nano'"])
    configuration.save(str(tmp_path), NUCLEI)
    path = tmp_path / "config.gin"
    configuration.load([str(path)])
    assert configuration.query("ModelConfig.name", None) == "axial_deeplab_nano"
    (tmp_path / "spec.json").unlink()  # the file is now a user's, not a run's
    with pytest.raises(InputError, match=r"config.gin:\d+: the macro 'MODEL' is not used anywhere"):
        configuration.load([str(path)])


def test_splits_of_a_recipe_are_replaced_aloud(sample_dir, capsys):
    """The data lacks the recipe's splits 'train' and 'val'. Other splits replace them, each with a printed line."""
    configuration.load(["own/axial_deeplab_nano.gin"])
    task, *_ = configuration.build(data_dir=sample_dir)
    assert (task.data.train_split, task.data.eval_split) == ("train2017", "val2017")
    assert capsys.readouterr().err.splitlines() == [
        f"{sample_dir}: has no split '{name}' of the recipe; '{name}2017' takes its place" for name in ("train", "val")
    ]


@pytest.mark.parametrize("macro,split", [("TRAIN_SPLIT", "train2071"), ("DataConfig.eval_split", "val2071")])
def test_splits_of_the_user_are_never_replaced(sample_dir, tmp_path, macro, split):
    """A split that the user binds, in a file or by a flag, is refused if the data lacks it."""
    (tmp_path / "mine.gin").write_text(f"include 'own/axial_deeplab_nano.gin'\n{macro} = '{split}'\n")
    for given in ([str(tmp_path / "mine.gin")], []), (["own/axial_deeplab_nano.gin"], [f"{macro} = '{split}'"]):
        configuration.load(*given)
        with pytest.raises(InputError, match=f"no split '{split}', the folder has train2017, val2017 .did you mean"):
            configuration.build(data_dir=sample_dir)
