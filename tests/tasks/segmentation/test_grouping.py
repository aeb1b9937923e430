"""The grouping of pixels to segments, compared with DeepLab2's golden files and with loops over pixels."""

import numpy as np
import pytest
import tensorflow as tf

from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.models.outputs import CENTER, CLASS, OFFSET, PROBABILITY, SEMANTIC
from axial.tasks.segmentation.grouping import PostprocessConfig, find_centers, postprocess
from tests.conftest import golden_files, jit_values, read_golden


def make_spec(classes, things, divisor=1000, ignore=255):
    """A `DatasetSpec` with the given number of classes. `things` are the class indices of things."""
    return DatasetSpec(
        "test",
        tuple(f"class {i}" for i in range(classes)),
        tuple(range(1, classes + 1)),
        tuple(i in things for i in range(classes)),
        divisor,
        ignore,
    )


def run(maps, spec, config, jit=False):
    """Applies `postprocess` to a batch of head outputs with semantic logits. Returns a dict of arrays."""
    semantic = maps[SEMANTIC]
    maps = {k: tf.constant(v, tf.float32) for k, v in maps.items() if k != SEMANTIC}
    maps[CLASS], maps[PROBABILITY] = tf.argmax(semantic, -1, tf.int32), tf.nn.softmax(semantic)
    function = tf.function(postprocess, jit_compile=True, autograph=False) if jit else postprocess
    return {k: v.numpy() for k, v in function(maps, spec, config).items()}


def golden_case(name):
    """Reads a golden file. Returns (its arrays, its `DatasetSpec`, its `PostprocessConfig`).

    DeepLab2's top-k wrongly drops some centres on CPUs. A golden file with this error also has exact results. They
    replace the wrong results. The scores of the instances have no exact version, and are removed.
    """
    arrays, meta = read_golden(name)
    things = set(arrays["thing_class_ids"].tolist())
    spec = make_spec(arrays["semantic_logits"].shape[-1], things, meta["label_divisor"], meta["void_label"])
    config = PostprocessConfig(
        meta["center_threshold"], meta["nms_kernel"], meta["keep_k_centers"], meta["stuff_area_limit"]
    )
    if meta["centers_kept"] < min(meta["keep_k_centers"], meta["peaks_after_nms"]):
        arrays.update({key: arrays[f"{key}_exact_topk"] for key in ("instance", "panoptic", "centers")})
        del arrays["instance_scores"]
    return arrays, spec, config


@pytest.mark.parametrize("jit", jit_values())
@pytest.mark.parametrize("name", golden_files("post_*.npz"))
def test_golden(name, jit):
    """The head outputs of a golden file give the segments, instances and scores that DeepLab2 computes."""
    arrays, spec, config = golden_case(name)
    batch = 2  # the same image twice: images must not affect each other
    maps = {SEMANTIC: arrays["semantic_logits"], CENTER: arrays["center_heatmap"], OFFSET: arrays["offsets"]}
    actual = run({k: np.stack([v] * batch) for k, v in maps.items()}, spec, config, jit)
    for i in range(batch):
        for key in ("semantic", "instance", "panoptic"):
            np.testing.assert_array_equal(actual[key][i], arrays[key])
        if "instance_scores" in arrays:
            scores = np.concatenate([[0], actual["center_score"][i]])[actual["instance"][i]]
            np.testing.assert_array_equal(scores, arrays["instance_scores"])


@pytest.mark.parametrize("name", golden_files("post_*.npz"))
def test_golden_centers(name):
    """The heat map of a golden file gives the centres that DeepLab2 finds."""
    arrays, _, config = golden_case(name)
    centers, scores, _ = find_centers(tf.constant(arrays["center_heatmap"][None, ..., 0]), config, config.top_k)
    np.testing.assert_array_equal(centers[0].numpy()[scores[0].numpy() > 0], arrays["centers"].reshape(-1, 2))


def find_peaks(heat, config):
    """Loops over the pixels of a heat map [H, W]. Returns its local maxima as (heat, y, x), in raster order."""
    height, width = heat.shape
    reach = config.nms_kernel // 2
    peaks = []
    for y in range(height):
        for x in range(width):
            window = heat[max(y - reach, 0) : y + reach + 1, max(x - reach, 0) : x + reach + 1]
            if heat[y, x] <= config.center_threshold or heat[y, x] < window.max():
                continue
            top, left = max(y - reach, 0), max(x - reach, 0)
            first = np.argwhere(window == heat[y, x])[0] + (top, left)
            if tuple(first) == (y, x):
                peaks.append((heat[y, x], y, x))
    return peaks


def loops(maps, spec, config):
    """Computes the panoptic labels [H, W] of one image with loops over pixels."""
    semantic = maps[SEMANTIC].argmax(-1)
    heat = maps[CENTER][..., 0]
    height, width = heat.shape
    peaks = sorted(sorted(find_peaks(heat, config), key=lambda p: -p[0])[: config.top_k], key=lambda p: p[1:])
    instance = np.zeros([height, width], int)
    for y in range(height):
        for x in range(width):
            if spec.things[semantic[y, x]] and peaks:
                at = np.array([y, x]) + maps[OFFSET][y, x]
                distance = [np.sum((at - peak[1:]) ** 2) for peak in peaks]
                instance[y, x] = 1 + int(np.argmin(distance))
    panoptic = np.full([height, width], spec.void)
    numbers = {}
    for i in dict.fromkeys(instance.ravel().tolist()):
        if i == 0:
            continue
        mask = instance == i
        winner = np.bincount(semantic[mask]).argmax()
        numbers[winner] = numbers.get(winner, 0) + 1
        if mask.sum() >= config.thing_area:
            panoptic[mask] = winner * spec.label_divisor + numbers[winner]
    for c in range(spec.num_classes):
        mask = (semantic == c) & (instance == 0)
        if not spec.things[c] and mask.sum() >= config.stuff_area:
            panoptic[mask] = c * spec.label_divisor
    return panoptic


def test_the_knobs_are_those_of_panoptic_deeplab():
    """The defaults are the values for Cityscapes in bowenc0221/panoptic-deeplab."""
    assert PostprocessConfig() == PostprocessConfig(0.1, 7, 200, 2048, 0)
    with pytest.raises(InputError, match="nms_kernel must be odd: got 4"):
        PostprocessConfig(nms_kernel=4)


def test_without_instances_every_class_is_a_segment():
    """In three photos of 1x4 pixels, each class is one segment. Classes with under `stuff_area` pixels are void."""
    spec = DatasetSpec("a", ("x", "y"), (1, 2), (True, False), label_divisor=10)
    classes = np.array([[[0, 0, 0, 1]], [[1, 1, 1, 1]], [[0, 0, 1, 1]]], np.int32)
    actual = postprocess({CLASS: tf.constant(classes)}, spec, PostprocessConfig(top_k=3, stuff_area=2))
    void = spec.void
    np.testing.assert_array_equal(actual["panoptic"], [[[0, 0, 0, void]], [[10, 10, 10, 10]], [[0, 0, 10, 10]]])
    assert actual["score"].shape == actual["center_score"].shape == [3, 1]
    assert not actual["instance"].numpy().any() and not actual["score"].numpy().any()


@pytest.mark.parametrize("jit", jit_values())
@pytest.mark.parametrize("kernel", [1, 5])
def test_a_canvas_has_room_for_the_densest_centres(kernel, jit):
    """`top_k` keeps the centres with the highest scores. Without `top_k`, only label_divisor limits their number."""
    maps = {
        SEMANTIC: np.ones([1, 23, 34, 1], np.float32),
        CENTER: np.zeros([1, 23, 34, 1]),
        OFFSET: np.zeros([1, 23, 34, 2]),
    }
    heat = maps[CENTER][0, :: kernel // 2 + 1, :: kernel // 2 + 1, 0]
    heat[:] = np.random.default_rng(0).permutation(heat.size).reshape(heat.shape) / heat.size / 2 + 0.5
    for top_k, divisor, kept in (None, 1000, heat.size), (9, 1000, 9), (None, 30, min(29, heat.size)):
        actual = run(maps, make_spec(1, {0}, divisor), PostprocessConfig(0.1, kernel, top_k), jit)
        assert actual["dropped"] == heat.size - kept and len(np.unique(actual["panoptic"])) == kept
        np.testing.assert_allclose(actual["center_score"][0], [x for x in heat.flat if x >= np.sort(heat.flat)[-kept]])
