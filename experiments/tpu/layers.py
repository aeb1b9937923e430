"""Compiles training steps of single layers with the TPU's own compiler: memory and estimated cycles (minutes).

%s --layer=258x65       our layer for rows x length, its textbook form, and attention without positions
%s                      each mechanism of the spatial-attention study, at the size of a detector's conv4
"""

import os
import sys

import tensorflow as tf
import tf_keras as keras

import tpu_compile
from axial.cli import app
from axial.cli.flags import Flag, Flags, matched
from axial.errors import check_installed
from axial.io.show import say, working
from axial.layers.attention.layer import AxialAttention
from axial.layers.spatial_attention.attention_terms import SETTINGS

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "speed"))
import study_speed
from benchmark import NORM, training_function
from textbook import TextbookAttention

SLICE = tpu_compile.DEFAULT_SLICE


def _axial_layers(rows, length):
    """Yields (name, layer, input shape) for the forms of --layer. The layers have 512 channels and 8 heads.

    All forms have Axial-DeepLab's span except 'content alone', which attends over the whole line.
    """
    shape = rows, 1, length, 512
    yield "textbook", TextbookAttention(256, 512, "width", span=65, norm=NORM), shape
    for form in ("xla", "kernel"):
        yield form, AxialAttention(256, 512, "width", span=65, norm=NORM, backend=form), shape
    from flash import FlashAttention

    yield "content alone", FlashAttention(256, 512, 8, norm=NORM), shape


def _study_layers():
    """Yields (name, layer, input shape) for a 3x3 convolution and every mechanism of the study, at conv4's size."""
    shape = study_speed.MAPS["conv4"]
    for form in ("conv3x3", *SETTINGS, "deformable", "deformable_hat", "dynamic"):
        yield form, study_speed.make_layer(form, shape[3]), shape


def layer_step(layer, shape):
    """Returns (function of a layer's input that returns the gradients of input and weights, the input's specs)."""
    layer(tf.zeros([1, *(min(side, 65) for side in shape[1:3]), shape[3]], tf.bfloat16))

    train = training_function(layer)
    return lambda x: train(x)[1:], [tf.TensorSpec(shape, tf.bfloat16)]


class Layers(Flags):
    layer = Flag(
        str,
        "rows x length of the axial layer to compile in place of the study's, like 258x65.",
        read=matched(r"([1-9]\d*)x([1-9]\d*)", "rows x length, like 258x65"),
    )


def _main(given):
    """Compiles a bfloat16 training step of each layer with all optimisations, and prints a line for each layer."""
    check_installed("the TPU's compiler wants", "analysis", "jax", "libtpu")
    say("compiling layers with the TPU's own compiler: minutes", error=True)
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    layers = _axial_layers(*given.layer) if given.layer else _study_layers()
    for name, layer, shape in layers:
        with working(f"{SLICE}, {name}: compiling"):
            hlo = tpu_compile.lower(*layer_step(layer, shape), SLICE)
            program = tpu_compile.compile_for(hlo, SLICE, level=None)
        size = "x".join(map(str, shape))
        if not program.fits:
            say(f"{name:15s} {size}: does not fit, {program.used / 2**30:.2f} GiB")
            continue
        kernels = program.by_op["kernel"].cycles if "kernel" in program.by_op else 0
        say(
            f"{name:15s} {size}: estimated cycles {program.cycles / 1e6:.2f} M (kernels {kernels / 1e6:.2f} M), "
            f"memory {program.used / 2**30:.2f} GiB, padding {program.padding:.0%}, "
            f"custom calls: {', '.join(program.custom_calls) or 'none'}"
        )


if __name__ == "__main__":
    app.run({"": (Layers, _main)})
