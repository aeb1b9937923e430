"""tf.data streams from TFRecords, for every task. They are deterministic, and resume at any step."""

import contextlib
import os
import sys

import numpy as np
import tensorflow as tf

from axial.data import tfrecord
from axial.data.service import Tickets, served
from axial.errors import InputError
from axial.io.read import first_line

AUTOTUNE = tf.data.AUTOTUNE


def decode_photo(record):
    """uint8 [h, w, 3] of a parsed record."""
    image = tf.io.decode_image(record["image/encoded"], channels=3, expand_animations=False)
    return tf.ensure_shape(image, [None, None, 3])


def training_stream(
    data_dir,
    split,
    spec,
    example,
    *,
    batch,
    shuffle,
    labels="panoptic",
    finish=None,
    seed=0,
    first_step=0,
    context=None,
    service=None,
):
    """An endless stream of a replica's batches from step `first_step` on. A restarted training gets the same ones.

    A step takes a batch for each replica of the host, one after the other. Together they are the step's images.

    Every epoch has its own order of shards and records and its own augmentation. Both follow from `seed`. A resumed
    stream skips the records that were used, without decoding them.

    Several hosts cut the split into as many parts, whose sizes differ by at most one record. In each epoch a host reads
    the part after the one that it read before. So all records are seen equally often, up to the epochs in progress.

    Args:
        data_dir, split: of a converted data set.
        spec: `DatasetSpec` that it was converted under.
        example: function of a record and of a seed, int [2]. It returns the network's input and targets as a dict.
        batch: images in a step, over all replicas.
        shuffle: records in the buffer that the stream draws from; 0 keeps the order of the files.
        labels: schema of the records, of `tfrecord.SCHEMAS`, or a tuple of those that will do.
        finish: function of a batch that returns the batch; None to leave it as it is.
        seed, first_step: ints.
        context: `tf.distribute.InputContext`: the replicas and the hosts, each of which reads its own records. None
            for one replica.
        service: `Service` whose workers make the batches; None for this host. What is said above of the order, of
            restarts and of hosts does not hold with one: see `axial.data.service`.

    Raises:
        InputError: a data set that is missing, damaged, empty, of another spec or schema; a batch that cannot be shared
            equally by the replicas.
    """
    manifest = tfrecord.read_manifest(data_dir, split)
    check_spec(manifest, spec, data_dir, labels)
    replicas = context.num_replicas_in_sync if context else 1
    host = context.input_pipeline_id if context and not service else 0
    if batch % replicas:
        raise InputError(f"batch {batch} cannot be shared by {replicas} replicas")
    _tell_of_order(data_dir, manifest, shuffle=shuffle, first_step=first_step, context=None if service else context)

    def parse(number, serialized):
        key = tf.random.experimental.stateless_fold_in([seed, 1 + host], number)
        return number, example(known_classes(tfrecord.parse_example(serialized, manifest["labels"]), spec), key)

    def batches(records):
        dataset = records.map(parse, AUTOTUNE, deterministic=True).batch(batch // replicas, drop_remainder=True)
        if finish:
            dataset = dataset.map(lambda numbers, batch: (numbers, finish(batch)), AUTOTUNE, deterministic=True)
        return dataset

    if service:
        tickets = Tickets(data_dir, manifest, seed=seed, shuffle=shuffle)
        return made_ahead(served(batches, tickets, service, used=first_step * batch, context=context), context)
    records = _host_records(
        data_dir, manifest, seed=seed, shuffle=shuffle, first_step=first_step, batch=batch, context=context
    )
    return made_ahead(batches(records).map(lambda _, batch: batch), context)


def made_ahead(dataset, context=None, elements=2):
    """The dataset, which a host makes on all its cores, some elements before they are asked for.

    It has no thread that tunes it: with TensorFlow 2.20 that thread may miss that its iterator is freed. Then all of
    Python waits for its next round, up to a minute.

    Args:
        dataset: where it says `AUTOTUNE`, as many elements are made at a time as the host has cores.
        context: `tf.distribute.InputContext`, or None for one replica.
        elements: how many for each replica of the host; two steps by default.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.autotune.initial_parallelism = 2**15  # TensorFlow takes the number of cores if that is less
    replicas = context.num_replicas_in_sync // context.num_input_pipelines if context else 1
    return dataset.prefetch(elements * replicas).with_options(options)


def _tell_of_order(data_dir, manifest, *, shuffle, first_step, context):
    """Says on standard error where records of an older version are not trained on as new ones are."""
    if manifest["permutation"] is not None:
        return
    where = f"{data_dir}: {manifest['split']!r} has the order that an older version wrote"
    if 0 < shuffle < manifest["examples"]:
        print(f"{where}: neighbours may be alike; axial-convert to a new folder permutes the records", file=sys.stderr)
    if first_step and context and context.num_input_pipelines > 1:
        print(f"{where}: its runs on several hosts go on, but in another order of photos", file=sys.stderr)


def _host_records(data_dir, manifest, *, seed, shuffle, first_step, batch, context):
    """(number, serialised record) of one host, endlessly, from step `first_step` on.

    A host begins its epochs with part number `host` of the split, and goes round. Part t of the endless sequence of
    parts ends where records t / hosts of a split end, rounded down. So all hosts have had as many records as each other
    when they begin an epoch, up to one.
    """
    hosts, host = (context.num_input_pipelines, context.input_pipeline_id) if context else (1, 0)
    names, counts = zip(*((name, count) for name, count, _ in manifest["shards"]))
    files, records = [os.path.join(data_dir, name) for name in names], sum(counts)
    if records < hosts:
        raise InputError(f"{data_dir}: too few records in {manifest['split']!r} for {hosts} hosts")
    starts = np.cumsum([0, *counts[:-1]])

    def part_of(turn):
        """(paths of the shards, records to skip in each, records to take) of a part."""
        edges = (records * (turn % hosts + i) // hosts for i in (0, 1))
        first, last = (tf.clip_by_value(edge - starts, 0, counts) for edge in edges)
        return tuple(tf.boolean_mask(x, last > first) for x in (files, first, last - first))

    def read(path, skipped, taken):
        return tf.data.TFRecordDataset(path).skip(skipped).take(taken)

    def turn_records(turn):
        key = tf.random.experimental.stateless_fold_in([seed, 0], turn - host)
        order = tf.random.stateless_uniform([], key, minval=0, maxval=tf.int64.max, dtype=tf.int64)
        dataset = tf.data.Dataset.from_tensor_slices(part_of(turn))
        if shuffle:
            dataset = dataset.shuffle(len(files), order)
        dataset = dataset.interleave(read, min(len(files), 16))
        return dataset.shuffle(shuffle, order) if shuffle else dataset

    used = first_step * (batch // hosts)
    place = used + records * host // hosts  # in the endless sequence of parts
    turn = ((place + 1) * hosts - 1) // records
    turns = tf.data.Dataset.range(turn, tf.int64.max)
    return turns.flat_map(turn_records).skip(place - records * turn // hosts).enumerate(used)


def evaluation_stream(data_dir, split, spec, example, *, labels="panoptic", shard=(0, 1), skip=0):
    """The records of a split once, in order, one at a time.

    Each example also has its 'number', int64 []: its place in the data set's list (see `tfrecord.item_numbers`).

    Args:
        data_dir, split: of a converted data set.
        spec: `DatasetSpec` that it was converted under.
        example: function of a record that returns a dict with the network's input.
        labels: see `training_stream`.
        shard: (i, n) for every n-th record, from the i-th on.
        skip: number of records to leave out at the beginning of the shard.
    """
    manifest = tfrecord.read_manifest(data_dir, split)
    check_spec(manifest, spec, data_dir, labels)
    files = tfrecord.shard_paths(data_dir, manifest)
    numbers = tf.data.Dataset.from_tensor_slices(tfrecord.item_numbers(manifest["examples"], manifest["permutation"]))
    dataset = tf.data.Dataset.zip((numbers, tf.data.TFRecordDataset(files))).shard(shard[1], shard[0]).skip(skip)

    def parse(number, record):
        record = known_classes(tfrecord.parse_example(record, manifest["labels"]), spec)
        return {"number": number, **example(record)}

    return made_ahead(dataset.map(parse, AUTOTUNE, deterministic=True), elements=16)


# === Damaged and foreign records ===


def spec_of(data_dir, split, labels="panoptic"):
    """The spec that a split was converted under. Raises InputError; see `check_spec`."""
    manifest = tfrecord.read_manifest(data_dir, split)
    check_spec(manifest, manifest["spec"], data_dir, labels)
    return manifest["spec"]


def check_spec(manifest, spec, data_dir, labels="panoptic"):
    """Raises InputError unless the split was converted under `spec`, to records of a schema of `labels`."""
    labels = (labels,) if isinstance(labels, str) else labels
    if manifest["labels"] not in labels:
        expected = " or ".join(map(repr, labels))
        raise InputError(f"{data_dir}: records with {manifest['labels']!r} labels; expected {expected}")
    if manifest["spec"] != spec:
        raise InputError(
            f"{data_dir}: converted for the spec {manifest['spec'].name!r} of "
            f"{manifest['spec'].num_classes} classes, not for {spec.name!r} of {spec.num_classes}"
        )


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
                record = tfrecord.parse_example(serialized, manifest["labels"])
                _check_sizes(known_classes(record, manifest["spec"]), f"{where}: record {number}")
                number += 1
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
            raise InputError(f"{where}: record {number} is damaged ({first_line(error)}); convert again") from None
        if number != records:
            raise InputError(f"{where}: {number} records, the manifest says {records}; convert again")


def _check_sizes(record, where):
    """Raises InputError unless the photo, and its labels if it has a map of them, have the size that is written."""
    if "image/encoded" not in record:
        return
    sizes = [tuple(decode_photo(record).shape[:2])]
    if "panoptic/encoded" in record:
        sizes.append(tuple(tfrecord.segment_ids(record["panoptic/encoded"]).shape))
    if set(sizes) != {(int(record["image/height"]), int(record["image/width"]))}:
        raise InputError(f"{where}: photo and labels are not of the size that it says")


def known_classes(record, spec):
    """The record. TensorFlow raises InvalidArgumentError unless its classes are those of the spec."""
    asked = ("image/class", "segment/class", "box/class", "source/ids", "target/ids")
    keys = [key for key in asked if key in record]
    known, checks = tf.constant(spec.num_classes, tf.int64), []
    for classes in (record[key] for key in keys):
        checks.append(
            tf.debugging.Assert(tf.reduce_all((classes >= 0) & (classes < known)), ["unknown class", classes])
        )
    if "segment/class" in record:
        same = tf.shape(record["segment/class"]) == tf.shape(record["segment/id"])
        checks.append(tf.debugging.Assert(tf.reduce_all(same), ["segments and classes differ in number"]))
    if "box/class" in record:
        count, numbers = tf.size(record["box/class"]), tf.strings.length(record["box/numbers"])
        same = (numbers == tfrecord.BOX_BYTES * count) & (tf.size(record["box/crowd"]) == count)
        checks.append(tf.debugging.Assert(same, ["boxes and classes differ in number"]))
    with tf.control_dependencies(checks):
        return {**record, **{key: tf.identity(record[key]) for key in keys}}
