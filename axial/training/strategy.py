"""The devices of a training or an evaluation, and its worker processes."""

import contextlib
import math
import os
import signal
import socket
import time
import urllib.parse

import tensorflow as tf

from axial.errors import InputError, Preempted
from axial.io.read import first_line
from axial.io.show import say
from axial.layers.device import local_replicas

SERVER_SECONDS = 120  # time limit within which all servers of a TPU slice must answer


def make_strategy(name="default", tpu="local", partitions=1):
    """A `tf.distribute` strategy. Each of several workers must call this function before any other TensorFlow code.

    Args:
        name: 'default' uses one device: the first GPU, or the CPU if there is no GPU. 'mirrored' uses all GPUs of this
            machine or, if it has none, its logical CPUs, at least two. If the environment variable TF_CONFIG names
            several workers, 'mirrored' uses all GPUs, or one CPU, of each worker. 'tpu' uses a TPU.
        tpu: 'local' for a TPU VM, otherwise the name or address of a TPU.
        partitions: TPU cores per replica; see `TrainingConfig`.

    Raises:
        InputError: there is no such device, or TF_CONFIG does not describe a cluster of workers.
        Preempted: another worker has stopped.
    """
    workers = cluster_workers()
    if workers > 1 and name != "mirrored":
        raise InputError(f"TF_CONFIG names {workers} workers: --strategy=mirrored trains on all of them, got {name}")
    if workers > 1:
        return _workers(workers)
    if name == "default":
        return tf.distribute.get_strategy()
    if name == "mirrored":
        gpus = tf.config.list_logical_devices("GPU")
        devices = gpus or tf.config.list_logical_devices("CPU")
        if not gpus and len(devices) < 2:
            raise InputError("--strategy=mirrored: no GPU was found; --strategy=default needs none")
        return tf.distribute.MirroredStrategy([device.name for device in devices])
    try:
        _wait_for_servers(tpu)
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu)
        if tpu not in ("", "local"):
            tf.config.experimental_connect_to_cluster(resolver)
        topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    except Exception as error:  # the runtime raises anything from ValueError to NotFoundError
        raise InputError(f"--strategy=tpu --tpu={tpu}: no TPU was found ({first_line(error)[:200]})") from None
    return tf.distribute.TPUStrategy(resolver, **_shared(topology, partitions))


def _wait_for_servers(tpu):
    """Raises OSError unless a server answers at each grpc:// address in time. TensorFlow would wait without end."""
    until = time.monotonic() + SERVER_SECONDS
    for address in tpu.split(",") if tpu.startswith("grpc://") else ():
        url = urllib.parse.urlsplit(address)
        while True:
            try:
                socket.create_connection((url.hostname, url.port or 8470), timeout=5).close()
                break
            except OSError as error:
                if time.monotonic() > until:
                    reason = error.strerror or error
                    raise OSError(f"nobody answers at {address} in {SERVER_SECONDS} s: {reason}") from None
                time.sleep(1)


def _shared(topology, partitions):
    """Keyword arguments of a `tf.distribute.TPUStrategy` with `partitions` neighbouring cores per replica."""
    if partitions == 1:
        return {}
    cores = topology.num_tasks * topology.num_tpus_per_task
    if cores % partitions:
        raise InputError(f"TrainingConfig.partitions = {partitions}: does not divide the TPU's {cores} cores")
    block, replicas = block_of(topology.mesh_shape, partitions), cores // partitions
    assignment = tf.tpu.experimental.DeviceAssignment.build(topology, block, num_replicas=replicas)
    return {"experimental_device_assignment": assignment, "experimental_spmd_xla_partitioning": True}


def block_of(mesh, count):
    """Side lengths of a block of `count` cores in a mesh with sides `mesh`. The block first takes all cores of a chip.

    Raises:
        InputError: no such block fits.
    """
    block, left = [1] * len(mesh), count
    for axis in reversed(range(len(mesh))):
        block[axis] = math.gcd(left, int(mesh[axis]))
        left //= block[axis]
    if left > 1:
        raise InputError(f"TrainingConfig.partitions = {count}: no such block fits the mesh {list(map(int, mesh))}")
    return block


def check_partitions(partitions, strategy):
    """Raises InputError if a replica has several cores and the strategy is not a `TPUStrategy`."""
    if partitions > 1 and not isinstance(strategy, tf.distribute.TPUStrategy):
        raise InputError(f"TrainingConfig.partitions = {partitions}: only with --strategy=tpu")


def cluster_workers():
    """Number of workers in the environment variable TF_CONFIG; 1 without it.

    Raises:
        InputError: TF_CONFIG does not describe a cluster of workers.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    try:
        jobs = resolver.cluster_spec().as_dict()
        if jobs and (jobs.keys() - {"chief", "worker"} or not jobs[resolver.task_type][resolver.task_id]):
            raise ValueError("other jobs than chief and worker")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        given = os.environ["TF_CONFIG"][:200]
        expected = '{"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": I}}'
        raise InputError(f"TF_CONFIG={given}: expected {expected} ({first_line(error)})") from None
    return max(sum(map(len, jobs.values())), 1)


# TensorFlow raises these when another process has ended or answers too late.
LOST = tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError, tf.errors.UnavailableError
GATHER_SECONDS = 900  # time limit for all workers to connect. TensorFlow itself waits for an hour


@contextlib.contextmanager
def name_lost_workers(strategy=None, model_dir=None):
    """A context that raises Preempted when another worker, or another host of the TPU, has stopped.

    With a single process, the same TensorFlow errors mean that the file system or the device aborted a request.

    Args:
        strategy: `tf.distribute` strategy; None while the workers connect.
        model_dir: folder of the run, whose last checkpoint the message names; None before there is one.
    """
    try:
        yield
    except LOST as error:
        reason = first_line(error.message.split("aborted by:")[-1])[:150]
        others = not strategy or workers(strategy) > 1 or getattr(strategy.extended, "num_hosts", 1) > 1
        what, where = ("another worker has stopped", " on all of them") if others else ("a request was aborted", "")
        goes_on = f": it goes on from the last checkpoint in {model_dir}" if model_dir else ""
        raise Preempted(f"{what} ({reason}); start the same command again{where}{goes_on}") from None


def _workers(count):
    wait = f"ends if not all of its {count} workers come in {GATHER_SECONDS} s"
    say(f"TF_CONFIG: {wait}; then start the same command again on all of them", error=True)
    signal.alarm(GATHER_SECONDS)  # the alarm ends the process even while TensorFlow holds Python's GIL
    try:
        with name_lost_workers():
            return tf.distribute.MultiWorkerMirroredStrategy()
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise InputError(f"TF_CONFIG: the workers cannot be reached ({first_line(error)[:200]})") from None
    finally:
        signal.alarm(0)


# === Workers ===


def is_chief(strategy):
    """Whether this process is the first worker or the only process. The chief writes checkpoints and summaries."""
    return bool(strategy.extended.should_checkpoint)


def workers(strategy):
    """Number of worker processes. Each runs the same program on its own replicas."""
    return strategy.num_replicas_in_sync // local_replicas(strategy)


def total_over_workers(strategy, value):
    """Sum of a number over all workers. Every worker must call this function."""
    if workers(strategy) == 1:
        return value
    local = local_replicas(strategy)

    def contribution(context):  # the first replica of each worker contributes the value, the others 0
        return tf.constant(0.0 if context.replica_id_in_sync_group % local else float(value), tf.float32)

    values = strategy.experimental_distribute_values_from_function(contribution)
    return float(strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None).numpy())
