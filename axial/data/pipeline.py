"""tf.data pipelines from TFRecords. They are deterministic, and resume at any step."""

import contextlib
import dataclasses
import os

import tensorflow as tf

from axial.data import tfrecord
from axial.data.panoptic_targets import TargetConfig, panoptic_targets, semantic_targets
from axial.data.preprocess import content_size, place_image, place_labels, preprocess
from axial.errors import InputError
from axial.io.check import Name, Natural, Scale, Size, checked
from axial.io.read import first_line

AUTOTUNE = tf.data.AUTOTUNE


@checked
@dataclasses.dataclass(frozen=True)
class Augmentation:
    """How training changes photos at random. Their colours stay as they are.

    Attributes:
        scales: range of the random scale, relative to the photo fitted to the canvas.
        flip: whether photos are mirrored, with a probability of 1/2.
        shift: whether a photo larger than the crop is cut at a random place, and a smaller one put at a random place.
            Otherwise both happen at the upper left corner, as in evaluation.
        crop: (height, width) that photos are cut or padded to; None for the canvas' size.
    """

    scales: tuple[Scale, Scale] = (0.5, 2.0)
    flip: bool = True
    shift: bool = True
    crop: Size | None = None

    def __post_init__(self):
        if self.scales[0] > self.scales[1]:
            raise InputError(f"Augmentation.scales = {self.scales}: expected (smallest, largest)")


@checked
@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which photos a task sees, and how.

    Attributes:
        train_split, eval_split: splits of a converted data set.
        canvas: (height, width) that photos are fitted to; the network's input in evaluation.
        augmentation: `Augmentation` of training photos.
        targets: `TargetConfig`.
        shuffle: number of records in the buffer that training draws from; 0 keeps the order of the files.
    """

    train_split: Name
    eval_split: Name
    canvas: Size = (641, 641)
    augmentation: Augmentation = Augmentation()
    targets: TargetConfig = TargetConfig()
    shuffle: Natural = 1024

    @property
    def crop(self):
        """(height, width) of the network's input in training."""
        return tuple(self.augmentation.crop or self.canvas)


def decode_photo(record):
    """uint8 [h, w, 3] of a parsed record."""
    image = tf.io.decode_image(record["image/encoded"], channels=3, expand_animations=False)
    return tf.ensure_shape(image, [None, None, 3])


def segment_map(record):
    """int32 [h, w] of a parsed record: 0 without a label, i + 1 for segment i."""
    ids = tfrecord.segment_ids(record["panoptic/encoded"])
    known = tf.cast(record["segment/id"], tf.int32)  # in rising order
    known = tf.concat([[0], known], 0)
    flat = tf.reshape(ids, [-1])
    index = tf.minimum(tf.searchsorted(known, flat), tf.shape(known)[0] - 1)
    index = tf.where(tf.gather(known, index) == flat, index, 0)
    return tf.reshape(index, tf.shape(ids))


def training_example(record, seed, spec, data, instances=True):
    """The network's input and targets of one record, as a dict.

    Args:
        record: of `tfrecord.parse_example`.
        seed: int [2]; decides the augmentation.
        spec: `DatasetSpec`.
        data: `DataConfig`.
        instances: whether the targets are `panoptic_targets`; otherwise they are `semantic_targets`.
    """
    crop, augmentation = data.crop, data.augmentation
    draw = tf.random.stateless_uniform([4], seed)
    image, segments = decode_photo(record), segment_map(record)
    if augmentation.flip:
        image, segments = tf.cond(
            draw[0] < 0.5,
            lambda: (tf.reverse(image, [1]), tf.reverse(segments, [1])),
            lambda: (image, segments),
        )
    low, high = augmentation.scales
    scale = low + draw[1] * (high - low)
    content = content_size(tf.shape(image)[:2], data.canvas, scale)
    corner = tf.zeros([2], tf.int32)
    if augmentation.shift:
        room = content - tf.stack(crop)  # negative where the photo is smaller than the crop
        corner = tf.sign(room) * tf.cast(tf.floor(draw[2:] * tf.cast(tf.abs(room) + 1, tf.float32)), tf.int32)
    segments = place_labels(segments, content, crop, corner)
    if instances:
        labels = record["segment/class"], record["segment/crowd"]
        targets = panoptic_targets(segments, *labels, spec=spec, config=data.targets)
    else:
        targets = semantic_targets(segments, record["segment/class"], spec)
    return {"image": place_image(image, content, crop, corner), **targets}


def evaluation_example(record, canvas):
    """A record plus 'image' (the network's input), 'content' (the photo's size on it) and 'size' (the photo's own)."""
    photo = decode_photo(record)
    image, content = preprocess(photo, canvas)
    return {"image": image, "content": content, "size": tf.shape(photo)[:2], **record}


# === Streams ===


@contextlib.contextmanager
def name_damaged_records(data_dir, split):
    """InputError, which names the shard and the record, in place of what TensorFlow raises for a damaged record."""
    try:
        yield
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
        if isinstance(error, tf.errors.DataLossError) or "Iterator" in str(error):
            check_records(data_dir, split)
        raise


def check_records(data_dir, split):
    """Reads every record of a split. Raises InputError, which names the shard and the record, at a damaged one."""
    manifest = tfrecord.read_manifest(data_dir, split)
    for name, records, _ in manifest["shards"]:
        where, number = os.path.join(data_dir, name), 0
        try:
            for serialized in tf.data.TFRecordDataset(where):
                record = known_classes(tfrecord.parse_example(serialized), manifest["spec"])
                size = tuple(decode_photo(record).shape[:2])
                if not size == segment_map(record).shape == (record["image/height"], record["image/width"]):
                    raise InputError(f"{where}: record {number}: photo and labels are not of the size that it says")
                number += 1
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
            raise InputError(f"{where}: record {number} is damaged ({first_line(error)}); convert again") from None
        if number != records:
            raise InputError(f"{where}: {number} records, the manifest says {records}; convert again")


def known_classes(record, spec):
    """The record. TensorFlow raises InvalidArgumentError unless its classes are those of the spec."""
    classes, known = record["segment/class"], tf.constant(spec.num_classes, tf.int64)
    same = tf.shape(classes) == tf.shape(record["segment/id"])
    checks = [
        tf.debugging.Assert(tf.reduce_all((classes >= 0) & (classes < known)), ["unknown class", classes]),
        tf.debugging.Assert(tf.reduce_all(same), ["segments and classes differ in number"]),
    ]
    with tf.control_dependencies(checks):
        return {**record, "segment/class": tf.identity(classes)}


def check_spec(manifest, spec, data_dir):
    """Raises InputError unless the split was converted under `spec`."""
    if manifest["spec"] != spec:
        raise InputError(
            f"{data_dir}: converted for the spec {manifest['spec'].name!r} of "
            f"{manifest['spec'].num_classes} classes, not for {spec.name!r} of {spec.num_classes}"
        )


def training_dataset(data_dir, data, spec, *, batch, seed=0, first_step=0, context=None, instances=True):
    """An endless stream of batches from step `first_step` on. A restarted training gets the same batches.

    Every epoch has its own order of shards and records and its own augmentation. Both follow from `seed`. A resumed
    stream skips the records that were used, without decoding them.

    Args:
        data_dir: folder of a converted data set.
        data: `DataConfig`.
        spec: `DatasetSpec` that the data set was converted under.
        batch: images in a step, over all hosts.
        seed, first_step: ints.
        context: `tf.distribute.InputContext`. If there are several hosts, each reads its own records.
        instances: see `training_example`.

    Raises:
        InputError: a data set that is missing, damaged, empty or of another spec; a batch that cannot be shared equally
            by the hosts.
    """
    split = data.train_split
    manifest = tfrecord.read_manifest(data_dir, split)
    check_spec(manifest, spec, data_dir)
    hosts, host = (context.num_input_pipelines, context.input_pipeline_id) if context else (1, 0)
    if batch % hosts:
        raise InputError(f"batch {batch} cannot be shared by {hosts} hosts")
    batch //= hosts
    shards = manifest["shards"]
    by_shard = len(shards) >= hosts  # otherwise a host reads every hosts-th record
    if by_shard:
        shards = shards[host::hosts]
    files = [os.path.join(data_dir, name) for name, *_ in shards]
    records = sum(count for _, count, _ in shards)
    if not by_shard:
        records = len(range(host, records, hosts))
    if not records:
        raise InputError(f"{data_dir}: too few records in {split!r} for {hosts} hosts")

    def epoch_records(epoch):
        key = tf.random.experimental.stateless_fold_in([seed, 0], epoch)
        order = tf.random.stateless_uniform([], key, minval=0, maxval=tf.int64.max, dtype=tf.int64)
        dataset = tf.data.Dataset.from_tensor_slices(files)
        if data.shuffle:
            dataset = dataset.shuffle(len(files), order)
        dataset = dataset.interleave(tf.data.TFRecordDataset, min(len(files), 16))
        if not by_shard:
            dataset = dataset.shard(hosts, host)
        return dataset.shuffle(data.shuffle, order) if data.shuffle else dataset

    used = first_step * batch
    epochs = tf.data.Dataset.range(used // records, tf.int64.max)
    dataset = epochs.flat_map(epoch_records).skip(used % records).enumerate(used)

    def example(number, serialized):
        key = tf.random.experimental.stateless_fold_in([seed, 1 + host], number)
        record = known_classes(tfrecord.parse_example(serialized), spec)
        return training_example(record, key, spec, data, instances=instances)

    dataset = dataset.map(example, AUTOTUNE, deterministic=True)
    return dataset.batch(batch, drop_remainder=True).prefetch(AUTOTUNE)


def evaluation_dataset(data_dir, split, spec, canvas, *, shard=(0, 1), skip=0):
    """The records of a split once, in order, one at a time, as `evaluation_example`s.

    Args:
        data_dir, split: of a converted data set.
        spec: `DatasetSpec` that it was converted under.
        canvas: (height, width) of the network's input.
        shard: (i, n) for every n-th record, from the i-th on.
        skip: number of records to leave out at the beginning of the shard.
    """
    manifest = tfrecord.read_manifest(data_dir, split)
    check_spec(manifest, spec, data_dir)
    files = tfrecord.shard_paths(data_dir, manifest)
    dataset = tf.data.TFRecordDataset(files).shard(shard[1], shard[0]).skip(skip)

    def example(record):
        return evaluation_example(known_classes(tfrecord.parse_example(record), spec), canvas)

    return dataset.map(example, AUTOTUNE, deterministic=True).prefetch(AUTOTUNE)
