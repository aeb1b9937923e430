"""Input streams are deterministic, resume at any step, and prepare photos as evaluation and serving do."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from axial.data.coco import SAMPLE_DIR, coco_items, encode_item
from axial.data.convert import convert_split
from axial.data.pipeline import (
    Augmentation,
    DataConfig,
    decode_photo,
    evaluation_dataset,
    training_dataset,
    training_example,
)
from axial.data.preprocess import preprocess
from axial.data.specs import COCO
from axial.data.streams import training_stream
from axial.errors import InputError

CANVAS = (65, 65)
PLAIN = Augmentation(scales=(1.0, 1.0), flip=False, shift=False)


@pytest.fixture(scope="module")
def shards_dir(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("shards"))
    items, source = coco_items(SAMPLE_DIR, "train2017")
    convert_split(items, encode_item, COCO, "train2017", output_dir=path, source=source, shards=3, progress=False)
    return path


def take(path, count, batch=3, augmentation=Augmentation(), shuffle=1024, **options):
    data = DataConfig("train2017", "val2017", CANVAS, augmentation, shuffle=shuffle)
    dataset = training_dataset(path, data, COCO, batch=batch, **options)
    return [{k: v.numpy() for k, v in b.items()} for b in dataset.take(count)]


def same(one, other):
    return all(np.array_equal(one[k], other[k]) for k in one)


def test_a_seed_decides_everything(shards_dir):
    first, again, other = (take(shards_dir, 4, seed=s) for s in (5, 5, 6))
    assert all(map(same, first, again))
    assert not any(map(same, first, other))


@pytest.mark.parametrize("step", [1, 3, 7])
def test_resumed_streams_go_on(shards_dir, step):
    """A stream also resumes across the end of an epoch, which has eight photos in batches of three."""
    whole = take(shards_dir, step + 3, seed=1)
    resumed = take(shards_dir, 3, seed=1, first_step=step)
    assert all(map(same, whole[step:], resumed))


def test_every_epoch_shows_every_photo_in_another_order(shards_dir):
    options = dict(augmentation=PLAIN, seed=2)
    batches = take(shards_dir, 4, 4, **options)
    epochs = [np.concatenate([batches[i]["image"], batches[i + 1]["image"]]) for i in (0, 2)]
    keys = [sorted(image.sum() for image in epoch) for epoch in epochs]
    np.testing.assert_allclose(*keys)
    assert len(set(np.round(keys[0], 3))) == 8
    assert not np.array_equal(*epochs)


@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_hosts_share_the_photos(shards_dir, hosts):
    """Of eight photos in three shards each host reads its part in the first epoch, and the next part in the second."""
    edges = [8 * host // hosts for host in range(hosts)] + [8]
    epochs = [[], []]
    for host in range(hosts):
        stream = training_stream(
            *(shards_dir, "train2017", COCO, lambda record, _: {"id": record["image/id"]}),
            **dict(batch=hosts, shuffle=4, context=tf.distribute.InputContext(hosts, host, hosts)),
        )
        found = (int(batch["id"][0]) for batch in stream)
        for epoch, parts in enumerate(epochs):
            part = (host + epoch) % hosts
            parts.append(list(itertools.islice(found, edges[part + 1] - edges[part])))
    for parts in epochs:
        photos = [photo for part in parts for photo in part]
        assert len(set(photos)) == len(photos) == 8
    assert [set(part) for part in epochs[1]] == [set(epochs[0][(host + 1) % hosts]) for host in range(hosts)]


def test_augmentation_keeps_image_and_targets_together(shards_dir):
    """A photo and its labels are flipped together."""
    plain = take(shards_dir, 1, 8, augmentation=PLAIN, shuffle=0)[0]
    flipped = take(shards_dir, 1, 8, augmentation=Augmentation(scales=(1.0, 1.0), shift=False), shuffle=0, seed=3)[0]
    turned = 0
    for i in range(8):
        width = int((plain["image"][i] != 0).any((0, 2)).sum())
        if not np.array_equal(plain["image"][i], flipped["image"][i]):
            turned += 1
            np.testing.assert_allclose(plain["image"][i][:, :width][:, ::-1], flipped["image"][i][:, :width], atol=1e-2)
            agree = plain["semantic"][i][:, :width][:, ::-1] == flipped["semantic"][i][:, :width]
            assert agree.mean() > 0.97
    assert 0 < turned < 8


@pytest.mark.parametrize("size", [(40, 20), (20, 40), (40, 40)])
def test_small_photos_are_put_at_random_places(size):
    """There is padding on all four sides, the photo and its labels stay aligned, and every place is drawn."""
    photo = np.full([*size, 3], 255, np.uint8)
    record = {
        "image/encoded": tf.io.encode_png(photo),
        "panoptic/encoded": tf.io.encode_png(np.full([*size, 3], (1, 0, 0), np.uint8)),
        "segment/id": tf.constant([1], tf.int64),
        "segment/class": tf.constant([0], tf.int64),
        "segment/crowd": tf.constant([0], tf.int64),
    }
    data = DataConfig("a", "b", (40, 40), Augmentation(scales=(0.9, 0.9), flip=False))
    corners = set()
    for number in range(60):
        example = training_example(record, [0, number], COCO, data)
        inside = (example["image"].numpy() > 0.99).all(-1)
        np.testing.assert_array_equal(example["semantic"].numpy() == 0, inside)
        rows, columns = (np.flatnonzero(inside.any(axis)) for axis in (1, 0))
        assert inside.sum() == len(rows) * len(columns) == np.prod([round(0.9 * s) for s in size])
        np.testing.assert_array_equal(example["image"].numpy()[~inside], 0)
        corners.add((int(rows[0]), int(columns[0])))
    room = [40 - round(0.9 * s) for s in size]
    for axis, most in enumerate(room):
        drawn = {corner[axis] for corner in corners}
        assert min(drawn) == 0 or most > 20
        assert max(drawn) <= most and len(drawn) > min(most, 20) / 2


def test_evaluation_prepares_photos_as_preprocess_does(sample_dir):
    examples = list(evaluation_dataset(sample_dir, "val2017", COCO, CANVAS))
    assert len(examples) == 8
    for example in examples:
        photo = decode_photo(example)
        image, content = preprocess(photo, CANVAS)
        np.testing.assert_array_equal(example["image"], image)
        np.testing.assert_array_equal(example["content"], content)
        assert tuple(example["size"].numpy()) == photo.shape[:2]


def test_training_without_augmentation_prepares_photos_as_evaluation_does(sample_dir):
    options = dict(augmentation=PLAIN, shuffle=0)
    (batch,) = take(sample_dir, 1, 8, **options)
    examples = evaluation_dataset(sample_dir, "train2017", COCO, CANVAS)
    for ours, example in zip(batch["image"], examples):
        np.testing.assert_array_equal(ours, example["image"])


def test_wrong_input_is_named(shards_dir):
    other = dataclasses.replace(COCO, name="other")
    with pytest.raises(InputError, match="converted for the spec 'coco'"):
        training_dataset(shards_dir, DataConfig("train2017", "val2017", CANVAS), other, batch=1)
    with pytest.raises(InputError, match="batch 3 cannot be shared by 2 replicas"):
        take(shards_dir, 1, 3, context=tf.distribute.InputContext(2, 0, 2))
    with pytest.raises(InputError, match="too few records"):
        take(shards_dir, 1, 9, context=tf.distribute.InputContext(9, 8, 9))
