"""Training input that other machines prepare: tf.data's service, as an option of every task.

A dispatcher hands out tickets in their order, each to the first worker that asks for one (dynamic sharding). A ticket
is a part of an epoch: the records of a shard, or every n-th of them where a split has few shards. The seed and the
ticket decide which part it is and the order inside it. The seed and the record's number decide its augmentation. So
the workers agree without talking to each other, and every epoch has another order.

What holds, and what does not:

- A ticket goes to one worker, so no record comes twice in an epoch. Each comes once while no worker dies.
- What a worker holds when it dies is lost: `OPEN` tickets and what it has prefetched. `_Arrivals` counts it.
- The order of the batches is that in which workers finish them. Two runs with one seed have the same augmented
  examples in every epoch, in another order and in other batches. A run is not repeated bit by bit.
- A step whose loss is not finite cannot be repeated with its own batch, so its message may name no tensor.
- The end of an epoch and the beginning of the next overlap by what the workers hold.
- A resumed training starts a job of its own at the first ticket that the steps before it have not used up, counted in
  the order of tickets. Around that place, records that the workers had open can come again or not at all in the epoch
  that was interrupted. All later epochs are whole.

Workers read the shards themselves, under the path that the trainer has for them.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import random

import numpy as np
import tensorflow as tf

from axial.data.tfrecord import shard_paths
from axial.errors import InputError
from axial.io import gfile
from axial.io.loopback import check_answer
from axial.io.read import read_json
from axial.io.schemas import Count, Struct
from axial.io.show import counted

OPEN = 4  # tickets that a worker reads at a time; they are lost with it
TICKETS = 64  # of an epoch, at least; a split of fewer shards has several tickets a shard
SECONDS = 10.0  # between two reports of what arrived


class Arrivals(Struct):
    """What reached one host of a training with --data_service."""

    hosts: Count
    epoch: Count
    examples: Count
    skipped: Count
    arrived: list[Count]


@dataclasses.dataclass(frozen=True)
class Service:
    """A tf.data service that makes a training's batches.

    Attributes:
        address: of the dispatcher, grpc://HOST:PORT.
        job: name of the stream at the dispatcher: the same on all hosts of a training, another at each start.
        folder: where reports of what arrived are written; None for none.
        seconds: between two of these reports.
    """

    address: str
    job: str
    folder: str | None = None
    seconds: float = SECONDS


def connect(address, folder=None, job=None):
    """The `Service` of a training.

    Args:
        address: value of --data_service.
        folder: of `Service`.
        job: number of the training's job, the same in all its processes; None for a random one.

    Raises:
        InputError: not the address of a dispatcher, or nothing answers there.
    """
    check_answer("data_service", address)
    return Service(address, f"axial-{random_job() if job is None else job:x}", folder)


def random_job():
    """Number of a new job. It is small enough to be exact as a float32."""
    return random.SystemRandom().randrange(2**24)


# === What the workers do ===


class Tickets:
    """The records of a split, in tickets.

    Args:
        data_dir, manifest: of a converted split; see `tfrecord.read_manifest`.
        seed: int.
        shuffle: records that a worker draws from, over its open tickets; 0 keeps the order of the files.
        wanted: bool [records]: whether a record becomes an example; None if all do.
    """

    def __init__(self, data_dir, manifest, *, seed, shuffle, wanted=None):
        # Workers run in folders of their own.
        folder = data_dir if gfile.is_remote(data_dir) else os.path.abspath(data_dir)
        counts = [count for _, count, _ in manifest["shards"]]
        self._files, self._seed, self._shuffle = shard_paths(folder, manifest), seed, shuffle
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self.records = int(self._starts[-1])
        self._wanted = np.ones(self.records, bool) if wanted is None else np.asarray(wanted, bool)
        self._parts = min(-(-TICKETS // len(counts)), max(counts))  # of each shard
        self.an_epoch = self._parts * len(counts)

    def after(self, used):
        """(first ticket that `used` records have not used up, examples of its epoch in the tickets before it)."""
        epoch, place = divmod(used, self.records)
        tickets = epoch * self.an_epoch + np.arange(self.an_epoch)
        members = [self._members(*self._part(tf.constant(ticket))) for ticket in tickets] if place else []
        whole = int(np.searchsorted(np.cumsum([len(part) for part in members]), place, "right"))
        examples = sum(int(self._wanted[part].sum()) for part in members[:whole])
        return epoch * self.an_epoch + whole, examples

    def examples(self):
        """How many examples an epoch has."""
        return int(self._wanted.sum())

    def dataset(self, first=0, last=tf.int64.max):
        """(number, serialised record) of the tickets from `first` to `last` - 1.

        The number, int64, is that of the epoch times `records` plus that of the record in the split.
        """
        return tf.data.Dataset.range(first, last).interleave(self._read, OPEN, 1)

    def _part(self, ticket):
        """(shard, part of it) of a ticket."""
        epoch, unit = ticket // self.an_epoch, ticket % self.an_epoch
        if self._shuffle:
            key = tf.stack([tf.constant(self._seed, tf.int64), epoch])
            unit = tf.random.experimental.index_shuffle(unit, key, tf.constant(self.an_epoch - 1, tf.int64))
        return unit // self._parts, unit % self._parts

    def _members(self, shard, part):
        return np.arange(self._starts[int(shard)] + int(part), self._starts[int(shard) + 1], self._parts)

    def _read(self, ticket):
        """The dataset of one ticket."""
        shard, part = self._part(ticket)
        first = tf.gather(tf.constant(self._starts), shard) + ticket // self.an_epoch * self.records
        records = tf.data.TFRecordDataset(tf.gather(tf.constant(self._files), shard)).enumerate(first)
        records = records.shard(self._parts, part)
        if not self._shuffle:
            return records
        key = tf.random.experimental.stateless_fold_in([self._seed, 0], ticket)
        order = tf.random.stateless_uniform([], key, minval=0, maxval=tf.int64.max, dtype=tf.int64)
        return records.shuffle(max(self._shuffle // OPEN, 1), order)


# === What a host of the training does ===


def served(make, tickets, service, *, used, context=None, epochs=None):
    """Batches that the workers of a service make.

    Args:
        make: function of `Tickets.dataset` that returns a dataset of (numbers int64 [n], batch).
        tickets: `Tickets`.
        service: `Service`.
        used: records that the training has used before, over all hosts.
        context: `tf.distribute.InputContext`: each host takes batches from the one job. None for one host.
        epochs: at whose end the stream ends; None for a stream without end.

    Returns:
        dataset of batches.
    """
    first, skipped = tickets.after(used)
    last = tf.int64.max if epochs is None else epochs * tickets.an_epoch
    dataset = through(make(tickets.dataset(first, last)), service)
    if not service.folder:
        return dataset.map(lambda _, batch: batch)
    arrivals = _Arrivals(tickets, service, used=used, skipped=skipped, context=context)
    return dataset.scan(arrivals.state(), arrivals.count)


def through(dataset, service):
    """The elements of a dataset from the workers of a service, in the order in which they come."""
    api = tf.data.experimental.service
    # Every host of a training registers the same dataset, under the name of their job.
    number = api.register_dataset(service.address, dataset, dataset_id=service.job)
    return api.from_dataset_id(
        api.ShardingPolicy.DYNAMIC, service.address, number, dataset.element_spec, job_name=service.job
    )


class _Arrivals:
    """Counts the examples of each epoch that reach a host, and reports them. None comes twice (see above).

    It consists of TensorFlow's operations, as the hosts of a TPU slice do not run this process.

    Args:
        tickets, service, used, context: see `served`.
        skipped: examples of the first epoch that the job leaves out.
    """

    def __init__(self, tickets, service, *, used, skipped, context):
        self._records, self._seconds, self._epoch = tickets.records, service.seconds, used // tickets.records
        hosts, host = (context.num_input_pipelines, context.input_pipeline_id) if context else (1, 0)
        self._path = os.path.join(service.folder, f"{used:012d}-{service.job}-{host:05d}")
        numbers = {"hosts": hosts, "epoch": self._epoch, "examples": tickets.examples(), "skipped": skipped}
        self._start = json.dumps(numbers)[:-1] + ', "arrived": ['

    def state(self):
        return {
            "arrived": tf.zeros([1], tf.int64),  # of each epoch from the first on
            "written": tf.constant(0.0, tf.float64),
            "writes": tf.constant(0, tf.int64),
        }

    def count(self, state, element):
        """(new state, batch) of (numbers, batch)."""
        numbers, batch = element
        epochs = numbers // self._records - self._epoch
        more = tf.maximum(tf.reduce_max(epochs) + 1 - tf.size(state["arrived"], tf.int64), 0)
        arrived = tf.pad(state["arrived"], [[0, more]])
        arrived += tf.math.unsorted_segment_sum(tf.ones_like(numbers), epochs, tf.size(arrived))
        return self._reported({**state, "arrived": arrived}), batch

    def _reported(self, state):
        """The state; its counts are in a file if the last report is old enough.

        Two names take turns, as TensorFlow has no operation that renames a file: one of them is always whole.
        """

        def write():
            name = tf.strings.join([self._path, "-", tf.strings.as_string(state["writes"] % 2), ".json"])
            counts = tf.strings.reduce_join(tf.strings.as_string(state["arrived"]), separator=", ")
            tf.io.write_file(name, tf.strings.join([self._start, counts, "]}\n"]))
            return now, state["writes"] + 1

        now = tf.timestamp()
        due = now - state["written"] >= self._seconds
        written, writes = tf.cond(due, write, lambda: (state["written"], state["writes"]))
        return {**state, "written": written, "writes": writes}


# === Reports ===


def read_arrivals(folder):
    """What reached all hosts of a training, from the reports in a folder.

    Returns:
        dict from the jobs, in the order of their beginnings, to lists of dicts with 'epoch', 'examples' that the job
        has of it, 'arrived' and 'open' (more may arrive).

    Raises:
        InputError: no reports there.
    """
    jobs = {}
    for path in sorted(gfile.glob(os.path.join(folder, ""), "*-*-*-[01].json")):
        start, host, _ = os.path.basename(path).rsplit("-", 2)
        used, job = start.split("-", 1)
        with contextlib.suppress(InputError):  # it is being written; the other one is whole
            report, hosts = read_json(path, Arrivals)[1], jobs.setdefault((int(used), job), {})
            hosts[host] = max(report, hosts.get(host, report), key=lambda one: sum(one.arrived))
    if not jobs:
        raise InputError(f"{folder}: no reports of arrivals; a training with --data_service writes them")
    return {f"{job} from example {used}": _summed([*hosts.values()]) for (used, job), hosts in sorted(jobs.items())}


def _summed(reports):
    """A list of dicts, of the reports of all hosts."""
    first, rows = reports[0], []
    counts = [sum(of_epoch) for of_epoch in itertools.zip_longest(*(one.arrived for one in reports), fillvalue=0)]
    for i, arrived in enumerate(counts):
        examples = first.examples - (0 if i else first.skipped)
        is_open = (i + 2 >= len(counts) and arrived < examples) or len(reports) < first.hosts
        rows.append({"epoch": first.epoch + i, "examples": examples, "arrived": arrived, "open": is_open})
    return rows


def arrival_lines(folder, most=20):
    """Lines that say what arrived: sums of each job, and at most `most` epochs of which something is missing."""
    lines = []
    for job, epochs in read_arrivals(folder).items():
        closed = [row for row in epochs if not row["open"]]
        examples, arrived = (sum(row[name] for row in closed) for name in ("examples", "arrived"))
        whole = f"{counted(len(closed), 'whole epoch')} of {examples} examples"
        lines.append(f"{job}: {whole}: {arrived} arrived, {examples - arrived} did not")
        for row in [row for row in closed if row["arrived"] != row["examples"]][:most]:
            lines.append(f"  epoch {row['epoch']}: {row['examples'] - row['arrived']} of {row['examples']} missing")
    return lines
