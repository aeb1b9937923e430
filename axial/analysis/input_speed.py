"""Images a second of each stage of the input pipeline alone, of the whole pipeline, and of a model in training.

With the time of a training step it says how many machines prepare the images of a slice.
"""

import functools
import math
import os
import time

import tensorflow as tf

from axial.data import tfrecord
from axial.data.streams import decode_photo


def _speed(dataset, images, seconds):
    """Images a second of a dataset whose elements have `images` each. Measured for about `seconds` after a warm-up."""

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
    """dict of images a second of each stage alone, on one thread, with its input in memory.

    'pipeline' is all stages together, as training runs them, on all threads. 'model' is a training step of the task's
    model on a batch in memory. 'pipeline / model' is the number of such models that the pipeline could feed. Of another
    task than segmentation there is only 'pipeline'.

    Args:
        task: with a converted data set.
        quick: for less time each.
        report: function that is called with a line of progress.
        batch: photos of a batch.
    """
    if task.evaluation.labels != "panoptic":
        return {"pipeline": pipeline_speed(task, quick)}
    seconds = 0.5 if quick else 3.0
    manifest = tfrecord.read_manifest(task.data_dir, task.data.train_split)
    files = tfrecord.shard_paths(task.data_dir, manifest)
    serialized = list(tf.data.TFRecordDataset(files).take(16))
    in_memory = tf.data.Dataset.from_tensor_slices(serialized)
    records = in_memory.map(tfrecord.parse_example).cache().repeat()
    parsed = in_memory.repeat().map(tfrecord.parse_example)
    example = functools.partial(task.training_example, seed=tf.constant([0, 1], tf.int64))
    stages = {
        "read": lambda: _speed(tf.data.TFRecordDataset(files).repeat(), 1, seconds),
        "parse": lambda: _speed(parsed, 1, seconds),
        "decode photo": lambda: _speed(records.map(decode_photo), 1, seconds),
        "decode, augment, targets": lambda: _speed(records.map(example), 1, seconds),
        "pipeline": lambda: _speed(task.train_dataset(batch, 0), batch, seconds),
        "model": lambda: _model_speed(task, batch, seconds),
    }
    found = {}
    for name, speed in stages.items():
        report(f"{name}: measuring")
        found[name] = speed()
    found["pipeline / model"] = found["pipeline"] / found["model"]
    return found


# === What a slice needs ===


def pipeline_speed(task, quick=False, batch=8):
    """Images (or tokens) a second of a task's whole pipeline on this machine, from shards to batches."""
    return _speed(task.train_dataset(max(batch, task.row), 0), max(batch, task.row), 0.5 if quick else 3.0)


def demand(task, speed, *, batch, step_seconds, cores, own_cores=None):
    """What a slice needs of its input, and how many machines give it.

    The prepared images are counted as they enter the devices, or as data-service workers send them before they are
    compressed.

    Args:
        task: with a converted data set.
        speed: images a second of the pipeline on this machine; see `pipeline_speed`.
        batch: images of a step, over all replicas.
        step_seconds: of a training step.
        cores: of a host or worker.
        own_cores: of this machine; by default those that this process may use.

    Returns:
        dict of 'images_per_second', 'shard_bytes_per_second' and 'batch_bytes_per_second' that the slice needs,
        'images_per_core_second' that was measured, 'images_per_host_second', and 'hosts'.
    """
    own_cores = own_cores or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    count = task.row
    spec = task.train_dataset(count, 0).element_spec
    prepared = sum(x.shape.num_elements() * x.dtype.size for x in tf.nest.flatten(spec)) / count
    manifest = tfrecord.read_manifest(task.data_dir, task.data.train_split)
    of_record = sum(size for _, _, size in manifest["shards"]) / manifest["examples"]
    if count > 1:
        of_record /= count  # at least: a pair is at most a row's tokens
    needed, of_host = batch / step_seconds, speed / own_cores * cores
    return {
        "images_per_second": needed,
        "shard_bytes_per_second": needed * of_record,
        "batch_bytes_per_second": needed * prepared,
        "images_per_core_second": speed / own_cores,
        "images_per_host_second": of_host,
        "hosts": math.ceil(needed / of_host),
    }


def demand_lines(found, *, batch, step_seconds, cores, unit="images"):
    """Lines that say what `demand` found."""
    yield (
        f"a step of {batch} {unit} in {step_seconds:.4g} s needs {found['images_per_second']:.1f} {unit}/s: "
        f"{found['shard_bytes_per_second'] / 1e6:.1f} MB/s of shards, "
        f"{found['batch_bytes_per_second'] / 1e6:.1f} MB/s of prepared batches"
    )
    yield f"this machine's pipeline gives {found['images_per_core_second']:.1f} {unit}/s a core"
    yield (
        f"a machine of {cores} such cores gives {found['images_per_host_second']:.1f} {unit}/s: "
        f"the slice needs {found['hosts']} of them, its own hosts or data-service workers"
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
