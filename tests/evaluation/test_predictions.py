"""Predictions of photos at their own scale, on canvases of several sizes, by one replica or two."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from axial.data.preprocess import full_size, place_image
from axial.data.streams import decode_photo
from axial.data.tfrecord import photo_name
from axial.errors import InputError
from axial.evaluation.predictions import CheckpointPredictions, NetworkOutputs, OutputStore, Replicated
from axial.postprocess import PostprocessConfig
from conftest import make_task, two_replicas

SCALE = 0.2  # the sample photos get 67 to 128 pixels a side
SIDES = (129, 97, 81, 65), (145, 113, 97, 81, 65)


@pytest.fixture(scope="module")
def task(sample_dir):
    grouping = PostprocessConfig(center_threshold=0.0, stuff_area=1)
    model = {"name": "panoptic_deeplab_resnet_nano"}
    return make_task(sample_dir, (129, 145), model=model, data={"photo_scale": SCALE}, grouping=grouping)


@pytest.fixture(scope="module")
def model(task):
    tf.random.set_seed(0)
    model = task.build_model()
    for head in (model.semantic_head, model.center_head):  # larger logits, so that predictions differ
        head.logits.conv.kernel.assign(30 * head.logits.conv.kernel)
    return model


def numbered(sizes):
    """Examples on canvases of such sizes, each filled with its number."""
    for number, size in enumerate(sizes):
        yield {"image": tf.fill([*size, 3], float(number)), "content": tf.constant(size), "number": number}


@pytest.mark.parametrize("replicas,batch", [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_canvases_of_one_size_run_together_and_each_size_is_traced_once(replicas, batch, capfd):
    traced = []

    def largest(images, contents):
        traced.append(tuple(images.shape))
        return {"value": tf.reduce_max(images, [1, 2, 3]), "content": contents}

    strategy = two_replicas() if replicas == 2 else tf.distribute.get_strategy()
    a, b, c, *others = ((2 + i, 9 - i) for i in range(8))
    sizes = [a, b, a, b, b, a, c, a, a, a, *others, a, b, c]
    found = list(Replicated(largest, strategy, batch)(numbered(sizes)))
    assert [(e["number"], float(r["value"]), tuple(r["content"].numpy())) for e, r in found] == [
        (number, number, size) for number, size in enumerate(sizes)
    ]
    assert {shape[0] for shape in traced} == {batch}
    times = collections.Counter(shape[1:3] for shape in traced)
    assert set(times) == set(sizes) and max(times.values()) <= replicas
    assert "retracing" not in capfd.readouterr().err


def test_photos_keep_their_scale_on_the_smallest_canvas(task, model):
    """As the network alone sees them, in the data set's order. A padded canvas is at most the next side of the list."""
    examples, canvases = list(task.eval_dataset()), set()
    for (example, found), own in zip(CheckpointPredictions(task, model)(iter(examples)), examples, strict=True):
        assert example is own
        photo = decode_photo(example)
        content = np.round(np.array(photo.shape[:2]) * np.float32(SCALE)).astype(np.int32)
        canvas = [min(s for s in sides if s >= side) for sides, side in zip(SIDES, content)]
        canvases.add(tuple(canvas))
        assert list(example["image"].shape[:2]) == canvas and list(example["content"].numpy()) == list(content)
        image = place_image(photo, tf.constant(content), canvas)
        np.testing.assert_allclose(example["image"], image, atol=1e-6)
        wanted = full_size(
            {k: v[0] for k, v in task.segment(task.maps(model, image[None])).items()}, content, photo.shape[:2]
        )
        for name, value in wanted.items():
            assert np.mean(found[name].numpy() != value) < 1e-3 or name == "score", name
    assert len(canvases) > 2


def test_stored_outputs_and_other_looks_have_the_canvases_of_their_photos(task, model, tmp_path):
    examples = list(task.eval_dataset().take(3))
    looks = dict(scales=(1.0, 0.5), flip=True)
    store = OutputStore(str(tmp_path), task.spec, "val2017", {})
    outputs = NetworkOutputs(task, model, **looks)
    wanted = [p for _, p in CheckpointPredictions(task, model, **looks)(examples)]
    for _ in range(2):  # computed, then read
        found = [p for _, p in outputs.predictions(store)(examples)]
        for ours, theirs, example in zip(found, wanted, examples, strict=True):
            assert ours["panoptic"].shape == tuple(example["size"].numpy())
            assert np.mean(ours["panoptic"].numpy() != theirs["panoptic"].numpy()) < 1e-3
        outputs = NetworkOutputs(task, None, **looks)  # nobody asks this network


@pytest.mark.parametrize(
    "scale,words",
    [(0.5, "holds at most 145x129"), (0.0005, "; expected at least 1x1"), (100.0, "holds at most 145x129")],
)
def test_a_scale_that_does_not_suit_a_photo_is_one_line(sample_dir, scale, words):
    task = make_task(sample_dir, (129, 145), data={"photo_scale": scale})
    example = next(iter(task.eval_dataset()))
    height, width = example["size"].numpy()
    sizes = f"{width}x{height} pixels become {round(width * scale)}x{round(height * scale)}"
    line = f"{sizes} by DataConfig.photo_scale = {scale:g}; .*{words.lstrip('; ')}$"
    for predictions in (CheckpointPredictions(task, None), NetworkOutputs(task, None)):
        with pytest.raises(InputError, match=f"^{photo_name(example)}: {line}"):
            list(predictions(task.eval_dataset()))
    with pytest.raises(InputError, match=f"^{line}"):
        task.example(decode_photo(example))
