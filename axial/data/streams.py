"""Input pipelines from TFRecords, for every task. They are deterministic and resume at any step."""

import contextlib
import dataclasses

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from axial.data import tfrecord
from axial.data.decode import decode, turn
from axial.data.files import reason_of
from axial.data.service import Service, Tickets, served
from axial.data.specs import difference
from axial.errors import InputError
from axial.io.read import first_line
from axial.io.show import say

AUTOTUNE = tf.data.AUTOTUNE
# Keeps AutoGraph away from a data set's function. Its conversion takes seconds, and no such function needs it.
as_written = tf.autograph.experimental.do_not_convert


def decode_photo(record):
    """Decodes the photo of a parsed record to uint8 [h, w, 3], turned by the record's orientation."""
    return turn(decode(record["image/encoded"]), record.get("image/orientation", 1))


def photo_of(example):
    """uint8 [h, w, 3]: the field 'photo' of an example if it exists, else the decoded photo of its record."""
    return example["photo"] if "photo" in example else decode_photo(example)


@dataclasses.dataclass(frozen=True)
class Stream:
    """Decides which batches a replica trains on.

    Attributes:
        batch: global batch size: examples, or tokens of sentence pairs, over all replicas.
        seed, first_step: ints: seed of the record order and the augmentation, and step of the first batch.
        context: `tf.distribute.InputContext` with the numbers of replicas and hosts. Each host reads a different part
            of the records. None for one replica.
        service: `Service` whose workers make the batches; None if this host makes them.
    """

    batch: int
    seed: int = 0
    first_step: int = 0
    context: tf.distribute.InputContext | None = None
    service: Service | None = None

    @property
    def replicas(self):
        return self.context.num_replicas_in_sync if self.context else 1

    @property
    def host(self):
        """(number of this host, number of hosts)."""
        return (self.context.input_pipeline_id, self.context.num_input_pipelines) if self.context else (0, 1)


def training_stream(data_dir, split, spec, example, *, stream, shuffle, labels="panoptic", finish=None):
    """Endless dataset of per-replica batches from step `stream.first_step` on. A restart gets the same batches.

    A step takes one batch for each replica of the host, in order. The batches of all replicas form the global batch.

    Every epoch has its own order of shards and records and its own augmentation, both derived from the seed. A resumed
    stream skips used records without decoding them.

    The split is divided into one part per host. The parts' sizes differ by at most one record. In each epoch, a
    host moves on to the next part. So every record is read equally often, apart from the epochs in progress.

    With a service, order, restarts and hosts behave differently: see `axial.data.service`.

    Args:
        data_dir, split: folder of a converted data set, and name of its split.
        spec: the `DatasetSpec` with which the data set was converted.
        example: function of a record and a seed, int [2], that returns a dict of the network's input and targets.
        stream: `Stream`.
        shuffle: number of records in the shuffle buffer; 0 keeps the order of the files.
        labels: schema of the records (see `tfrecord.SCHEMAS`), or a tuple of allowed schemas.
        finish: function applied to each batch; None for no function.

    Raises:
        InputError: the data set is missing, damaged or empty, or has another spec or schema.
    """
    manifest = tfrecord.read_manifest(data_dir, split)
    check_spec(manifest, spec, data_dir, labels)
    host, batch, replicas = 0 if stream.service else stream.host[0], stream.batch, stream.replicas
    if manifest["permutation"] is None and 0 < shuffle < manifest["examples"]:
        where = f"{data_dir}: {split!r} has the order that an older version wrote"
        say(f"{where}: neighbours may be alike; axial-convert to a new folder permutes the records", error=True)

    def parse(number, serialized):
        key = tf.random.experimental.stateless_fold_in([stream.seed, 1 + host], number)
        return example(whole_record(tfrecord.parse_example(serialized, manifest["labels"]), spec), key)

    def batches(records):
        dataset = records.map(as_written(parse), AUTOTUNE, deterministic=True)
        dataset = dataset.batch(batch // replicas, drop_remainder=True)
        if finish:
            dataset = dataset.map(as_written(finish), AUTOTUNE, deterministic=True)
        return dataset

    if stream.service:
        tickets = Tickets(data_dir, manifest, seed=stream.seed, shuffle=shuffle)
        dataset = served(batches, tickets, stream.service, used=stream.first_step * batch)
    else:
        dataset = batches(_host_records(data_dir, manifest, stream, shuffle))
    return made_ahead(dataset, stream.context)


def made_ahead(dataset, context=None, elements=2):
    """Prefetches elements of a dataset. The host makes them on all its cores.

    Autotuning is off: with TensorFlow 2.20, its thread may not notice that the iterator is freed. Then Python is
    blocked until the thread's next round, up to a minute.

    Args:
        dataset: `tf.data.Dataset`. `AUTOTUNE` in it means as many parallel calls as the host has cores.
        context: `tf.distribute.InputContext`, or None for one replica.
        elements: number of prefetched elements per replica of the host. The default is enough for two steps.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.autotune.initial_parallelism = 2**15  # TensorFlow takes the number of cores if that is less
    replicas = context.num_replicas_in_sync // context.num_input_pipelines if context else 1
    return dataset.prefetch(elements * replicas).with_options(options)


def _host_records(data_dir, manifest, stream, shuffle):
    """Endless dataset of (number, serialised record) for one host, from the stream's first step on.

    A host starts at part number `host` of the split and takes the parts in turn. In the endless sequence of parts, part
    t starts at record t x records / hosts, rounded down. So at the start of an epoch, the numbers of records that the
    hosts have read differ by at most one.
    """
    host, hosts = stream.host
    names, counts = zip(*((name, count) for name, count, _ in manifest["shards"]))
    files, records = [tfrecord.shard_path(data_dir, name) for name in names], sum(counts)
    if records < hosts:
        raise InputError(f"{data_dir}: too few records in {manifest['split']!r} for {hosts} hosts")
    starts = np.cumsum([0, *counts[:-1]])

    def part_of(turn):
        """(paths of the shards, records to skip in each, records to take from each) of a part."""
        edges = (records * (turn % hosts + i) // hosts for i in (0, 1))
        first, last = (tf.clip_by_value(edge - starts, 0, counts) for edge in edges)
        return tuple(tf.boolean_mask(x, last > first) for x in (files, first, last - first))

    def read(path, skipped, taken):
        return tf.data.TFRecordDataset(path).skip(skipped).take(taken)

    def turn_records(turn):
        key = tf.random.experimental.stateless_fold_in([stream.seed, 0], turn - host)
        order = tf.random.stateless_uniform([], key, minval=0, maxval=tf.int64.max, dtype=tf.int64)
        dataset = tf.data.Dataset.from_tensor_slices(part_of(turn))
        if shuffle:
            dataset = dataset.shuffle(len(files), order)
        dataset = dataset.interleave(read, min(len(files), 16))
        return dataset.shuffle(shuffle, order) if shuffle else dataset

    used = stream.first_step * (stream.batch // hosts)
    position = used + records * host // hosts  # the next record's, in the endless sequence of parts
    turn = ((position + 1) * hosts - 1) // records
    turns = tf.data.Dataset.range(turn, tf.int64.max)
    return turns.flat_map(as_written(turn_records)).skip(position - records * turn // hosts).enumerate(used)


def evaluation_stream(data_dir, split, spec, example, *, labels="panoptic", shard=(0, 1), skip=0):
    """Dataset of a split's examples without batching, once each, in the order of the records.

    An example also has a 'number', int64 []: its item's index in the data set's list (see `tfrecord.item_numbers`).

    Args:
        data_dir, split: folder of a converted data set, and name of its split.
        spec: the `DatasetSpec` with which the data set was converted.
        example: function of a record that returns a dict with the network's input.
        labels: see `training_stream`.
        shard: (i, n) selects every n-th record, from record i on.
        skip: number of records to skip at the beginning of the shard.
    """
    manifest = tfrecord.read_manifest(data_dir, split)
    check_spec(manifest, spec, data_dir, labels)
    files = tfrecord.shard_paths(data_dir, manifest)
    order = tfrecord.item_numbers(manifest["examples"], manifest["permutation"], manifest["left_out"])
    numbers = tf.data.Dataset.from_tensor_slices(order)
    dataset = tf.data.Dataset.zip((numbers, tf.data.TFRecordDataset(files))).shard(shard[1], shard[0]).skip(skip)

    def parse(number, record):
        record = whole_record(tfrecord.parse_example(record, manifest["labels"]), spec, pictures=True)
        return {"number": number, **example(record)}

    return made_ahead(dataset.map(as_written(parse), AUTOTUNE, deterministic=True), elements=16)


# === Damaged and foreign records ===


def spec_of(data_dir, split, labels="panoptic"):
    """The spec with which a split was converted. Raises InputError; see `check_spec`."""
    manifest = tfrecord.read_manifest(data_dir, split)
    check_spec(manifest, manifest["spec"], data_dir, labels)
    return manifest["spec"]


def check_spec(manifest, spec, data_dir, labels="panoptic"):
    """Raises InputError unless a split's records suit `spec` (see `difference`) and have a schema in `labels`."""
    labels = (labels,) if isinstance(labels, str) else labels
    if manifest["labels"] not in labels:
        expected = " or ".join(map(repr, labels))
        raise InputError(f"{data_dir}: records with {manifest['labels']!r} labels; expected {expected}")
    if mismatch := difference(manifest["spec"], spec):
        raise InputError(f"{data_dir}: converted for another spec: {mismatch}")


_MARK = "<axial>"  # encloses the message of `unless` in TensorFlow's error


def unless(right, text):
    """Control dependency on an assertion. It fails with the message `text`, string [], if `right`, bool [], is false.

    `name_damaged_records` turns the failure into an InputError with this message.
    """
    return tf.control_dependencies([tf.debugging.Assert(right, [_MARK + text + _MARK])])


@contextlib.contextmanager
def name_damaged_records(data_dir, split):
    """Replaces TensorFlow's error for a damaged record by an InputError, which names the shard and the record.

    The message of `unless` becomes an InputError too.
    """
    try:
        yield
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
        if len(message := str(error).split(_MARK)) > 2:
            raise InputError(message[1]) from None
        if isinstance(error, tf.errors.DataLossError) or "Iterator" in str(error):
            check_records(data_dir, split)
        raise


def check_records(data_dir, split):
    """Reads every record of a split. Raises InputError, which names the shard and the record, for a damaged one."""
    manifest = tfrecord.read_manifest(data_dir, split)
    for name, records, _ in manifest["shards"]:
        where, number = tfrecord.shard_path(data_dir, name), 0
        try:
            for serialized in tf.data.TFRecordDataset(where):
                if fault := record_fault(serialized.numpy(), manifest["spec"], manifest["labels"]):
                    raise InputError(f"{where}: record {number}{fault}; convert again")
                number += 1
        except tf.errors.DataLossError as error:
            raise InputError(f"{where}: record {number} is damaged ({first_line(error)}); convert again") from None
        if number != records:
            raise InputError(f"{where}: {number} records, the manifest says {records}; convert again")


def record_fault(serialized, spec, labels="panoptic"):
    """Describes the fault of a serialised record, with its photo's name if possible; '' for a correct record."""
    name = ""
    try:
        names = tf.train.Example.FromString(serialized).features.feature["image/file_name"].bytes_list.value
        name = f" ({names[0].decode(errors='replace')})" if names else ""
        record = tfrecord.parse_example(serialized, labels)
        for right, text in (*class_checks(record, spec), *field_checks(record), *picture_checks(record)):
            if not right:
                return f"{name}: {text}"
    except (tf.errors.InvalidArgumentError, DecodeError) as error:
        return f"{name} is damaged ({reason_of(error)})"
    return ""


def whole_record(record, spec, pictures=False):
    """Returns the record. TensorFlow raises InvalidArgumentError unless its fields fit each other and the spec.

    Args:
        record: result of `tfrecord.parse_example`.
        spec: the `DatasetSpec` with which the record was converted.
        pictures: whether to check its photo, labels and masks too, which decodes them.
    """
    checks = (*class_checks(record, spec), *field_checks(record), *(picture_checks(record) if pictures else ()))
    with tf.control_dependencies([tf.debugging.Assert(right, [text]) for right, text in checks]):
        return {key: tf.identity(x) for key, x in record.items()}


# Each function yields checks of a record: (bool tensor, error message if it is false).


def class_checks(record, spec):
    num_classes = tf.constant(spec.num_classes, tf.int64)
    for key in ("image/class", "segment/class", "box/class", "source/ids", "target/ids"):
        if key in record:
            right = tf.reduce_all((record[key] >= 0) & (record[key] < num_classes))
            yield right, f"{key}: a number that the spec {spec.name!r} does not have"


def field_checks(record):
    for key in ("image/file_name", "source/text", "target/text"):
        if key in record:
            text = tf.strings.unicode_transcode(record[key], "UTF-8", "UTF-8", errors="replace")
            yield text == record[key], f"{key}: not UTF-8"
    for key in ("source/ids", "target/ids"):
        if key in record:
            yield tf.size(record[key]) > 0, f"{key}: empty"
    if "image/orientation" in record:
        valid = (record["image/orientation"] >= 1) & (record["image/orientation"] <= 8)
        yield valid, "image/orientation: expected 1 to 8"
    counts = {key: tf.size(record[key]) for key in record if key.startswith(("segment/", "box/"))}
    if "segment/id" in record:
        ids = tf.concat([[0], tf.sort(record["segment/id"]), [2**24]], 0)
        yield tf.reduce_all(ids[1:] > ids[:-1]), "segment/id: expected different numbers from 1 to 2^24 - 1"
        for key in ("segment/class", "segment/crowd"):
            yield counts[key] == counts["segment/id"], f"{key}: expected one for each segment/id"
    if "box/class" not in record:
        return
    yield counts["box/crowd"] == counts["box/class"], "box/crowd: expected one for each box/class"
    numbers = tf.strings.length(record["box/numbers"])
    yield numbers == tfrecord.BOX_BYTES * counts["box/class"], "box/numbers: expected five for each box/class"
    right = (counts["box/mask"] == 0) | (counts["box/mask"] == counts["box/class"])
    yield right, "box/mask: expected none, or one for each box/class"


def picture_checks(record):
    if "image/encoded" not in record:
        return
    size = tf.stack([record["image/height"], record["image/width"]])
    pictures = {"image/encoded": decode_photo(record)}
    if "panoptic/encoded" in record:
        pictures["panoptic/encoded"] = tfrecord.segment_ids(record["panoptic/encoded"])
    for key, picture in pictures.items():
        yield _has_size(picture, size), f"{key}: not of the size in image/height and image/width"
    if "box/mask" in record:

        @as_written
        def fits(png):
            mask = decode_mask(png)
            return _has_size(mask, size) | ~is_mask(mask, size)

        right = tf.map_fn(fits, record["box/mask"], fn_output_signature=tf.bool)
        yield tf.reduce_all(right), "box/mask: not of the size in image/height and image/width"


def _has_size(picture, size):
    return tf.reduce_all(tf.shape(picture, tf.int64)[:2] == size)


def decode_mask(png):
    """uint8 [h, w]: an object's mask, 1 inside."""
    return tf.cast(tf.io.decode_png(png, channels=1)[..., 0] > 0, tf.uint8)


def is_mask(mask, size):
    """bool []: whether a decoded 'box/mask' is a mask. One pixel means no mask, unless `size`, int [2], is [1, 1]."""
    return tf.reduce_any(tf.shape(mask) > 1) | tf.reduce_all(size == 1)


def photo_names(data_dir, split):
    """dict from the image id of each record of a converted split to the photo's file name.

    Raises:
        InputError: there is no such split, or its records are sentence pairs or photos with one class each.
    """
    manifest = tfrecord.read_manifest(data_dir, split)
    check_spec(manifest, manifest["spec"], data_dir, tfrecord.WITH_OBJECTS)
    fields = {key: tfrecord.SCHEMAS[manifest["labels"]][key] for key in ("image/id", "image/file_name")}
    files = tf.data.TFRecordDataset(tfrecord.shard_paths(data_dir, manifest))
    records = files.map(lambda record: tf.io.parse_single_example(record, fields))
    with name_damaged_records(data_dir, split):
        return {int(r["image/id"]): tfrecord.photo_name(r) for r in records}
