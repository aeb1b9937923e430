"""Measures time and memory of axial's attention, its textbook form and ResNet-101 on this machine (minutes).

%s                      attention layers, Axial-ResNet-L and ResNet-101
%s --suite=study        each mechanism of the spatial-attention study, a 3x3 convolution and naive forms
%s --suite=runtime      the models of the paper's Table 8 with batch size 1
%s --suite=scaling --figure=scaling.png
                        an attention layer for several image sizes and spans
%s --suite=predict      axial-predict, and its network alone
%s --suite=peers        attention layers and Axial-ResNet-L, and csrhddlam/axial-deeplab in PyTorch
%s --suite=systems      the study's Transformer and Mask R-CNN, and the models of tf-models-official

All forms (implementations) of a workload run in one process. Each round runs every form once, so that other load on the
machine slows all forms alike. The ratios are meaningful, the seconds are not. Each form's peak memory is measured in a
separate process, relative to the memory of that process before the first step.
"""

import concurrent.futures
import functools
import importlib
import multiprocessing
import os
import platform
import statistics
import sys
import time

import numpy as np
import tensorflow as tf
import tf_keras as keras

from axial.cli import app, flags
from axial.cli.flags import Flag, Flags
from axial.errors import InputError
from axial.io.show import drawn, print_table, say, working
from axial.io.write import write_whole
from axial.layers.attention.layer import AxialAttention
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import AxialPair
from axial.models.axial_deeplab.axial_resnet import AxialResNet, AxialResNetOptions
from axial.models.classifier import Classifier
from axial.models.registry import build_model
from textbook import TextbookPair
from torch_steps import resident

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "paper"))
from published import ROWS

report = functools.partial(say, error=True)
NORM = BatchNormConfig()
PAIRS = {  # images, height, width and channels of the input of an `AxialPair`
    "65": (1, 65, 129, 512),  # stage 4 of Axial-DeepLab-L at 1025x2049
    "56": (8, 56, 56, 128),  # stage 2 of Axial-ResNet-L at 224x224
    "14": (8, 14, 14, 512),  # stage 4
}
TRAIN = ("ours", "textbook", "bfloat16")
# dict from each workload to its forms. 'ours' is axial's form in float32, like all forms but 'bfloat16', which is
# axial's form in mixed_bfloat16. 'folded' is 'ours' with folded batch norms; 'recompute_block' has recompute='block'.
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
# Suites in other modules.
MODULES = {"peers": "peers", "predict": "predict_speed", "study": "study_speed", "systems": "systems"}
SIZES = (257, 513, 1025, 2049)  # widths of the images of --suite=scaling
SPANS = (None, 129, 65, 17)
ROWS_OF_STRIP, CHANNELS = 32, 64


# === Forms ===


class TextbookResNet(AxialResNet):
    """Axial-ResNet-L with the textbook form of attention."""

    def make_pair(self, channels, block):
        return TextbookPair(channels, 2 * channels, self.norm, block.strides, name="attention")


def size_of(work):
    """Returns the size of a workload's input: images, height, width and channels."""
    if work.startswith("layer"):
        return PAIRS[work.rsplit("_", 1)[1] if work[-1].isdigit() else "65"]
    return (1 if work.endswith("batch1") else 8), 224, 224, 3


def make_step(work, form):
    """Returns a function without arguments that runs one step of a workload in one form and waits for the result.

    In inference, the batch norms of ResNet-101 are folded.
    """
    is_layer, training = work.startswith("layer"), "train" in work
    images = tf.random.stateless_normal(size_of(work), [0, 0])
    norm = None if form == "folded" or (form == "resnet101" and not training) else NORM
    keras.mixed_precision.set_global_policy("mixed_bfloat16" if form == "bfloat16" else "float32")
    if is_layer:
        pair_class = TextbookPair if form == "textbook" else AxialPair
        layer = pair_class(images.shape[3] // 2, images.shape[3], norm, name="pair")
    elif form == "textbook":
        options = AxialResNetOptions(stem="imagenet", output_stride=32)
        layer = Classifier(TextbookResNet(options, NORM), 1000)
    else:
        arguments = {"recompute": "block"} if form == "recompute_block" else {}
        layer = build_model("resnet_101" if form == "resnet101" else "axial_resnet_l", 1000, norm, **arguments)
    layer(images[:1])
    keras.mixed_precision.set_global_policy("float32")
    return training_step(layer, images, input_gradient=is_layer) if training else inference_step(layer, images)


def inference_step(layer, images):
    """Returns a function without arguments that runs a layer or model on `images` and waits for the result."""
    function = tf.function(layer, autograph=False)
    return lambda: [t.numpy().ravel()[:1] for t in tf.nest.flatten(function(images))[:1]]


def training_step(layer, images, input_gradient=True):
    """Returns a function without arguments that runs one training step of a layer and waits for the result.

    Args:
        layer: a built layer.
        images: the layer's input tensor.
        input_gradient: whether to compute the gradient of the images too.
    """

    function = tf.function(training_function(layer, input_gradient), autograph=False)
    return lambda: float(function(images)[0])


def training_function(layer, input_gradient=True):
    """Returns a function of images that returns a list: the loss of a training step, then the gradients of a layer.

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


def measure(forms, make, rounds, peak=False):
    """Times a step of each form. Each form first runs twice to warm up. Then each round times every form once.

    Args:
        forms: the forms to compare, strings or tuples.
        make: function of a form that returns the form's step, a function without arguments.
        rounds: number of times that each step is timed.
        peak: whether to measure peak memory too. `make` is then pickled.

    Returns:
        dict from each form to a dict of 'median_s', 'quartiles_s' and, with `peak`, 'peak_bytes'.
    """
    results = {form: {} for form in forms}
    for form in forms if peak else ():  # first, because the steps below take gigabytes of this process
        report(f"{form}: peak memory")
        results[form]["peak_bytes"] = peak_memory(make, form)
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
        results[form] |= {"median_s": statistics.median(times), "quartiles_s": np.percentile(times, [25, 75])}
    return results


def peak_memory(make, form):
    """Returns the peak memory in bytes of two runs of the step make(form), measured in a separate process."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak, make, form).result()


def _peak(make, form):
    """Returns the `peak_memory` of a form, measured in this process relative to its memory before the step."""
    step = make(form)
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets VmHWM, so that building the model does not count
    step(), step()
    return resident("VmHWM") - before


def benchmark(quick=False):
    """Returns (works, ratios): a dict from each workload to the result of `measure`, and a dict of ratios.

    Args:
        quick: whether to measure only the workloads in `QUICK`, in fewer rounds.
    """
    works = {}
    for work in QUICK if quick else WORKS:
        rounds = 7 if quick else 5 if work == "model_train" else 15
        works[work] = measure(WORKS[work], functools.partial(make_step, work), rounds, "train" in work)
    return works, ratios(works)


def runtime():
    """Returns (works, ratios) of inference with Table 8's models: a 224x224 image, 1000 logits, folded batch norms."""
    image = tf.random.stateless_normal([1, 224, 224, 3], [0, 0])
    rows = {row.model: row for row in ROWS if row.table == 8 and row.model}

    def make(name):
        model = build_model(name, 1000, None)
        model(image)
        return inference_step(model, image)

    works, ratios = {"runtime": measure(rows, make, 15)}, {}
    for name, row in rows.items():
        ratios[f"{name} over resnet_101"] = over(works, "runtime", name, "resnet_101")
        ratios[f"{name} over resnet_101, published"] = row.scores["ms"] / rows["resnet_101"].scores["ms"]
    return works, ratios


def scaling():
    """Returns (works, {}) for each image size and span. With a local span, time and memory are linear in the width.

    The workload is a training step of a layer that attends along the width of a strip. The strip is as wide as the
    image's feature map at stride 4: 65 to 513 pixels. Only attention layers depend on the span.
    """
    return {"strip": measure([(size, span) for size in SIZES for span in SPANS], strip_step, 9, peak=True)}, {}


def strip_step(case):
    """Returns a function without arguments that runs a training step for a case (image width in pixels, span)."""
    size, span = case
    images = tf.random.stateless_normal([1, ROWS_OF_STRIP, (size - 1) // 4 + 1, CHANNELS], [0, 0])
    layer = AxialAttention(CHANNELS // 2, CHANNELS, "width", span=span, name="attention")
    layer(images)
    return training_step(layer, images)


def over(works, work, a, b, key="median_s"):
    """Returns the ratio of form `a`'s measure `key` to form `b`'s, in the workload `work`."""
    return works[work][a][key] / works[work][b][key]


def ratios(works):
    """Returns a dict of the ratios that the result pages quote. A speedup is the baseline's time / the form's time."""
    results = {}
    for work in works:
        if "train" in work:
            results[work.replace("_train", "_train_speedup")] = over(works, work, "textbook", "ours")
            results[work.replace("_train", "_train_memory_ratio")] = over(works, work, "ours", "textbook", "peak_bytes")
            results[work.replace("_train", "_train_bfloat16_speedup")] = over(works, work, "ours", "bfloat16")
    results["folded_speedup"] = over(works, "model_batch1", "ours", "folded")
    results["folded_textbook_speedup"] = over(works, "model_batch1", "textbook", "folded")
    results["folded_vs_resnet101"] = over(works, "model_batch1", "folded", "resnet101")
    return results


def show(works, ratios):
    """Prints the machine, the time and peak memory of each form of each workload, and the ratios."""
    rows = []
    for work, forms in works.items():
        for form, measured in forms.items():
            times = [measured["median_s"], *measured["quartiles_s"]] if "median_s" in measured else []
            median, *quartiles = [f"{seconds:.4f}" for seconds in times] or [""]
            peak = f"{measured['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in measured else ""
            rows.append((work, str(form), median, " - ".join(quartiles), peak))
    title = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}"
    print_table(("work", "form", "median s", "quartiles", "peak GB"), rows, title=title)
    say(*(f"{key}: {value:.2f}" for key, value in ratios.items()))


def draw(works, path):
    """Writes a figure that plots time and memory over image width on logarithmic axes, with a line for each span."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    figure = Figure((9, 4), layout="constrained")
    for axes, key, label, unit in zip(
        figure.subplots(1, 2), ("median_s", "peak_bytes"), ("seconds a step", "peak memory, MB"), (1, 1e6)
    ):
        for span in dict.fromkeys(span for _, span in works["strip"]):
            points = {size: cost[key] / unit for (size, reach), cost in works["strip"].items() if reach == span}
            axes.loglog([*points], [*points.values()], "o-", label=drawn(f"span {span}" if span else "whole axis"))
        axes.set_xticks([*points])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.minorticks_off()
        axes.set_xlabel(drawn(f"width of the image, pixels; {ROWS_OF_STRIP} rows at stride 4"))
        axes.set_ylabel(drawn(label))
        axes.legend()
    figure.savefig(path)


class Benchmark(Flags):
    suite = Flag(str, "workloads to measure.", "axial", choices=("axial", "runtime", "scaling", *MODULES))
    quick = Flag(bool, "fewer workloads and rounds of --suite=axial.", False)
    figure = flags.FIGURE.but(meaning="picture of --suite=scaling to draw, .png or .jpg.")


def _main(given):
    if given.figure and given.suite != "scaling":
        raise InputError("--figure needs --suite=scaling")
    if given.quick and given.suite != "axial":
        raise InputError("--quick needs --suite=axial")
    suites = {"axial": functools.partial(benchmark, given.quick), "runtime": runtime, "scaling": scaling}
    with working(f"measuring the suite {given.suite} on this machine: minutes"):
        works, ratios = (suites.get(given.suite) or importlib.import_module(MODULES[given.suite]).benchmark)()
    show(works, ratios)
    if given.figure:
        write_whole(given.figure, functools.partial(draw, works))


if __name__ == "__main__":
    app.run({"": (Benchmark, _main)})
