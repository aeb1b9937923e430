"""Seconds and memory of the spatial-attention study's mechanisms, against a 3x3 convolution and the naive forms.

A naive form is what an equation says, with every intermediate in memory: the relative position of every pair for
attention, four masked gathers a tap for deformable convolution. `benchmark` says how time and memory are measured.
"""

import functools

import tensorflow as tf

from axial.layers.conv import Conv
from axial.layers.spatial_attention.attended import Mechanism
from axial.layers.spatial_attention.attention_terms import SETTINGS
from axial.layers.spatial_attention.deformable_conv import DeformableConv, add_taps, kernel_by_tap, positions
from axial.layers.spatial_attention.generalized_attention import VISION, GeneralizedAttention
from benchmark import inference_step, measure, over, peak_memory, training_step  # which adds the folder of what follows

import study_reference  # isort: skip

HEADS = 8
PLACES = {  # images, height, width, channels
    "conv4": (1, 50, 84, 256),
    "conv5": (1, 25, 42, 512),
    "segmentation": (1, 96, 96, 512),
}
# Forms that are timed at conv4 and conv5. The naive attention runs at conv5 alone: at conv4 it needs 18 GB.
FORMS = ("conv3x3", "1111", "0110", "0010", "deformable", "deformable_hat", "deformable_naive", "dynamic")
QUICK = ("conv3x3", "1111", "deformable")


class NaiveAttention(GeneralizedAttention):
    """`GeneralizedAttention` by its plain form, which holds the relative position of every pair."""

    def call(self, x, training=False):
        """The attention of each map of x."""
        del training
        w = {weight.name.split("/")[-1].split(":")[0]: tf.cast(weight, self.compute_dtype) for weight in self.weights}
        return tf.stack(
            [study_reference.generalized_attention(m, w, self.setting, heads=self.heads) for m in tf.unstack(x)]
        )


class NaiveDeformableConv(DeformableConv):
    """`DeformableConv` by a gather of each neighbour of each tap, with a mask for those outside the map."""

    def call(self, x, training=False):
        """The convolution of x, without batch norm and ReLU."""
        del training
        _, height, width, channels = x.shape
        offsets, _ = self.offsets(x)
        grid = positions(offsets, [self.side] * 2, self.strides, dilation=self.dilation, padding=self.padding)
        rows, columns = (axis[..., 0] for axis in grid)
        flat, samples = tf.reshape(x, [-1, height * width, channels]), []
        for tap in range(self.side**2):
            y, x0 = rows[:, :, tap], columns[:, :, tap]
            total = 0.0
            for row in (tf.floor(y), tf.floor(y) + 1):
                for column in (tf.floor(x0), tf.floor(x0) + 1):
                    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
                    index = tf.where(inside, row * width + column, 0)
                    share = tf.where(inside, (1 - tf.abs(y - row)) * (1 - tf.abs(x0 - column)), 0)
                    total += share[..., None] * tf.gather(flat, tf.cast(index, tf.int32), batch_dims=1)
            samples.append(total)
        y = add_taps(samples, kernel_by_tap(self.kernel))
        return tf.reshape(y, [-1, *offsets.shape[1:3], self.filters])


def make_layer(form, channels):
    """The layer of a form, not built yet: of `FORMS`, any setting, or 'naive_' and a setting."""
    if form.startswith("naive_"):
        return NaiveAttention(form.removeprefix("naive_"), HEADS, **VISION)
    if form == "conv3x3":
        return Conv(channels, 3, None, relu=False, use_bias=False)
    if form == "deformable_naive":
        return NaiveDeformableConv(channels, 3, None, relu=False, use_bias=False)
    if form.startswith("deformable"):
        how = "hat" if form.endswith("hat") else "gather"
        return DeformableConv(channels, 3, None, relu=False, use_bias=False, form=how)
    return Mechanism(form, HEADS, window=13 if form == "dynamic" else None).layer(**VISION)


def make_step(place, form, training):
    """A function without arguments that runs one step of a form and waits for its end.

    Args:
        place: of `PLACES`.
        form: see `make_layer`.
        training: whether the step also computes every gradient.
    """
    x = tf.random.stateless_normal(PLACES[place], [0, 0])
    layer = make_layer(form, x.shape[3])
    layer.build(x.shape) if form.startswith("naive_") else layer(x[:, :9, :9])
    for weight in layer.weights:
        if "offset" in weight.name:  # as after some training: samples between the pixels
            weight.assign(tf.random.stateless_normal(weight.shape, [0, 1], stddev=0.02))
    return training_step(layer, x) if training else inference_step(layer, x)


def benchmark(quick=False):
    """(works, ratios) of every form at conv4 and conv5, forward and in training; see `benchmark.benchmark`.

    Ratios are over the 3x3 convolution, and of the naive forms over ours. Without `quick` also the peak memory of a
    training step of each setting.
    """
    works, found = {}, {}
    for place in ("conv4", "conv5"):
        forms = [*(QUICK if quick else FORMS), *(["naive_1111"] if place == "conv5" else [])]
        for training in (True, False):
            make = functools.partial(make_step, place, training=training)
            peak = f"study_speed:make_step({place!r}, {{!r}}, True)" if training else None
            works[f"{place}_train" if training else place] = measure(forms, make, 3 if quick else 7, peak)
    for work, forms in works.items():
        pairs = [(form, "conv3x3") for form in forms if form != "conv3x3"]
        pairs += [pair for pair in (("naive_1111", "1111"), ("deformable_naive", "deformable")) if pair[0] in forms]
        for a, b in pairs:
            for key in ("median_s", "peak_bytes"):
                if key in forms[a]:
                    found[f"{work}_{a}_over_{b}_{key}"] = over(works, work, a, b, key)
    for place in () if quick else ("conv4", "segmentation"):
        peaks = {form: peak_memory(f"study_speed:make_step({place!r}, {form!r}, True)") for form in SETTINGS}
        works[f"{place}_settings"] = {form: {"peak_bytes": peak} for form, peak in peaks.items()}
    return works, found
