"""Seconds and memory of the spatial-attention study's mechanisms, against a 3x3 convolution and the naive forms.

A naive form is what an equation says, with every intermediate in memory: the relative position of every pair for
attention, four masked gathers a tap for deformable convolution. `benchmark` says how time and memory are measured.
"""

import os
import statistics
import sys

import tensorflow as tf

from axial.io.show import say
from axial.layers.conv import Conv
from axial.layers.spatial_attention.attended import Mechanism
from axial.layers.spatial_attention.attention_terms import SETTINGS
from axial.layers.spatial_attention.deformable_conv import DeformableConv, add_taps, kernel_by_tap, positions
from axial.layers.spatial_attention.generalized_attention import VISION, GeneralizedAttention
from benchmark import inference_step, machine, peak_memory, print_works, time_in_turn, training_step

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "paper"))
import study_reference

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
        w = {weight.name.split("/")[-1].split(":")[0]: self._cast(weight) for weight in self.weights}
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
        options = dict(dilation=self.dilation, padding=self.padding)
        rows, columns = (p[..., 0] for p in positions(offsets, [self.side] * 2, self.strides, **options))
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
    if form == "conv3x3":
        return Conv(channels, 3, None, relu=False, use_bias=False)
    if form.startswith("naive_"):
        return NaiveAttention(form.removeprefix("naive_"), HEADS, **VISION)
    if form == "deformable_naive":
        return NaiveDeformableConv(channels, 3, None, relu=False, use_bias=False)
    if form.startswith("deformable"):
        return DeformableConv(
            channels, 3, None, relu=False, use_bias=False, form="hat" if form.endswith("hat") else "gather"
        )
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
    if training:
        return training_step(layer, x)
    return inference_step(layer, x)


def memory_of_settings(places=("conv4", "segmentation"), settings=SETTINGS, report=lambda line: None):
    """{place: {setting: bytes of a training step at its peak}}, each measured in a process of its own."""
    found = {}
    for place in places:
        for setting in settings:
            peak = peak_memory(f"study_speed:make_step({place!r}, {setting!r}, True)")
            found.setdefault(place, {})[setting] = peak
            report(f"{place} {setting}: {peak / 1e9:.2f} GB")
    return found


def benchmark(quick=False, report=lambda line: None):
    """Measures every form at conv4 and conv5, forward and in training.

    Args:
        quick: fewer forms and rounds.
        report: function that is called with a line of progress.

    Returns:
        dict of 'machine', 'works' (work -> form -> seconds and peak bytes) and 'ratios' over the 3x3 convolution and of
        the naive forms over ours. Without `quick` also 'peak_bytes_of_settings', of `memory_of_settings`.
    """
    result = {"machine": machine(), "works": {}, "ratios": {}}
    forms = {place: list(QUICK if quick else FORMS) for place in ("conv4", "conv5")}
    forms["conv5"].append("naive_1111")
    works = {(place, training): {form: {} for form in forms[place]} for place in forms for training in (False, True)}
    for place in forms:  # before any timing, after which this process holds gigabytes
        for form in forms[place]:
            report(f"{place} {form}: peak memory of a training step")
            peak = peak_memory(f"study_speed:make_step({place!r}, {form!r}, True)")
            works[place, True][form]["peak_bytes"] = peak
    for (place, training), measured in works.items():
        steps = {form: make_step(place, form, training) for form in measured}
        for form, seconds in time_in_turn(steps, 3 if quick else 7, report).items():
            measured[form]["median_s"] = statistics.median(seconds)
        result["works"][f"{place}_train" if training else place] = measured
    for work, measured in result["works"].items():
        result["ratios"].update(_ratios(work, measured))
    if not quick:
        result["peak_bytes_of_settings"] = memory_of_settings(report=report)
    return result


def show(result):
    """Prints the measures, and the memory of each setting."""
    print_works(result)
    for place, settings in result.get("peak_bytes_of_settings", {}).items():
        say(" ".join([f"{place}:", *(f"{setting} {peak / 1e9:.2f} GB" for setting, peak in settings.items())]))


def _ratios(work, measured):
    """{name: ratio} of one work."""
    found = {}
    for form, own in measured.items():
        if form != "conv3x3":
            found[f"{work}_{form}_over_conv3x3"] = own["median_s"] / measured["conv3x3"]["median_s"]
    for naive, ours in (("naive_1111", "1111"), ("deformable_naive", "deformable")):
        if naive in measured:
            for key in measured[naive]:
                found[f"{work}_{naive}_over_ours_{key}"] = measured[naive][key] / measured[ours][key]
    return found
