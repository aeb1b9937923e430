"""Measures time and memory of the spatial-attention study's mechanisms, of a 3x3 convolution and of naive forms.

A naive form follows the paper's equation and keeps every intermediate tensor in memory. Naive attention keeps the
relative position of every pair. Naive deformable convolution has four masked gathers for each tap. The docstring of
benchmark.py describes the measurements.
"""

import functools

import numpy as np
import tensorflow as tf

from axial.layers.conv import Conv
from axial.layers.spatial_attention.attended import Mechanism
from axial.layers.spatial_attention.attention_terms import SETTINGS, encode
from axial.layers.spatial_attention.deformable_conv import DeformableConv, add_taps, kernel_by_tap, tap_positions
from axial.layers.spatial_attention.generalized_attention import VISION, GeneralizedAttention
from benchmark import inference_step, measure, over, peak_memory, training_step

HEADS = 8
MAPS = {  # images, height, width, channels
    "conv4": (1, 50, 84, 256),
    "conv5": (1, 25, 42, 512),
    "segmentation": (1, 96, 96, 512),
}
# Forms that are timed at conv4 and conv5. Naive attention runs only at conv5, because it needs 18 GB at conv4.
FORMS = ("conv3x3", "1111", "0110", "0010", "deformable", "deformable_hat", "deformable_naive", "dynamic")


class NaiveAttention(GeneralizedAttention):
    """`GeneralizedAttention` of type 1111 that keeps the relative position of every pair in memory.

    Axes of the shapes: q queries, k keys, m heads, d channels of a head.
    """

    def call(self, x, training=False):
        """Returns the attention layer's output [N, H, W, C] for feature maps x [N, H, W, C]."""
        del training
        codes = list(map(self._codes, x.shape[1:3], self.position_kernels.values()))
        return tf.stack([self._attend(image, *codes) for image in tf.unstack(x)])

    def _codes(self, side, kernel):
        """Returns the projected encoding of each (query, key) pair along an axis, [side, side, m, d]."""
        code = tf.constant(encode(np.arange(1 - side, side), kernel.shape[0], self.wavelength) * 2**-0.5, kernel.dtype)
        pairs = np.arange(side)[:, None] - np.arange(side) + side - 1
        return tf.reshape(tf.gather(code @ kernel, pairs), [side, side, self.heads, self.depth])

    def _attend(self, x, rows, columns):
        size, pixels = x.shape, x.shape[0] * x.shape[1]
        x = tf.reshape(x, [pixels, -1])
        kernels = self.query_kernel, self.key_kernel, self.value_kernel
        q, k, v = (tf.reshape(x @ kernel, [pixels, self.heads, self.depth]) for kernel in kernels)
        pair_codes = tf.reshape(rows[:, None, :, None] + columns[None, :, None], [pixels, *q.shape])  # [q, k, m, d]
        axis_terms = [tf.einsum("md,qkmd->mqk", self.position_vector, codes) for codes in (rows, columns)]
        position_term = axis_terms[0][:, :, None, :, None] + axis_terms[1][:, None, :, None]
        logits = tf.einsum("qmd,qkmd->mqk", q, k + pair_codes) + tf.einsum("md,kmd->mk", self.key_vector, k)[:, None]
        weights = tf.nn.softmax(logits + tf.reshape(position_term, logits.shape))
        y = tf.reshape(tf.einsum("mqk,kmd->qmd", weights, v), x.shape)
        return tf.reshape(y @ self.output_kernel + self.output_bias, size)


class NaiveDeformableConv(DeformableConv):
    """`DeformableConv` that gathers the four neighbours of each tap, and masks neighbours outside the map."""

    def call(self, x, training=False):
        """Returns the convolution of x, without batch norm and ReLU."""
        del training
        _, height, width, channels = x.shape
        offsets, _ = self.offsets(x)
        pairs = tap_positions(offsets, [self.side] * 2, self.strides, dilation=self.dilation, padding=self.padding)
        grid = [tf.cast(tap, offset.dtype) + offset for tap, offset in pairs]
        rows, columns = (axis[..., 0] for axis in grid)
        flat, samples = tf.reshape(x, [-1, height * width, channels]), []
        for tap in range(self.side**2):
            y, x0 = rows[:, :, tap], columns[:, :, tap]
            total = 0.0
            for row in (tf.floor(y), tf.floor(y) + 1):
                for column in (tf.floor(x0), tf.floor(x0) + 1):
                    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
                    index = tf.where(inside, row * width + column, 0)
                    corner_weight = tf.where(inside, (1 - tf.abs(y - row)) * (1 - tf.abs(x0 - column)), 0)
                    total += corner_weight[..., None] * tf.gather(flat, tf.cast(index, tf.int32), batch_dims=1)
            samples.append(total)
        y = add_taps(samples, kernel_by_tap(self.kernel))
        return tf.reshape(y, [-1, *offsets.shape[1:3], self.filters])


def make_layer(form, channels):
    """Returns the unbuilt layer of a form: a value of `FORMS`, an attention type, or 'naive_1111'."""
    if form == "naive_1111":
        return NaiveAttention("1111", HEADS, **VISION)
    if form == "conv3x3":
        return Conv(channels, 3, None, relu=False, use_bias=False)
    if form == "deformable_naive":
        return NaiveDeformableConv(channels, 3, None, relu=False, use_bias=False)
    if form.startswith("deformable"):
        how = "hat" if form.endswith("hat") else "gather"
        return DeformableConv(channels, 3, None, relu=False, use_bias=False, form=how)
    return Mechanism(form, HEADS, window=13 if form == "dynamic" else None).layer(**VISION)


def make_step(map_name, training, form):
    """Returns a function without arguments that runs one step of a form and waits for the result.

    Args:
        map_name: key of `MAPS`.
        training: whether the step also computes all gradients.
        form: see `make_layer`.
    """
    x = tf.random.stateless_normal(MAPS[map_name], [0, 0])
    layer = make_layer(form, x.shape[3])
    layer.build(x.shape) if form.startswith("naive_") else layer(x[:, :9, :9])
    for weight in layer.weights:
        if "offset" in weight.name:  # makes the samples lie between pixels, as in a trained layer
            weight.assign(tf.random.stateless_normal(weight.shape, [0, 1], stddev=0.02))
    return training_step(layer, x) if training else inference_step(layer, x)


def benchmark():
    """Returns (works, ratios) of every form at conv4 and conv5, in inference and training; see `benchmark.benchmark`.

    The ratios compare each form with the 3x3 convolution, and each naive form with axial's form. `works` also has the
    peak memory of a training step for each attention type.
    """
    works, ratios = {}, {}
    for map_name in ("conv4", "conv5"):
        forms = [*FORMS, *(["naive_1111"] if map_name == "conv5" else [])]
        for training in (True, False):
            make = functools.partial(make_step, map_name, training)
            works[f"{map_name}_train" if training else map_name] = measure(forms, make, 7, training)
    for work, forms in works.items():
        pairs = [(form, "conv3x3") for form in forms if form != "conv3x3"]
        pairs += [pair for pair in (("naive_1111", "1111"), ("deformable_naive", "deformable")) if pair[0] in forms]
        for a, b in pairs:
            for key in ("median_s", "peak_bytes"):
                if key in forms[a]:
                    ratios[f"{work}_{a}_over_{b}_{key}"] = over(works, work, a, b, key)
    for map_name in ("conv4", "segmentation"):
        make = functools.partial(make_step, map_name, True)
        works[f"{map_name}_settings"] = {form: {"peak_bytes": peak_memory(make, form)} for form in SETTINGS}
    return works, ratios
