"""Seconds and memory of our form, of the textbook's and of ResNet-101, on this machine.

Times of one work are taken in one process, the forms in turn, round by round: what else the machine
does hits all alike, and only ratios are meant to be read. Peaks are of a process for each form, above
what it held before its first step.
"""

import os
import platform
import statistics
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf
import tf_keras as keras

from axial.analysis.textbook import TextbookPair
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import AxialPair, Bottleneck
from axial.models.axial_resnet import MEMORY
from axial.models.classifier import Classifier
from axial.models.registry import build_model
from axial.models.resnet import ResNet, make_stem

NORM = BatchNormConfig()
PAIRS = {  # images, height, width, channels of a height and a width layer
    "65": (1, 65, 129, 512),  # stage 4 of Axial-DeepLab-L at 1025x2049
    "56": (8, 56, 56, 128),  # stage 2 of Axial-ResNet-L at 224x224
    "14": (8, 14, 14, 512),  # stage 4
}
TRAIN = ("ours", "textbook", "bfloat16")
WORKS = {  # name: forms; 'bfloat16' is ours in mixed_bfloat16, all others are float32
    "layer_train": TRAIN,
    "layer_train_56": TRAIN,
    "layer_train_14": TRAIN,
    "layer": ("folded", "ours", "textbook"),
    "model_train": (*TRAIN, "recompute_block", "resnet101"),
    "model": ("folded", "ours", "textbook", "resnet101"),
    "model_batch1": ("folded", "ours", "textbook", "resnet101"),
}
QUICK = ("layer_train", "layer_train_56", "model_batch1")
# Table 8 of the paper: milliseconds on a V100, batch 1, 224x224, published.
TABLE_8 = {"ResNet-101": 10.08, "Axial-ResNet-L": 16.54}


# === Forms ===


def textbook_resnet():
    """Axial-ResNet-L of textbook layers."""

    def block(filters, strides, drop, name):
        middle = TextbookPair(filters, 2 * filters, NORM, strides, name="attention")
        return Bottleneck(2 * filters, 4 * filters, middle, NORM, strides, drop, name=name)

    return ResNet(make_stem("imagenet", 1.0, NORM), block)


def make_layer(form, images, work):
    """The pair of a work on `images`, its weights made."""
    channels = images.shape[3]
    make = TextbookPair if form == "textbook" else AxialPair
    layer = make(channels // 2, channels, None if form == "folded" else NORM, name="pair")
    layer(images)
    return layer


def make_model(form, images, work):
    folds = form in ("folded", "resnet101") and "train" not in work
    norm = None if folds else NORM
    if form == "textbook":
        model = Classifier(textbook_resnet(), 1000)
    else:
        name = "resnet_101" if form == "resnet101" else "axial_resnet_l"
        model = build_model(name, 1000, norm, **(dict(memory=form) if form in MEMORY else {}))
    model(images[:1])
    return model


def step_of(work, form):
    """A function of no arguments that does one step of a form of a work and waits for it."""
    size = (1 if work.endswith("batch1") else 8, 224, 224, 3)
    if work.startswith("layer"):
        size = PAIRS[work.rsplit("_", 1)[1] if work[-1].isdigit() else "65"]
    images = tf.random.stateless_normal(size, [0, 0])
    keras.mixed_precision.set_global_policy("mixed_bfloat16" if form == "bfloat16" else "float32")
    layer = (make_layer if work.startswith("layer") else make_model)(form, images, work)
    keras.mixed_precision.set_global_policy("float32")

    def train(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = tf.nest.flatten(layer(x, training=True))
            loss = tf.add_n([tf.reduce_mean(tf.square(y)) for y in outputs])
        sources = [x] if work.startswith("layer") else []
        gradients = tape.gradient(loss, [*sources, *layer.trainable_weights])
        return [loss, *(tf.convert_to_tensor(g) for g in gradients)]

    function = tf.function(train if "train" in work else layer, autograph=False)
    return lambda: [t.numpy().ravel()[:1] for t in tf.nest.flatten(function(images))[:1]]


# === Measures ===


def time_in_turn(steps, rounds, report=lambda line: None):
    """dict of lists of seconds of some steps, a dict, `rounds` of each, in turn, after two to warm up."""
    for name, step in steps.items():
        report(f"{name}: warming up")
        step(), step()
    seconds = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def peak_memory(step):
    """Bytes that two runs of a step need at their peak, of a process of its own.

    Args:
        step: expression that makes the step, in the names of the modules of axial.analysis.
    """
    code = (
        "import importlib; from axial.analysis import benchmark\n"
        f"axial = importlib.import_module('axial.analysis.{step.split('.')[0]}')\n"
        f"benchmark.print_peak(axial.{step.split('.', 1)[1]})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{step}: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    return int(done.stdout.split()[-1])


def print_peak(step):
    """Prints what two runs of `step` need above what the process holds."""
    before = _resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forgets the peak of building the model
    step(), step()
    print(_resident("VmHWM") - before)


def _resident(name):
    """Bytes of a line of Linux' status of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024


def machine():
    """What the times were taken on."""
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    a = tf.random.normal([2048, 2048])
    product = tf.function(lambda: tf.reduce_sum(tf.matmul(a, a)))
    product()
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        product().numpy()
        seconds.append(time.perf_counter() - started)
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gflops_float32": round(2 * 2048**3 / min(seconds) / 1e9),
        "tensorflow": tf.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def benchmark(quick=False, report=lambda line: None):
    """Every measure and the ratios that are promised.

    Args:
        quick: the works of `QUICK`, few rounds.
        report: function that is told what is under way.

    Returns:
        dict 'machine', 'works' (work -> form -> seconds and peak bytes), 'ratios' and what is published.
    """
    result = {"machine": machine(), "works": {}}
    for work in QUICK if quick else WORKS:
        long = work == "model_train"
        rounds = 7 if quick else 5 if long else 15
        steps = {form: step_of(work, form) for form in WORKS[work]}
        seconds = time_in_turn(steps, rounds, lambda line: report(f"{work} {line}"))
        forms = {
            form: {
                "median_s": statistics.median(s),
                "quartiles_s": np.percentile(s, [25, 75]).tolist(),
                "least_s": min(s),
                "runs": len(s),
            }
            for form, s in seconds.items()
        }
        if "train" in work:
            for form in forms:
                report(f"{work} {form}: peak memory")
                forms[form]["peak_bytes"] = peak_memory(f"benchmark.step_of({work!r}, {form!r})")
        result["works"][work] = forms
    result["ratios"] = ratios(result["works"])
    result["published_v100_ms"] = TABLE_8
    return result


def ratios(works):
    """The keys that the README promises; speeds of the textbook's time over ours."""

    def time_of(work, form):
        return works[work][form]["median_s"]

    def over(work, a, b):
        return time_of(work, a) / time_of(work, b)

    found = {}
    for work in works:
        if "train" in work:
            found[work.replace("_train", "_train_speedup")] = over(work, "textbook", "ours")
            ours, textbook = (works[work][form]["peak_bytes"] for form in ("ours", "textbook"))
            found[work.replace("_train", "_train_memory_ratio")] = ours / textbook
            found[work.replace("_train", "_train_bfloat16_speedup")] = over(work, "ours", "bfloat16")
    found["folded_speedup"] = over("model_batch1", "ours", "folded")
    found["folded_textbook_speedup"] = over("model_batch1", "textbook", "folded")
    found["folded_vs_resnet101"] = over("model_batch1", "folded", "resnet101")
    return found
