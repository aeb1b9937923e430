"""tf.data pipelines from TFRecords: deterministic, and resumable at any step."""

import dataclasses
import os

import tensorflow as tf

from axial.data import tfrecord
from axial.data.panoptic_targets import panoptic_targets, semantic_targets
from axial.data.preprocess import content_size, place_image, place_labels, preprocess
from axial.errors import InputError

AUTOTUNE = tf.data.AUTOTUNE


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What training does to photos; their colours are left alone.

    Attributes:
        scales: range of the random scale, over the photo fitted to the canvas.
        flip: whether half of the photos are mirrored.
        crop: (height, width) of what is cut or padded at random; None: the canvas.
    """

    scales: tuple = (0.5, 2.0)
    flip: bool = True
    crop: tuple | None = None


def decode_photo(record):
    """uint8 [h, w, 3] of a parsed record."""
    image = tf.io.decode_image(record["image/encoded"], channels=3, expand_animations=False)
    return tf.ensure_shape(image, [None, None, 3])


def segment_map(record):
    """int32 [h, w] of a parsed record: 0 without a label, i + 1 for its i-th segment."""
    ids = tfrecord.segment_ids(record["panoptic/encoded"])
    known = tf.cast(record["segment/id"], tf.int32)  # rising
    known = tf.concat([[0], known], 0)
    flat = tf.reshape(ids, [-1])
    index = tf.minimum(tf.searchsorted(known, flat), tf.shape(known)[0] - 1)
    index = tf.where(tf.gather(known, index) == flat, index, 0)
    return tf.reshape(index, tf.shape(ids))


def training_example(record, seed, spec, canvas, augmentation=Augmentation(), instances=True):
    """The network's input and targets of one record, augmented as `seed` (int [2]) says.

    The photo is scaled to fit the canvas times the factor drawn. Without `instances` there are
    `semantic_targets` alone.
    """
    crop = augmentation.crop or canvas
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
    content = content_size(tf.shape(image)[:2], canvas, scale)
    room = tf.cast(tf.maximum(content - tf.stack(crop), 0) + 1, tf.float32)
    corner = tf.cast(tf.floor(draw[2:] * room), tf.int32)
    segments = place_labels(segments, content, crop, corner)
    if instances:
        targets = panoptic_targets(segments, record["segment/class"], record["segment/crowd"], spec)
    else:
        targets = semantic_targets(segments, record["segment/class"], spec)
    return {"image": place_image(image, content, crop, corner), **targets}


def evaluation_example(record, canvas):
    """A record with the network's 'image', the 'content' size on it and the photo's 'size'."""
    photo = decode_photo(record)
    image, content = preprocess(photo, canvas)
    return {"image": image, "content": content, "size": tf.shape(photo)[:2], **record}


# === Streams ===


def check_spec(manifest, spec, data_dir):
    """InputError unless the split was converted under `spec`."""
    if manifest["spec"] != spec:
        raise InputError(
            f"{data_dir}: converted for the spec {manifest['spec'].name!r} of "
            f"{manifest['spec'].num_classes} classes, not for {spec.name!r} of {spec.num_classes}"
        )


def training_dataset(
    data_dir,
    split,
    spec,
    canvas,
    batch,
    seed=0,
    first_step=0,
    augmentation=Augmentation(),
    shuffle=1024,
    context=None,
    instances=True,
):
    """An endless stream of batches from step `first_step` on, the same however often it restarts.

    Every epoch has its own order of shards and records and its own augmentation, both from `seed`;
    resuming reads past the records that were used, without decoding them.

    Args:
        data_dir, split: of a converted data set.
        spec: `DatasetSpec` that it was converted under.
        canvas: (height, width) that photos are fitted to.
        batch: images of a step over all hosts.
        augmentation, instances: as of `training_example`.
        shuffle: records drawn from at a time.
        context: `tf.distribute.InputContext`; each of several hosts reads its own records.

    Raises:
        InputError: a data set that is missing, damaged, empty or of another spec; a batch that the
            hosts do not divide.
    """
    manifest = tfrecord.read_manifest(data_dir, split)
    check_spec(manifest, spec, data_dir)
    hosts, host = (context.num_input_pipelines, context.input_pipeline_id) if context else (1, 0)
    if batch % hosts:
        raise InputError(f"batch {batch} cannot be shared by {hosts} hosts")
    batch //= hosts
    shards = manifest["shards"]
    by_shard = len(shards) >= hosts  # otherwise every hosts-th record
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
        order = tf.random.stateless_uniform([], key, 0, tf.int64.max, tf.int64)
        dataset = tf.data.Dataset.from_tensor_slices(files)
        if shuffle:
            dataset = dataset.shuffle(len(files), order)
        dataset = dataset.interleave(tf.data.TFRecordDataset, min(len(files), 16))
        if not by_shard:
            dataset = dataset.shard(hosts, host)
        return dataset.shuffle(shuffle, order) if shuffle else dataset

    used = first_step * batch
    epochs = tf.data.Dataset.range(used // records, tf.int64.max)
    dataset = epochs.flat_map(epoch_records).skip(used % records).enumerate(used)

    def example(number, serialized):
        key = tf.random.experimental.stateless_fold_in([seed, 1 + host], number)
        record = tfrecord.parse_example(serialized)
        return training_example(record, key, spec, canvas, augmentation, instances)

    dataset = dataset.map(example, AUTOTUNE, deterministic=True)
    return dataset.batch(batch, drop_remainder=True).prefetch(AUTOTUNE)


def evaluation_dataset(data_dir, split, spec, canvas, shard=(0, 1), skip=0):
    """The records of a split once, in order, as `evaluation_example`s, one at a time.

    Args:
        data_dir, split: of a converted data set.
        spec: `DatasetSpec` that it was converted under.
        canvas: (height, width) of the network's input.
        shard: (i, n) for every n-th record from the i-th on.
        skip: records of the shard that are left out at its beginning.
    """
    manifest = tfrecord.read_manifest(data_dir, split)
    check_spec(manifest, spec, data_dir)
    files = [os.path.join(data_dir, name) for name, *_ in manifest["shards"]]
    dataset = tf.data.TFRecordDataset(files).shard(shard[1], shard[0]).skip(skip)

    def example(record):
        return evaluation_example(tfrecord.parse_example(record), canvas)

    return dataset.map(example, AUTOTUNE, deterministic=True).prefetch(AUTOTUNE)
