"""Batches are mixed like by a uniform shuffle. All hosts together read each record equally often. Streams resume."""

import json
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from axial.data import tfrecord
from axial.data.streams import Stream, evaluation_stream, training_stream
from axial.errors import InputError
from tests.data.labels_fixture import convert_labels, label_of, uniform_classes

CLASSES, CLASS_SIZE, SHARDS = 500, 16, 64  # in class order, a class would fill an eighth of a shard
BATCH = 256


def stream(folder, *, batch, hosts=1, host=0, seed=0, first_step=0, shuffle=1024):
    """Returns a host's training stream, a dataset of {'id', 'class'}. Each host has one replica."""
    spec = tfrecord.read_manifest(str(folder), "train")["spec"]
    host_stream = Stream(batch, seed, first_step, tf.distribute.InputContext(hosts, host, hosts))
    return training_stream(str(folder), "train", spec, label_of, stream=host_stream, shuffle=shuffle, labels="class")


def ids(folder, steps, **options):
    """Returns the ids in a host's first batches, int [steps, batch]."""
    return np.array([batch["id"] for batch in stream(folder, **options).take(steps).as_numpy_iterator()])


# === How records are mixed ===


@pytest.fixture(scope="module")
def sorted_dir(tmp_path_factory):
    """A data set whose items are ordered by class."""
    folder = tmp_path_factory.mktemp("sorted")
    convert_labels(folder, np.repeat(np.arange(CLASSES), CLASS_SIZE), SHARDS)
    return folder


def test_batches_are_as_mixed_as_by_a_uniform_shuffle(sorted_dir, hosts=2):
    streams = [stream(sorted_dir, batch=BATCH, hosts=hosts, host=host).take(5) for host in range(hosts)]
    steps = zip(*(one.as_numpy_iterator() for one in streams))
    actual = [len(np.unique([batch["class"] for batch in parts])) for parts in steps]
    assert len(actual) == 5
    assert np.mean(actual) == pytest.approx(uniform_classes(np.repeat(np.arange(CLASSES), CLASS_SIZE), BATCH), rel=0.05)


def test_an_evaluation_example_has_the_number_of_its_item_in_the_data_set(tmp_path):
    convert_labels(tmp_path, np.arange(50), 3)
    spec = tfrecord.read_manifest(str(tmp_path), "train")["spec"]

    def numbers_of(shard, skip=0):
        options = dict(labels="class", shard=shard, skip=skip)
        examples = evaluation_stream(str(tmp_path), "train", spec, lambda record: {"id": record["image/id"]}, **options)
        return [(int(example["number"]), int(example["id"])) for example in examples]

    whole = numbers_of((0, 1))
    assert sorted(whole) == [(number, number) for number in range(50)] != whole
    assert [numbers_of((i, 3), skip=2) for i in range(3)] == [whole[i::3][2:] for i in range(3)]


# === Hosts ===


CASES = [(7, 1, 1, 0, 3), (10, 3, 3, 5, 11)]


@pytest.mark.parametrize("records,hosts,shards,shuffle,step", CASES)
def test_hosts_see_all_records_equally_often_at_any_time_and_resume(tmp_path, records, hosts, shards, shuffle, step):
    options = dict(batch=hosts, hosts=hosts, shuffle=shuffle, seed=shards)
    convert_labels(tmp_path, np.arange(records), shards)
    streams = np.array([ids(tmp_path, 2 * records, host=host, **options)[:, 0] for host in range(hosts)])
    resumed = ids(tmp_path, 2 * records - step, host=hosts - 1, first_step=step, **options)[:, 0]
    np.testing.assert_array_equal(resumed, streams[hosts - 1, step:])
    counts = (streams[:, :, None] == np.arange(records)).sum(0).cumsum(0)  # [steps, records]
    assert (counts.max(1) - counts.min(1)).max() <= 2
    for epochs in range(1, 2 * hosts + 1):  # at an epoch's end, a host may be one record ahead
        steps = records * epochs / hosts
        assert (counts[int(np.ceil(steps)) - 1] >= epochs).all()
        assert (counts[int(np.floor(steps)) - 1] <= epochs).all()


def test_more_hosts_than_records_are_refused(tmp_path):
    convert_labels(tmp_path, np.arange(8), 3)
    with pytest.raises(InputError, match="too few records in 'train' for 9 hosts"):
        stream(tmp_path, batch=9, hosts=9, host=8)


# === Records of older versions ===


@pytest.fixture
def older_dir(tmp_path):
    """A data set as older versions wrote it: in the items' order, and without 'permutation' in the manifest."""
    convert_labels(tmp_path / "older", np.repeat(np.arange(10), 8), 5, permutation=None)
    path = tmp_path / "older" / "train.json"
    manifest = json.loads(path.read_text())
    assert manifest.pop("permutation") is None
    path.write_text(json.dumps(manifest))
    return str(tmp_path / "older")


def older_stream(folder, seed, shuffle):
    """Returns the records of a single host in the order in which older versions read them."""
    files = [os.path.join(folder, name) for name, *_ in tfrecord.read_manifest(folder, "train")["shards"]]

    def epoch_records(epoch):
        key = tf.random.experimental.stateless_fold_in([seed, 0], epoch)
        order = tf.random.stateless_uniform([], key, minval=0, maxval=tf.int64.max, dtype=tf.int64)
        dataset = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files), order)
        return dataset.interleave(tf.data.TFRecordDataset, min(len(files), 16)).shuffle(shuffle, order)

    return tf.data.Dataset.range(99).flat_map(epoch_records)


def test_a_run_of_an_older_version_on_one_host_goes_on_with_its_stream(older_dir, shuffle=7):
    records = older_stream(older_dir, 3, shuffle).take(120)
    expected = [int(tfrecord.parse_example(record, "class")["image/id"]) for record in records]
    options = dict(batch=4, shuffle=shuffle, seed=3)
    np.testing.assert_array_equal(ids(older_dir, 30, **options).ravel(), expected)
    np.testing.assert_array_equal(ids(older_dir, 5, first_step=25, **options).ravel(), expected[100:])


def test_one_line_warns_of_records_in_the_order_of_an_older_version(older_dir, sorted_dir, capfd):
    def said(folder, **options):
        stream(folder, batch=2, **options)
        return capfd.readouterr().err

    line = said(older_dir, shuffle=8)
    assert line.count("\n") == 1 and "'train' has the order that an older version wrote: neighbours may be" in line
    assert not said(older_dir, shuffle=80)  # the buffer holds all records
    assert not said(sorted_dir, shuffle=8)


def test_conversion_goes_on_in_the_order_in_which_it_began(older_dir):
    """A missing shard is rewritten in the old order, after a complete conversion and after a killed conversion."""
    folder = pathlib.Path(older_dir)
    before = {path.name: path.read_bytes() for path in folder.glob("*.tfrecord")}
    for begun in (False, True):
        min(folder.glob("*.tfrecord")).unlink()
        if begun:
            (folder / "train.json").rename(folder / ".train.plan")
        assert convert_labels(older_dir, np.repeat(np.arange(10), 8), 5)["permutation"] is None
        assert {path.name: path.read_bytes() for path in folder.glob("*.tfrecord")} == before
