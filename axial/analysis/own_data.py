"""Advises how to train on a user's data set: bindings of the recipe `RECIPE`, derived from the photos."""

import contextlib
import dataclasses
import json
import math
import os
import shlex

import numpy as np
import tensorflow as tf

from axial.analysis import step_cost
from axial.data.tfrecord import is_labelled
from axial.errors import InputError
from axial.io import gfile
from axial.io.show import broken, say
from axial.tasks.segmentation.grouping import PostprocessConfig, most_centers

RECIPE = "own/axial_deeplab_nano.gin"
SPLITS = {"TRAIN_SPLIT": "train", "EVAL_SPLIT": "val"}  # splits of the recipe
BATCH = 8  # batch of the recipe
_SCOPE = f"{PostprocessConfig.__name__}."  # prefix of PostprocessConfig's bindings
EPOCHS = 40  # epochs; 33 in camvid/panoptic.gin, 52 in nuclei/axial_deeplab_nano.gin
LEAST_STEPS, MOST_STEPS = 500, 20_000
OBJECT = 24  # side of a median object on the canvas, in pixels, if photos have one scale; as in nuclei/panoptic.gin
SMALL = 16  # side of small objects on the canvas, in pixels: four of the network's output pixels
SHORT, LONG = 257, 513  # bounds of the canvas's longer side
TILE, CROP = (641, 641), (193, 193)  # largest canvas and training crop, if photos have one scale
ALIKE, VARIED = 2.0, 1.5  # 90th / 10th percentile: largest for object sizes, smallest for photo sizes


@dataclasses.dataclass(frozen=True)
class Advice:
    """Settings that suit a data set.

    Attributes:
        bindings: dict from macros of the recipe to values.
        crop: (height, width) of the network's input in training.
        steps: steps of the training.
        why: reason for the canvas or the scale.
    """

    bindings: dict
    crop: tuple
    steps: int
    why: str

    def command(self, data_dir, model_dir="RUN"):
        """The training command."""
        values = {k: json.dumps(v) if isinstance(v, str) else repr(v) for k, v in self.bindings.items()}
        bindings = [f"--gin_binding={shlex.quote(f'{name} = {value}')}" for name, value in values.items()]
        folders = f"--data_dir={shlex.quote(data_dir)}", f"--model_dir={model_dir}"
        return " ".join(["axial-train", f"--gin_file={RECIPE}", *bindings, *folders])


def advise(checks, names):
    """Derives the `Advice` for a data set.

    If all objects have about one size and photos have several sizes, all photos are scaled by one factor: a microscope
    or a drone decides how many pixels an object has. Otherwise each photo is fitted to a canvas on which small objects
    are visible.

    Args:
        checks: `SplitCheck`s of some splits, without errors.
        names: names of all splits of the data set.
    """
    splits = {check.split: check for check in checks}
    train, others = next((split for split in splits if split.startswith("train")), checks[0].split), sorted(names)
    others = [split for split in [*splits, *others] if split != train]
    evaluated = next((split for split in others if split.startswith("val")), others[0] if others else train)
    check = splits[train]
    steps = math.ceil(EPOCHS * check.photos / BATCH / 100) * 100
    bindings = {"STEPS": min(max(steps, LEAST_STEPS), MOST_STEPS)}
    sizes = np.sqrt([height * width for height, width in check.sizes])
    objects = [np.median(sides) for sides in check.objects if len(sides)]
    if len(objects) > 1 and _spread(objects) <= ALIKE and _spread(sizes) >= VARIED:
        scale = float(f"{min(max(OBJECT / np.median(objects), 0.1), 2.0):.2g}")
        bindings |= {"PHOTO_SCALE": scale, "CROP": CROP, "CANVAS": TILE}
        crop = CROP
        why = f"objects have about one size, {np.median(objects):.0f} pixels, and photos do not: all get one scale"
    else:
        crop = bindings["CANVAS"] = _canvas(check)
        small = f", on which small objects have {SMALL} pixels if there is room" if objects else ""
        why = f"photos are fitted to a canvas of their median shape{small}"
    splits_used = {"TRAIN_SPLIT": train, "EVAL_SPLIT": evaluated}
    bindings |= {name: split for name, split in splits_used.items() if split != SPLITS[name]}
    return Advice(bindings, crop, bindings["STEPS"], why)


def crowding(checks, canvas, recipe):
    """A line that compares the largest number of objects in a photo with the number that the recipe can find.

    Args:
        checks: see `advise`.
        canvas: (height, width) of the network's input.
        recipe: `Recipe`.

    Returns:
        The line, and whether the photo has more objects than the recipe can find.
    """
    most = max((len(sides) for check in checks for sides in check.objects), default=0)
    knobs = {name.removeprefix(_SCOPE): value for name, value in recipe.bindings.items() if name.startswith(_SCOPE)}
    config, spec = dataclasses.replace(PostprocessConfig(), **knobs), checks[0].spec
    room = most_centers(canvas, config, spec)
    why = f", by its pixels, PostprocessConfig.nms_kernel and the label_divisor {spec.label_divisor} of the spec"
    line = f"Photos have up to {most} objects; with PostprocessConfig.top_k = {config.top_k} a canvas has room for"
    return f"{line} {room}{why if most > room else ''}", most > room


def print_advice(data_dir, checks, recipe):
    """Prints the command that trains on a checked data set by the `Recipe` of `RECIPE`, and its time and memory."""
    names = []
    for path in gfile.glob(os.path.join(data_dir, ""), "*.json"):
        with contextlib.suppress(InputError):  # the file is not a manifest
            name = os.path.basename(path)[:-5]
            names += [name] * is_labelled(data_dir, name)
    advice = advise(checks, names)
    products, memory = step_cost.read_steps()[recipe.model].training_cost(advice.crop, BATCH)
    device, rate = "GPU" if tf.config.list_physical_devices("GPU") else "CPU", step_cost.rate()
    line, too_many = crowding(checks, advice.bindings["CANVAS"], recipe)
    say(line, error=too_many)
    say(f"To train on them ({advice.why}):", *broken(advice.command(data_dir)))
    seconds, memory = advice.steps * products / rate, memory + step_cost.resident()
    takes = f"about {step_cost.duration(seconds)} on this machine's {device}, and up to {memory / 1e9:.1f} GB of memory"
    counts = f"Each of {advice.steps} steps has {products / 1e9:.0f} billion multiply-adds, as counted"
    say(f"This takes {takes}. {counts}; a residual block did {rate / 1e9:.0f} billion a second just now.")


def _spread(values):
    """Ratio of the 90th to the 10th percentile."""
    low, high = np.percentile(values, [10, 90])
    return high / low


def _canvas(check):
    """(height, width) of the canvas for the photos of a split."""
    height, width = np.median(np.array(check.sizes), 0)
    sides = np.concatenate([*check.objects, []])
    longer = max(height, width)
    target = longer * SMALL / np.percentile(sides, 25) if len(sides) else SHORT
    target = min(max(target, SHORT), LONG, longer)
    # The nearest 16 k + 1, at least 65: the output stride 16 and all smaller strides divide such a side minus 1.
    return tuple(max(16 * round((side * target / longer - 1) / 16) + 1, 65) for side in (height, width))
