"""Estimates the time and memory of a recipe's training step, from counts and a measured speed of this device.

For the model of each photo recipe, experiments/steps.csv has the multiply-adds and bytes of the forward pass on one
photo, counted at the recipe's canvas. Counting a model takes seconds, so commands read this file. A training step
computes three times the multiply-adds of the forward pass: the gradients of the inputs and of the weights each take as
many as the forward pass. Its activations take at most the bytes that the forward pass writes.
"""

import dataclasses
import math
import os
import resource
import sys
import timeit
from typing import Annotated

import tensorflow as tf
from msgspec import Meta

from axial.io.paths import experiments_dir
from axial.io.read import read_rows

FORWARD_AND_BACKWARD = 3
SIDE, WIDE, NARROW = 64, 128, 32  # side and channels of the timed block's maps


@dataclasses.dataclass(frozen=True)
class Step:
    """The cost of a model's forward pass on one photo.

    Attributes:
        model: name of the model in the registry.
        canvas: canvas of the count as text such as '1025x2049': height and width.
        multiply_adds: multiply-adds of the forward pass.
        activations: bytes that the forward pass writes in float32.
    """

    model: str
    canvas: Annotated[str, Meta(pattern=r"^\d{1,5}x\d{1,5}$")]
    multiply_adds: int
    activations: int

    @property
    def sides(self):
        """(height, width) of the canvas."""
        return tuple(map(int, self.canvas.split("x")))

    def training_cost(self, canvas, photos):
        """(multiply-adds, bytes) of a training step on photos of any size, in proportion to their pixels."""
        times = photos * math.prod(canvas) / math.prod(self.sides)
        return FORWARD_AND_BACKWARD * self.multiply_adds * times, self.activations * times


def read_steps():
    """dict from names of models to `Step`s of the CSV that `experiments/paper/counts.py` writes. Raises InputError."""
    return {row.model: row for _, row in read_rows(os.path.join(experiments_dir(), "steps.csv"), Step)}


def rate():
    """Measures the multiply-adds per second of a residual block and its gradients on this device, in about a second.

    The block has 1x1 and depthwise 5x5 convolutions with batch norms. It computes about 3 multiply-adds for each byte
    that it writes, like the models of experiments/steps.csv. A larger convolution would wait less for memory.
    """
    x = tf.random.normal([4, SIDE, SIDE, WIDE])
    kernels = [tf.random.normal(shape) for shape in ([1, 1, WIDE, NARROW], [5, 5, NARROW, 1], [1, 1, NARROW, WIDE])]

    def norm(y):
        mean, variance = tf.nn.moments(y, [0, 1, 2])
        return tf.nn.relu((y - mean) * tf.math.rsqrt(variance + 1e-3))

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            tape.watch([x, *kernels])
            y = norm(tf.nn.conv2d(x, kernels[0], 1, "SAME"))
            y = norm(tf.nn.depthwise_conv2d(y, kernels[1], [1, 1, 1, 1], "SAME"))
            loss = tf.reduce_sum(norm(tf.nn.conv2d(y, kernels[2], 1, "SAME")) * x)
        return [tf.reduce_sum(g) for g in tape.gradient(loss, [x, *kernels])]

    def run():
        return [value.numpy() for value in step()]

    run()
    seconds = min(timeit.repeat(run, number=1, repeat=3))
    return FORWARD_AND_BACKWARD * math.prod(x.shape[:3]) * sum(map(tf.size, kernels)).numpy() / seconds


def resident():
    """Peak memory of this process, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def duration(seconds):
    """Formats seconds for people: '40 s', '35 min', '6.5 h', '12 days'.

    >>> duration(39.7), duration(2100), duration(23400), duration(1e6)
    ('40 s', '35 min', '6.5 h', '12 days')
    """
    for size, unit, decimals in ((86400 * 2, "days", 0), (7200, "h", 1), (120, "min", 0)):
        if seconds >= size:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit]:,.{decimals}f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
