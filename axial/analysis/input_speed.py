"""Measures the images per second of an input pipeline, and derives how many machines feed a slice.

`status.json` of a run has the fraction of the time that its training waits for input.
"""

import math
import time

import joblib
import tensorflow as tf

from axial.data import tfrecord


def measure(task, quick=False):
    """Images (or tokens) per second of a task's pipeline, from shards to training batches, on all threads.

    Args:
        task: task with a converted data set.
        quick: whether to measure for a shorter time.
    """

    @tf.function(autograph=False)
    def consume(iterator, count):
        def read(i):
            with tf.control_dependencies(tf.nest.flatten(iterator.get_next())):
                return (i + 1,)

        return tf.while_loop(lambda i: i < count, read, (0,))

    batch = max(8, task.row)
    iterator = iter(task.train_dataset(batch, 0))
    consume(iterator, tf.constant(4))
    count, taken = 4, 0.0
    while taken < (0.5 if quick else 3.0):
        started = time.perf_counter()
        consume(iterator, tf.constant(count))
        taken, done = time.perf_counter() - started, count
        count *= 2
    return batch * done / taken


def demand(task, speed, batch, *, step_seconds, cores, local_cores=None):
    """The input that a slice needs, and how many machines provide it.

    The size of a batch is its uncompressed size, as on the devices. Data-service workers send compressed batches.

    Args:
        task: task with a converted data set.
        speed: images per second of the pipeline on this machine; see `measure`.
        batch, step_seconds: global batch size of the slice, and seconds of its step.
        cores: CPU cores of each host or worker.
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
    needed, host_speed = batch / step_seconds, per_core * cores
    return {
        "images_per_second": needed,
        "shard_bytes_per_second": needed * record_bytes,
        "batch_bytes_per_second": needed * prepared,
        "images_per_core_second": per_core,
        "images_per_host_second": host_speed,
        "hosts": math.ceil(needed / host_speed),
    }


def demand_lines(demanded, batch, unit="images", *, step_seconds, cores):
    """Lines that describe the result of `demand`."""
    needs = f"a step of {batch} {unit} in {step_seconds:.4g} s needs {demanded['images_per_second']:.1f} {unit}/s"
    megabytes = (demanded[f"{name}_bytes_per_second"] / 1e6 for name in ("shard", "batch"))
    yield "{}: {:.1f} MB/s of shards, {:.1f} MB/s of prepared batches".format(needs, *megabytes)
    yield f"this machine's pipeline gives {demanded['images_per_core_second']:.1f} {unit}/s a core"
    needed = f"the slice needs {demanded['hosts']} of them, its own hosts or data-service workers"
    yield f"a machine of {cores} such cores gives {demanded['images_per_host_second']:.1f} {unit}/s: {needed}"
