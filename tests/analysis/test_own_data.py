"""The advice for a data set: steps, canvas or scale, splits, and a command that runs."""

import shlex
import types

import gin
import numpy as np
import pytest

from axial.analysis import own_data
from axial.analysis.own_data import advise
from axial.recipes import configuration, read_recipe


def check(sizes, side, split="train"):
    """A `SplitCheck` of photos with the given sizes. Photo i has four objects of side `side(i)`."""
    objects = [np.full(4, side(i)) if side else np.zeros(0) for i in range(len(sizes))]
    return types.SimpleNamespace(split=split, photos=len(sizes), sizes=sizes, objects=objects)


def test_the_recipe_is_as_this_module_says():
    bindings = read_recipe(own_data.RECIPE).bindings
    assert bindings["BATCH"] == own_data.BATCH and bindings["INIT"] == "nuclei"
    assert {name: bindings[name] for name in own_data.SPLITS} == own_data.SPLITS


def test_photos_of_several_sizes_with_objects_of_one_keep_their_scale():
    sizes = [(256, 256), (520, 696), (1024, 1024)] * 100
    advice = advise([check(sizes, lambda i: 15 + i % 3)], ["train", "val"])
    assert advice.bindings["PHOTO_SCALE"] == 1.5 == own_data.OBJECT / 16 and advice.crop == (193, 193)
    assert advice.steps == 1500 == own_data.EPOCHS * 300 / own_data.BATCH


@pytest.mark.parametrize(
    "sizes,side,canvas",
    [
        ([(480, 640)] * 50, lambda i: 100, (193, 257)),  # with large objects, the canvas is the smallest one
        ([(480, 640)] * 50, lambda i: 25, (305, 417)),  # an object shrinks from 25 to 16 pixels
        ([(480, 640)] * 50, None, (193, 257)),  # no things
        ([(100, 120)] * 50, lambda i: 5, (97, 113)),  # the canvas is no larger than the photos
        ([(300, 300), (900, 900)] * 25, lambda i: 20 + 100 * (i % 2), (481, 481)),  # sizes of photos and objects vary
    ],
)
def test_other_photos_are_fitted_to_a_canvas(sizes, side, canvas):
    advice = advise([check(sizes, side)], ["train", "val"])
    assert "PHOTO_SCALE" not in advice.bindings
    assert all(abs(a - b) <= 16 for a, b in zip(advice.crop, canvas)) and advice.crop == advice.bindings["CANVAS"]
    assert all(value % 16 == 1 for value in advice.crop)


@pytest.mark.parametrize("photos,steps", [(1, 500), (101, 600), (10**5, 20_000)])
def test_steps_follow_the_number_of_photos(photos, steps):
    assert advise([check([(64, 64)] * photos, None)], []).steps == steps


@pytest.mark.parametrize(
    "checked,names,bound",
    [
        (["train", "val"], ["train", "val"], {}),
        (["train"], ["train", "val", "test"], {}),
        (["train"], ["train", "test"], {"EVAL_SPLIT": "test"}),
        (["train"], ["train"], {"EVAL_SPLIT": "train"}),
        (["val2017", "train2017"], [], {"TRAIN_SPLIT": "train2017", "EVAL_SPLIT": "val2017"}),
        (["mine"], ["mine", "it's $HOME"], {"TRAIN_SPLIT": "mine", "EVAL_SPLIT": "it's $HOME"}),
    ],
)
def test_splits_are_named_where_they_are_not_the_recipes(checked, names, bound):
    advice = advise([check([(64, 64)] * 9, None, split) for split in checked], names)
    assert {name: value for name, value in advice.bindings.items() if "SPLIT" in name} == bound
    words = shlex.split(advice.command("/data/of mine"))
    assert words[:2] == ["axial-train", f"--gin_file={own_data.RECIPE}"] and words[-1] == "--model_dir=RUN"
    assert words[-2] == "--data_dir=/data/of mine"
    configuration.load([own_data.RECIPE], [word.partition("=")[2] for word in words[2:-2]])
    for name, value in advice.bindings.items():
        assert gin.query_parameter(f"{name}/gin.macro.value") == value
