"""Predictions of photos at a fixed scale, with canvases of several sizes, tiles, and one or two replicas."""

import collections
import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.data.preprocess import full_size, place_image
from axial.data.streams import decode_photo
from axial.data.tfrecord import photo_name
from axial.errors import InputError
from axial.tasks.base import DistributedPredictor
from axial.tasks.metrics import evaluate
from axial.tasks.segmentation.evaluator import PanopticMetrics
from axial.tasks.segmentation.grouping import PostprocessConfig
from axial.tasks.segmentation.input_pipeline import DataConfig
from axial.tasks.segmentation.studies import sweep
from axial.tasks.segmentation.tiles import Tiled, Tiling, join
from tests.conftest import make_task, two_replicas
from tests.tasks.contract import eagerly

SCALE = 0.3  # at this scale, the sides of the sample photos are 63 to 96 pixels
MODEL = {"name": "panoptic_deeplab_resnet_nano", "arguments": {"repeats": (1, 0, 0, 0)}}
SIDES = (129, 97, 81, 65), (145, 113, 97, 81, 65)


@pytest.fixture(scope="module")
def task(sample_dir):
    grouping = PostprocessConfig(center_threshold=0.0, stuff_area=1)
    return make_task(sample_dir, (129, 145), model=MODEL, data={"photo_scale": SCALE}, grouping=grouping)


@pytest.fixture(scope="module")
def model(task):
    """A Panoptic-DeepLab with random weights, which predicts instances in each of the sample photos."""
    keras.utils.set_random_seed(2)  # with this seed, every photo has instances
    model = task.build_model()
    for head in (model.semantic_head, model.center_head):  # larger logits, so that predictions differ
        head.logits.conv.kernel.assign(30 * head.logits.conv.kernel)
    return model


def numbered(sizes):
    """Yields examples with canvases of the given sizes. All pixels of canvas i have the value i."""
    for number, size in enumerate(sizes):
        yield {"image": tf.fill([*size, 3], float(number)), "valid_size": tf.constant(size), "number": number}


@pytest.mark.parametrize("replicas,batch", [(1, 3), (2, 2)])
def test_canvases_of_one_size_run_together_and_each_size_is_traced_once(replicas, batch, capfd):
    traced = []

    def largest(images, valid_sizes):
        traced.append(tuple(images.shape))
        return {"value": tf.reduce_max(images, [1, 2, 3]), "valid_size": valid_sizes}

    strategy = two_replicas() if replicas == 2 else tf.distribute.get_strategy()
    a, b, c, *others = ((2 + i, 9 - i) for i in range(8))
    sizes = [a, b, a, b, b, a, c, a, a, a, *others, a, b, c]
    pairs = list(DistributedPredictor(largest, strategy, batch)(numbered(sizes)))
    assert [(e["number"], float(r["value"]), tuple(r["valid_size"].numpy())) for e, r in pairs] == [
        (number, number, size) for number, size in enumerate(sizes)
    ]
    assert {shape[0] for shape in traced} <= {1, 2, batch}
    times = collections.Counter(shape[:3] for shape in traced)
    assert {shape[1:] for shape in times} == set(sizes) and max(times.values()) <= replicas
    assert "retracing" not in capfd.readouterr().err


@eagerly()
def test_photos_keep_their_scale_on_the_smallest_canvas(task, model):
    """Each photo is on the smallest canvas with sides of `SIDES` that fits it. The prediction is for this canvas."""
    examples, canvases = list(task.eval_dataset().take(4)), set()
    for (example, actual), original in zip(task.predictions(model)(iter(examples)), examples, strict=True):
        assert example is original
        photo = decode_photo(example)
        valid_size = np.round(np.array(photo.shape[:2]) * np.float32(SCALE)).astype(np.int32)
        canvas = [min(s for s in sides if s >= side) for sides, side in zip(SIDES, valid_size)]
        canvases.add(tuple(canvas))
        assert list(example["image"].shape[:2]) == canvas and list(example["valid_size"].numpy()) == list(valid_size)
        image = place_image(photo, tf.constant(valid_size, tf.int32), canvas)
        np.testing.assert_allclose(example["image"], image, atol=1e-6)  # graphs may round differently
        expected = {k: v[0] for k, v in task.segment(task.maps(model, example["image"][None])).items()}
        expected = full_size(expected, valid_size, photo.shape[:2])
        for name, value in expected.items():
            assert np.mean(actual[name].numpy() != value) < 1e-3 or name == "score", name
    assert len(canvases) > 1


@pytest.fixture(scope="module")
def larger(task):
    """A task with the same network and a larger scale, at which photos are larger than the canvas."""
    data = {"photo_scale": 0.5, "tile_overlap": 48}
    return make_task(task.data_dir, (129, 145), model=MODEL, data=data, grouping=task.grouping)


def mixed(task):
    """Yields two examples: a photo that fits on the canvas, and a larger photo."""
    for example in task.eval_dataset().take(1):
        yield task.example(decode_photo(example)[:250, :290])
        yield example


def joined(task, model, example):
    """Predicts each tile of a larger photo separately, and joins the tiles' predictions."""
    photo = decode_photo(example)
    tiling = Tiling(tuple(photo.shape[:2]), (258, 290), 48, 32)
    assert len(tiling.boxes) > 1
    tiles = [task.example(photo[box]) for box in tiling.boxes]
    predictions = [prediction for _, prediction in task.predictions(model)(tiles)]
    return join(predictions, tiling, spec=task.spec, grouping=task.grouping, scale=0.5)


@eagerly()
def test_larger_photos_are_joined_from_tiles(larger, model):
    examples = list(mixed(larger))
    pairs = list(larger.predictions(model)(iter(examples)))
    assert [e for e, _ in pairs] == examples
    for example, prediction in pairs:
        assert prediction["panoptic"].shape == tuple(example["size"])
        if "image/id" in example:
            expected = joined(larger, model, example)
            assert expected["score"].size
            for name, value in expected.items():
                np.testing.assert_array_equal(value, prediction[name])
    (alone,) = larger.predictions(model)(examples[:1])
    for name, value in alone[1].items():  # the same prediction as in a list with larger photos
        np.testing.assert_array_equal(value, pairs[0][1][name])


@eagerly()
def test_sweeps_have_tiles(larger, model):
    examples = list(larger.eval_dataset().take(1))
    groupings = [larger.grouping, PostprocessConfig(center_threshold=0.0, stuff_area=5000)]
    tasks = [dataclasses.replace(larger, grouping=grouping) for grouping in groupings]
    results = sweep(tasks, model, examples)
    for task, scores in zip(tasks, results, strict=True):
        expected = evaluate(examples, task.predictions(model), PanopticMetrics(larger.spec))
        assert scores["pq"]["all"] == pytest.approx(expected["pq"]["all"], abs=1e-3)
    assert results[0] != results[1]


def test_a_class_with_more_instances_than_labels_is_one_line(larger):
    """A photo has 1400 predicted instances of a single pixel. A label_divisor of 1000 allows 999."""

    def crowd(examples):
        for example in examples:
            instance = np.zeros([int(side) for side in example["size"]], np.int32)
            instance[:160:4, :245:7] = np.arange(1, 1401).reshape(40, 35)
            yield example, {"semantic": np.zeros_like(instance), "instance": instance, "score": np.ones(1400)}

    example = next(iter(larger.eval_dataset()))
    words = r"\d{4} instances of 'person' in one photo; the label_divisor 1000 of the spec 'coco' has room for 999$"
    with pytest.raises(InputError, match=f"^{photo_name(example)}: {words}"):
        list(Tiled.from_task(larger)(crowd, [example]))


@pytest.mark.parametrize(
    "scale,words",
    [
        (0.0005, "expected at least 1x1"),
        (100.0, "the canvas holds at most 145x129, and of the photo a tile of 1x1: expected at least 32x32"),
    ],
)
def test_a_scale_that_does_not_suit_a_photo_is_one_line(sample_dir, scale, words):
    task = make_task(sample_dir, (129, 145), data={"photo_scale": scale})
    example = next(iter(task.eval_dataset()))
    height, width = example["size"].numpy()
    sizes = f"{width}x{height} pixels become {round(width * scale)}x{round(height * scale)}"
    line = f"{sizes} by photo_scale = {scale:g}; {words}$"
    with pytest.raises(InputError, match=f"^{photo_name(example)}: {line}"):
        list(task.predictions(None)([example]))
    with pytest.raises(InputError, match=f"^{line}"):
        list(task.predictions(None)([task.example(decode_photo(example))]))


def test_an_overlap_that_does_not_suit_the_tile_is_one_line():
    make = functools.partial(DataConfig, "a", "b", (129, 145))
    assert make(photo_scale=0.5, tile_overlap=129).tile_overlap == 129
    for options, tile in (({"photo_scale": 0.5, "tile_overlap": 130}, 258), ({"tile_overlap": 9}, 0)):
        with pytest.raises(InputError, match=rf"^DataConfig.tile_overlap = \d+: expected at most half .* = {tile}$"):
            make(**options)
