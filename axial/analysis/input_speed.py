"""Measures the images per second of each stage of the input pipeline, of the whole pipeline and of a training step.

From the step time of a slice, `demand` derives how many machines the slice needs to prepare its images.
"""

import dataclasses
import functools
import math
import time

import joblib
import tensorflow as tf

from axial.data import tfrecord
from axial.data.streams import decode_photo


def _speed(dataset, images, seconds):
    """Images per second of a dataset with `images` per element, measured for about `seconds` after a warm-up."""

    @tf.function(autograph=False)
    def consume(iterator, count):
        def read(i):
            element = iterator.get_next()
            with tf.control_dependencies(tf.nest.flatten(element)):
                return (i + 1,)

        return tf.while_loop(lambda i: i < count, read, (0,))

    iterator = iter(dataset)
    consume(iterator, tf.constant(4))
    count, taken = 4, 0.0
    while taken < seconds:
        started = time.perf_counter()
        consume(iterator, tf.constant(count))
        taken, done = time.perf_counter() - started, count
        count *= 2
    return images * done / taken


def measure(task, quick=False, report=lambda line: None, batch=8):
    """dict from each stage to its images (or tokens) per second.

    A stage is measured alone, on one thread, with its input in memory. 'pipeline' is all stages together, from shards
    to training batches, on all threads. 'model' is a training step of the task's model on a batch in memory.
    'pipeline / model' is the number of such models that the pipeline can feed. Tasks other than segmentation have only
    'pipeline'.

    Args:
        task: task with a converted data set.
        quick: whether to measure each stage for a shorter time.
        report: function that is called with a line of progress.
        batch: smallest batch size.
    """
    seconds, batch = 0.5 if quick else 3.0, max(batch, task.row)
    stages = {"pipeline": lambda: _speed(task.train_dataset(batch, 0), batch, seconds)}
    if segments := task.evaluator.labels == "panoptic":
        files = tfrecord.shard_paths(task.data_dir, tfrecord.read_manifest(task.data_dir, task.data.train_split))
        in_memory = tf.data.Dataset.from_tensor_slices(list(tf.data.TFRecordDataset(files).take(16)))
        records = in_memory.map(tfrecord.parse_example).cache().repeat()
        parsed = in_memory.repeat().map(tfrecord.parse_example)
        alone = {"read": tf.data.TFRecordDataset(files).repeat(), "parse": parsed}
        example = functools.partial(task.training_example, seed=tf.constant([0, 1], tf.int64))
        alone |= {"decode photo": records.map(decode_photo), "decode, augment, targets": records.map(example)}
        alone = {name: functools.partial(_speed, dataset, 1, seconds) for name, dataset in alone.items()}
        stages = {**alone, **stages, "model": lambda: _model_speed(task, batch, seconds)}
    speeds = {}
    for name, speed in stages.items():
        report(f"{name}: measuring")
        speeds[name] = speed()
    if segments:
        speeds["pipeline / model"] = speeds["pipeline"] / speeds["model"]
    return speeds


# === Input of a slice ===


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice in training: global batch size, seconds per step, and CPU cores of each host or worker."""

    batch: int
    step_seconds: float
    cores: int


def demand(task, speed, slice_, local_cores=None):
    """The input that a slice needs, and how many machines provide it.

    The size of a batch is its uncompressed size, as on the devices. Data-service workers send compressed batches.

    Args:
        task: task with a converted data set.
        speed: images per second of the pipeline on this machine; see `measure`.
        slice_: `Slice`.
        local_cores: cores of this machine; by default those that this process may use.

    Returns:
        dict of 'images_per_second', 'shard_bytes_per_second' and 'batch_bytes_per_second', which the slice needs;
        'images_per_core_second' and 'images_per_host_second', which a core and a host prepare; and 'hosts', the number
        of needed hosts.
    """
    per_core = speed / (local_cores or joblib.cpu_count())
    count = task.row
    spec = task.train_dataset(count, 0).element_spec
    prepared = sum(x.shape.num_elements() * x.dtype.size for x in tf.nest.flatten(spec)) / count
    manifest = tfrecord.read_manifest(task.data_dir, task.data.train_split)
    # A lower bound for sentence pairs: a pair has at most a row's tokens.
    record_bytes = sum(size for _, _, size in manifest["shards"]) / manifest["examples"] / count
    needed, host_speed = slice_.batch / slice_.step_seconds, per_core * slice_.cores
    return {
        "images_per_second": needed,
        "shard_bytes_per_second": needed * record_bytes,
        "batch_bytes_per_second": needed * prepared,
        "images_per_core_second": per_core,
        "images_per_host_second": host_speed,
        "hosts": math.ceil(needed / host_speed),
    }


def demand_lines(demanded, slice_, unit="images"):
    """Lines that describe the result of `demand`."""
    yield (
        f"a step of {slice_.batch} {unit} in {slice_.step_seconds:.4g} s needs "
        f"{demanded['images_per_second']:.1f} {unit}/s: {demanded['shard_bytes_per_second'] / 1e6:.1f} MB/s of shards, "
        f"{demanded['batch_bytes_per_second'] / 1e6:.1f} MB/s of prepared batches"
    )
    yield f"this machine's pipeline gives {demanded['images_per_core_second']:.1f} {unit}/s a core"
    yield (
        f"a machine of {slice_.cores} such cores gives {demanded['images_per_host_second']:.1f} {unit}/s: "
        f"the slice needs {demanded['hosts']} of them, its own hosts or data-service workers"
    )


def _model_speed(task, batch, seconds):
    model = task.build_model()
    images = next(iter(task.train_dataset(batch, 0)))

    @tf.function(autograph=False)
    def step(images):
        with tf.GradientTape() as tape:
            loss = task.losses(model, images)["total"]
        gradients = tape.gradient(loss, model.trainable_variables)
        return loss, [tf.convert_to_tensor(g) for g in gradients]

    step(images)
    started, done = time.perf_counter(), 0
    while done < 2 or time.perf_counter() - started < seconds:
        step(images)[0].numpy()
        done += 1
    return batch * done / (time.perf_counter() - started)
