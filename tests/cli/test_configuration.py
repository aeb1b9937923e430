"""Every gin file parses, and every leaf trains one step together with a file of tiny/."""

import pathlib
import re

import pytest

from axial.cli import configuration
from axial.errors import InputError

ROOT = pathlib.Path(configuration.experiments_dir())
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.gin"))
# The recipes that leaves include have these names. Of each such file:
# a leaf of another folder, and the model of its tiny twin.
RECIPES = {
    "panoptic": ("sample/overfit.gin", "axial_deeplab_nano"),
    "classification": ("imagenet/axial_resnet_s.gin", "axial_resnet_nano"),
    "segmentation": ("cityscapes/ccnet.gin", "ccnet_nano"),
    "detection": ("sample/detection_overfit.gin", "faster_rcnn_resnet_nano"),
    "translation": ("multi30k/transformer_nano.gin", "transformer_nano"),
}
LEAVES = [name for name in FILES if pathlib.Path(name).stem not in RECIPES]


def recipe_of(name):
    """Which of `RECIPES` a file is, or a leaf includes, maybe by another leaf."""
    if pathlib.Path(name).stem in RECIPES:
        return pathlib.Path(name).stem
    return recipe_of(re.search("^include '(.+)'$", (ROOT / name).read_text(), re.M)[1])


CLASSIFIERS = [name for name in LEAVES if recipe_of(name) == "classification"]
DETECTORS = [name for name in LEAVES if recipe_of(name) == "detection"]
TRANSLATORS = [name for name in LEAVES if recipe_of(name) == "translation"]
PANOPTIC = [name for name in LEAVES if recipe_of(name) == "panoptic"]


@pytest.mark.parametrize("name", FILES)
def test_every_file_parses(name):
    # A recipe lacks the macros that its leaves set. So it is loaded after a leaf, as are the files of tiny/.
    configuration.load([RECIPES[recipe_of(name)][0], name] if name not in LEAVES else [name])


def slow_but_one():
    """Every leaf. All but one are marked slow: tests of commands train the twins of the other recipes."""
    quick = next(name for name in LEAVES if recipe_of(name) == "segmentation")
    return [name if name == quick else pytest.param(name, marks=pytest.mark.slow) for name in LEAVES]


@pytest.mark.parametrize("name", slow_but_one())
def test_every_leaf_trains_a_step_of_its_tiny_twin(name, command, request, tmp_path):
    recipe = recipe_of(name)
    data = {"classification": "colours_dir", "translation": "texts_dir"}
    data_dir = request.getfixturevalue(data.get(recipe, "sample_dir"))
    files = (f"--gin_file={name}", f"--gin_file=tiny/{recipe}.gin")
    result = command("train", *files, f"--data_dir={data_dir}", f"--model_dir={tmp_path}")
    assert result.code == 0, result.err
    assert (tmp_path / "ckpt-1.index").exists()
    assert RECIPES[recipe][1] in (tmp_path / "operative_config.gin").read_text()


@pytest.mark.parametrize("name", LEAVES)
def test_every_leaf_says_its_command(name):
    header = [line for line in (ROOT / name).read_text().splitlines() if line.startswith("#")]
    assert any("axial-train" in line for line in header)


def test_bad_input_is_named_without_the_words_of_gin(tmp_path):
    configuration.load(["sample/overfit.gin"])
    with pytest.raises(InputError) as error:
        configuration.build(data_dir=str(tmp_path / "none"))
    assert str(tmp_path / "none") in str(error.value) and "configurable" not in str(error.value)


@pytest.mark.parametrize("binding", ["PanopticTask.memory = 'kernel'", "PanopticTask.canvas = (65, 65)"])
def test_arguments_of_version_0_1_are_named(binding):
    with pytest.raises(InputError, match=r"is (Model|Data)Config\.\w+.* since axial 0\.2 \(CHANGELOG\.md\)"):
        configuration.load(["sample/overfit.gin"], [binding])


WRONG = {
    "MODEL = %MODEL": "the macro 'MODEL' is set to itself",
    "CANVAS = (0, 0)": r"DataConfig.canvas = \(0, 0\): expected int >= 1 \(in \[0\]\)",
    "CANVAS = (65,)": "expected tuple of length 2, got 1",
    "CANVAS = ('a', 'b')": "expected int, got str",
    "LossConfig.stride = 0": "expected int >= 1",
    "DataConfig.shuffle = -1": "expected int >= 0",
    "MODEL = 'resnet_50'": "for classification; a model for panoptic is expected",
    "ModelConfig.norm = 5": "expected @BatchNormConfig",
    "INIT = 5": "init_checkpoint = 5: expected str",
    "DataConfig.augmentation = None": "expected @Augmentation",
    "STEPS = (1": "not gin's syntax",
    "STEPS = True": "expected int, got bool",
    "BatchNormConfig.momentum = 5": "expected float < 1.0",
    "Augmentation.scales = (2, 1)": r"expected \(smallest, largest\)",
    "Augmentation.scales = (0, 0)": "expected float > 0.0",
    "Augmentation.flip = 'maybe'": "expected bool, got str",
    "PostprocessConfig.center_threshold = 1e999": "expected float <= 1.0",
    "PostprocessConfig.stuff_area = -1": "expected int >= 0",
    "TrainingConfig.precision = 'mixed_bfloat'": "did you mean 'mixed_bfloat16'",
    "experiment.optimizer = 5": "expected @RAdamLookahead",
    "RAdamLookahead.learning_rate = @WarmupPoly": r"expected a number >= 0 or a schedule, like @WarmupPoly\(\)",
    "RAdamLookahead.learning_rate = @BatchNormConfig()": "RAdamLookahead.learning_rate = BatchNormConfig",
    "RAdamLookahead.learning_rate = None": "RAdamLookahead.learning_rate = None: expected a number",
    "PanopticTask.model = @PanopticTask()": "an argument of itself",
    "from os import path": "imports are refused",
    "STEPS = " + "(" * 3000: "not gin's syntax",
}


@pytest.mark.parametrize("binding", WRONG, ids=lambda b: b[:40])
def test_wrong_values_are_named(binding, sample_dir):
    with pytest.raises(InputError, match=WRONG[binding]) as caught:
        configuration.load(["sample/overfit.gin"], [binding])
        configuration.build(data_dir=sample_dir)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text,words",
    [
        (b"STEPS = '\xe9'", "not UTF-8"),
        (b"include 'a.gin'", "which includes it"),
        (b"import os\n", "imports are refused"),
    ],
)
def test_gin_files_of_strangers_are_only_read(tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gin").write_bytes(text)
    with pytest.raises(InputError, match=words):
        configuration.load(["a.gin"])
