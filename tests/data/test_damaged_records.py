"""Damaged records: for any wrong field, every reader names the shard, the record and the photo."""

import dataclasses
import functools
import itertools
import re

import numpy as np
import pytest
import tensorflow as tf

from axial.analysis.data_check import check_split
from axial.data import tfrecord
from axial.data.labels import colors_of, encode_rgb
from axial.data.preprocess import preprocess
from axial.data.specs import DatasetSpec
from axial.data.streams import check_records, decode_photo, name_damaged_records, record_fault, spec_of, whole_record
from axial.errors import InputError
from axial.io.write import write_json
from axial.models.registry import ModelConfig
from axial.tasks.classification import task as classification
from axial.tasks.classification.task import ClassificationTask
from axial.tasks.detection import input_pipeline as detection
from axial.tasks.detection.task import DetectionTask
from axial.tasks.segmentation import input_pipeline as pipeline
from axial.tasks.segmentation.panoptic import PanopticTask
from axial.tasks.translation.input_pipeline import TextData
from axial.tasks.translation.task import TranslationTask
from tests.data.record_fixture import CHANGES, changed, png, remove, retype, shorten, spoil

SPEC = DatasetSpec("test", ("road", "car"), (1, 2), (False, True))


def panoptic_record(name="a.png"):
    """A serialised record of 20x30 pixels with two segments, and two boxes with masks."""
    ids = np.where(np.arange(30) < 15, 1, 5)[None].repeat(20, 0)
    fields = {
        "image/encoded": png(np.random.default_rng(sum(map(ord, name))).integers(0, 256, [20, 30, 3])),
        "image/file_name": name,
        "image/id": sum(map(ord, name)),
        "image/height": 20,
        "image/orientation": 1,
        "image/width": 30,
        "panoptic/encoded": encode_rgb(colors_of(ids)),
        "segment/id": [1, 5],
        "segment/class": [0, 1],
        "segment/crowd": [0, 0],
        "box/known": 1,
        "box/class": [1, 1],
        "box/crowd": [0, 1],
        "box/numbers": np.array([[1, 2, 8, 9, 60], [0, 0, 5, 5, 25]], "<f8").tobytes(),
        "box/mask": [png(255 * (ids == 1)), png(255 * (ids == 5))],
    }
    return tfrecord.encode_example(fields)


def class_record(name="a.png"):
    pixels = np.full([20, 30, 3], sum(map(ord, name)) % 256)
    size = {"image/height": 20, "image/width": 30, "image/orientation": 1}
    fields = {"image/encoded": png(pixels), "image/file_name": name, "image/id": 1, **size, "image/class": 1}
    return tfrecord.encode_example(fields)


def text_record(name="a"):
    texts = {"source/text": name, "target/text": name}
    return tfrecord.encode_example({"text/id": 1, **texts, "source/ids": [5, 6, 1], "target/ids": [7, 1]})


RECORDS = {"panoptic": panoptic_record, "class": class_record, "text": text_record}


def write_split(folder, records, labels, spec=SPEC):
    """Writes a split 'val' of one shard, and the split's manifest. Returns the shard's path."""
    name = tfrecord.shard_name("val", 0, 1)
    tfrecord.write_shard(str(folder / name), records)
    plan = {"format": 1, "spec": spec.to_json(), "split": "val", "examples": len(records), "source": "a test"}
    shards = [[name, len(records), (folder / name).stat().st_size]]
    write_json(str(folder / "val.json"), {**plan, "shards": shards, "labels": labels})
    return str(folder / name)


# Functions that readers apply to undamaged records.
EXAMPLES = {
    "panoptic": lambda record: (
        preprocess(decode_photo(record), (33, 33)),
        pipeline.training_example(record, [0, 1], SPEC, pipeline.DataConfig("val", "val", (33, 33))),
        detection.record_objects(record, SPEC),
        detection.record_masks(record, SPEC),
    ),
    "class": lambda record: classification.central_crop(decode_photo(record), (32, 32), 0.875),
    "text": lambda record: record,
}


@dataclasses.dataclass(frozen=True)
class Words:
    """A stand-in for a `TextSpec`."""

    name: str = "words"
    num_classes: int = 8


@pytest.mark.parametrize("labels", RECORDS)
def test_a_record_with_a_wrong_field_is_refused_or_read(labels):
    """If `record_fault` reports no fault, the record can be read. Otherwise `whole_record` raises InputError."""
    spec, record = Words() if labels == "text" else SPEC, RECORDS[labels]()
    parsed = functools.partial(tfrecord.parse_example, labels=labels)
    read = tf.function(lambda s: EXAMPLES[labels](whole_record(parsed(s), spec, pictures=True)))
    faults = {}
    for key, change in [(None, None), *itertools.product(tfrecord.SCHEMAS[labels], CHANGES)]:
        bad = changed(record, key, change) if key else record
        faults[key, change] = fault = record_fault(bad, spec, labels)
        assert "\n" not in fault and "{{" not in fault and "Op:" not in fault
        try:
            read(tf.constant(bad))
            assert not fault, (key, change)
        except tf.errors.InvalidArgumentError as error:
            assert fault, (key, change, error)
    required = [key for key, kind in tfrecord.SCHEMAS[labels].items() if not getattr(kind, "default_value", None)]
    assert not faults[None, None] and all(faults[key, retype] for key in required)
    assert sum(map(bool, faults.values())) > len(faults) / 2


# (schema, field, change, expected message, indices of the `streams` to try).
BAD = [
    ("panoptic", "panoptic/encoded", spoil, "is damaged \\(Invalid PNG data", (0,)),
    ("panoptic", "segment/class", shorten, "segment/class: expected one for each segment/id", (1, 2)),
    ("panoptic", "image/id", remove, "is damaged \\(Feature: image/id", (0,)),
    ("panoptic", "box/mask", spoil, "is damaged \\(Invalid PNG data", (3,)),
    ("class", "image/encoded", spoil, "is damaged \\(Invalid PNG data", (0, 1)),
    ("text", "target/ids", spoil, "target/ids: a number that the spec", (0, 1)),
]


@pytest.fixture
def bad_split(tmp_path, request, texts_dir):
    """A function of (labels, key, change) that writes a split of three records. Record 1 is damaged."""

    def write(labels, key, change):
        spec, records = SPEC, [RECORDS[labels](name) for name in ("a.png", "b.png", "c.png")]
        if labels == "text":
            spec = spec_of(texts_dir, "val", "text")
        records[1] = changed(records[1], key, change)
        return write_split(tmp_path, records, labels, spec), spec

    return write


def streams(labels, folder, spec):
    """Returns functions that make a stream of the split: evaluation and training for each task with this schema."""
    if labels == "class":
        data = classification.ClassificationData("val", "val", (32, 32), shuffle=0)
        tasks = [(ClassificationTask, "resnet_nano", data, 1)]
    elif labels == "text":
        tasks = [(TranslationTask, "transformer_nano", TextData("val", "val", (4, 8)), 8)]
    else:
        data = pipeline.DataConfig("val", "val", (33, 33), shuffle=0)
        boxes = detection.DetectionData("val", "val", (64, 64), (64, 64), shuffle=0)
        tasks = [(PanopticTask, "panoptic_deeplab_resnet_nano", data, 1)]
        tasks += [(DetectionTask, "mask_rcnn_resnet_nano", boxes, 1)]
    made = [(make(ModelConfig(name), data, folder, spec), batch) for make, name, data, batch in tasks]
    training = [functools.partial(task.train_dataset, batch, seed=0) for task, batch in made]
    return [*(task.eval_dataset for task, _ in made), *training]


@pytest.mark.parametrize("labels,key,change,words,tried", BAD, ids=[f"{row[0]} {row[1]}" for row in BAD])
def test_every_stream_names_a_bad_record(bad_split, tmp_path, labels, key, change, words, tried):
    shard, spec = bad_split(labels, key, change)
    name = "" if labels == "text" else r" \(b.png\)"
    line = f"^{re.escape(shard)}: record 1{name}:? {words}[^\n]*; convert again$"
    with pytest.raises(InputError, match=line):
        check_records(str(tmp_path), "val")
    readers = streams(labels, str(tmp_path), spec)
    for read in (readers[number] for number in tried):
        with pytest.raises(InputError, match=line), name_damaged_records(str(tmp_path), "val"):
            list(read().take(6))


@pytest.mark.parametrize("key,change,words", [row[1:4] for row in BAD if row[0] == "panoptic"])
def test_the_check_goes_on_after_a_bad_record(bad_split, tmp_path, key, change, words):
    bad_split("panoptic", key, change)
    report = check_split(str(tmp_path), "val")
    ((kind, where, what),) = [finding for finding in report.findings if finding[0] != "class never occurs"]
    assert kind == "unreadable" and re.search(words, what)
    assert where == "val-00000-of-00001.tfrecord: record 1"
    assert report.photos == 3 and report.photos_of.tolist() == [2, 2]
