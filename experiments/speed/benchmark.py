"""Measures our form of attention, the textbook's form and ResNet-101 on this machine: seconds and memory (minutes).

%s                      of layers and of Axial-ResNet-L
%s --suite=study        each mechanism of the spatial-attention study against a 3x3 convolution and its naive form
%s --suite=runtime      the models of the paper's Table 8, one image at a time
%s --suite=scaling --figure=scaling.png
                        a layer over image size and span
%s --suite=systems      the study's Transformer and Mask R-CNN beside tf-models-official's

All forms of one work run in one process, in turn, round by round. Other load on the machine then slows all of them
alike. Read the ratios, not the seconds. Peak memory is measured in a process of its own for each form, above what that
process holds before its first step.
"""

import functools
import importlib
import os
import platform
import statistics
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf
import tf_keras as keras

from axial.cli import app, flags
from axial.cli.flags import Flag, Flags
from axial.errors import InputError
from axial.io.show import print_table, say, working
from axial.io.write import write_whole
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import AxialPair
from axial.models.axial_deeplab.axial_resnet import AxialResNet, AxialResNetOptions
from axial.models.classifier import Classifier
from axial.models.registry import build_model
from textbook import TextbookPair

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "paper"))
from published import ROWS

report = functools.partial(say, error=True)
NORM = BatchNormConfig()
PAIRS = {  # images, height, width, channels of a height and a width layer
    "65": (1, 65, 129, 512),  # stage 4 of Axial-DeepLab-L at 1025x2049
    "56": (8, 56, 56, 128),  # stage 2 of Axial-ResNet-L at 224x224
    "14": (8, 14, 14, 512),  # stage 4
}
TRAIN = ("ours", "textbook", "bfloat16")
# The works, each with its forms. 'bfloat16' is our form in mixed_bfloat16; all other forms are float32.
# 'recompute_block' is our form with recompute='block'.
WORKS = {
    "layer_train": TRAIN,
    "layer_train_56": TRAIN,
    "layer_train_14": TRAIN,
    "layer": ("folded", "ours", "textbook"),
    "model_train": (*TRAIN, "recompute_block", "resnet101"),
    "model": ("folded", "ours", "textbook", "resnet101"),
    "model_batch1": ("folded", "ours", "textbook", "resnet101"),
}
QUICK = ("layer_train", "layer_train_56", "model_batch1")
MODULES = {"study": "study_speed", "scaling": "scaling", "systems": "systems"}  # of the other suites


# === Forms ===


class TextbookResNet(AxialResNet):
    """Axial-ResNet-L of textbook layers."""

    def make_pair(self, channels, place):
        return TextbookPair(channels, 2 * channels, self.norm, place.strides, name="attention")


def make_layer(form, images):
    """A height and a width layer for `images`, both built."""
    channels = images.shape[3]
    pair_class = TextbookPair if form == "textbook" else AxialPair
    layer = pair_class(channels // 2, channels, None if form == "folded" else NORM, name="pair")
    layer(images)
    return layer


def make_model(form, images, training):
    """Axial-ResNet-L, of our layers or of the textbook's, or ResNet-101, built. In inference ResNet-101 is folded."""
    norm = None if form == "folded" or (form == "resnet101" and not training) else NORM
    if form == "textbook":
        options = AxialResNetOptions(stem="imagenet", output_stride=32)
        model = Classifier(TextbookResNet(options, NORM), 1000)
    elif form == "resnet101":
        model = build_model("resnet_101", 1000, norm)
    else:
        recompute = "block" if form == "recompute_block" else "none"
        model = build_model("axial_resnet_l", 1000, norm, recompute=recompute)
    model(images[:1])
    return model


def make_step(work, form):
    """A function without arguments that runs one step of a work in one form and waits for its end."""
    size = (1 if work.endswith("batch1") else 8, 224, 224, 3)
    if work.startswith("layer"):
        size = PAIRS[work.rsplit("_", 1)[1] if work[-1].isdigit() else "65"]
    images = tf.random.stateless_normal(size, [0, 0])
    training = "train" in work
    keras.mixed_precision.set_global_policy("mixed_bfloat16" if form == "bfloat16" else "float32")
    layer = make_layer(form, images) if work.startswith("layer") else make_model(form, images, training)
    keras.mixed_precision.set_global_policy("float32")
    if training:
        return training_step(layer, images, input_gradient=work.startswith("layer"))
    return inference_step(layer, images)


def inference_step(layer, images):
    """A function without arguments that runs a layer or model and waits for its end."""
    function = tf.function(layer, autograph=False)
    return lambda: [t.numpy().ravel()[:1] for t in tf.nest.flatten(function(images))[:1]]


def training_step(layer, images, input_gradient=True):
    """A function without arguments that runs one training step of a layer and waits for its end.

    Args:
        layer: a built layer.
        images: its input.
        input_gradient: whether the gradient of the images is computed too.
    """

    function = tf.function(training_function(layer, input_gradient), autograph=False)
    return lambda: float(function(images)[0])


def training_function(layer, input_gradient=True):
    """A function of images that returns the loss of one training step of a layer and its gradients, as a list.

    Args: see `training_step`.
    """

    def train(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = tf.nest.flatten(layer(x, training=True))
            loss = tf.add_n([tf.reduce_mean(tf.square(tf.cast(y, tf.float32))) for y in outputs])
        sources = [x] if input_gradient else []
        gradients = tape.gradient(loss, [*sources, *layer.trainable_weights])
        return [loss, *(tf.convert_to_tensor(g) for g in gradients)]

    return train


# === Measures ===


def measure(forms, make, rounds, peak=None):
    """Times a step of each form, round by round, in turn. Each first runs twice to warm up.

    Args:
        forms: names or tuples.
        make: function of a form that returns its step, a function without arguments.
        rounds: how often each step is timed.
        peak: `peak_memory`'s argument with '{!r}' in the place of the form; None if memory is not measured.

    Returns:
        dict from forms to dicts of 'median_s', 'quartiles_s' and, with `peak`, 'peak_bytes'.
    """
    found = {form: {} for form in forms}
    for form in forms if peak else ():  # before the steps, with which this process holds gigabytes
        report(f"{form}: peak memory")
        found[form]["peak_bytes"] = peak_memory(peak.format(form))
    steps, seconds = {form: make(form) for form in forms}, {form: [] for form in forms}
    for form, step in steps.items():
        report(f"{form}: warming up")
        step(), step()
    for _ in range(rounds):
        for form, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[form].append(time.perf_counter() - started)
    for form, times in seconds.items():
        found[form] |= {"median_s": statistics.median(times), "quartiles_s": np.percentile(times, [25, 75])}
    return found


def peak_memory(step):
    """Bytes that two runs of a step need at their peak, measured in a process of its own.

    Args:
        step: 'MODULE:EXPRESSION', where the expression is of the module and returns the step.
    """
    module, _, expression = step.partition(":")
    code = f"import {module} as module; import benchmark; benchmark.print_peak(module.{expression})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return int(done.stdout.split()[-1])


def print_peak(step):
    """Prints the bytes that two runs of `step` need in addition to what the process holds."""

    def resident(name):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak, so that it does not include building the model
    step(), step()
    say(resident("VmHWM") - before)


def benchmark(quick=False):
    """(works, ratios): work -> form -> what `measure` returns, and the ratios by their names.

    Args:
        quick: whether to measure only the works of `QUICK`, in few rounds.
    """
    works = {}
    for work in QUICK if quick else WORKS:
        peak = f"benchmark:make_step({work!r}, {{!r}})" if "train" in work else None
        rounds = 7 if quick else 5 if work == "model_train" else 15
        works[work] = measure(WORKS[work], functools.partial(make_step, work), rounds, peak)
    return works, ratios(works)


def runtime(quick=False):
    """(works, ratios) of the models of Table 8 in inference: one image of 224x224, 1000 logits, batch norms folded.

    Args:
        quick: whether to time 5 rounds, as many as the paper, in place of 15.
    """
    image = tf.random.stateless_normal([1, 224, 224, 3], [0, 0])
    rows = {row.model: row for row in ROWS if row.table == 8 and row.model}

    def make(name):
        model = build_model(name, 1000, None)
        model(image)
        return inference_step(model, image)

    works, found = {"runtime": measure(rows, make, 5 if quick else 15)}, {}
    for name, row in rows.items():
        found[f"{name} over resnet_101"] = over(works, "runtime", name, "resnet_101")
        found[f"{name} over resnet_101, published"] = row.scores["ms"] / rows["resnet_101"].scores["ms"]
    return works, found


def over(works, work, a, b, key="median_s"):
    """How many times that of form `b` a measure of form `a` is."""
    return works[work][a][key] / works[work][b][key]


def ratios(works):
    """dict of the ratios that the pages have. A speedup is the textbook's time over ours."""
    found = {}
    for work in works:
        if "train" in work:
            found[work.replace("_train", "_train_speedup")] = over(works, work, "textbook", "ours")
            found[work.replace("_train", "_train_memory_ratio")] = over(works, work, "ours", "textbook", "peak_bytes")
            found[work.replace("_train", "_train_bfloat16_speedup")] = over(works, work, "ours", "bfloat16")
    found["folded_speedup"] = over(works, "model_batch1", "ours", "folded")
    found["folded_textbook_speedup"] = over(works, "model_batch1", "textbook", "folded")
    found["folded_vs_resnet101"] = over(works, "model_batch1", "folded", "resnet101")
    return found


def show(works, ratios):
    """Prints the machine, the seconds and the peak memory of each form of each work, and the ratios."""
    rows = []
    for work, forms in works.items():
        for form, found in forms.items():
            times = [found["median_s"], *found["quartiles_s"]] if "median_s" in found else []
            median, *quartiles = [f"{seconds:.4f}" for seconds in times] or [""]
            peak = f"{found['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in found else ""
            rows.append((work, str(form), median, " - ".join(quartiles), peak))
    title = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}"
    print_table(("work", "form", "median s", "quartiles", "peak GB"), rows, title=title)
    say(*(f"{key}: {value:.2f}" for key, value in ratios.items()))


class Benchmark(Flags):
    suite = Flag(str, "what is measured.", "axial", choices=("axial", "runtime", *MODULES))
    quick = Flag(bool, "fewer works and rounds.", False)
    figure = flags.FIGURE.but(meaning="picture of --suite=scaling to draw, .png or .jpg.")

    def check(self):
        if self.figure and self.suite != "scaling":
            raise InputError("--figure needs --suite=scaling")


def _main(given):
    suite = {"axial": benchmark, "runtime": runtime}.get(given.suite)
    with working(f"measuring the suite {given.suite} on this machine: minutes"):
        works, found = (suite or importlib.import_module(MODULES[given.suite]).benchmark)(given.quick)
    show(works, found)
    if given.figure:
        write_whole(given.figure, lambda path: importlib.import_module(MODULES[given.suite]).draw(works, path))


if __name__ == "__main__":
    app.run({"": (Benchmark, _main)})
