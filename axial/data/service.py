"""Distributes the training input with tf.data's service, as an option of every task.

A dispatcher hands out tickets in order, each to the first worker that asks (dynamic sharding). A ticket is a part of an
epoch: the records of a shard, or every n-th record of a shard if the split has few shards. The seed and the ticket's
number decide its records and their order. The seed and the record's number decide the augmentation. So the workers
agree without communication, and every epoch has another order.

Guarantees and limits:

- A ticket goes to one worker, so no record comes twice in an epoch. Each record comes once unless a worker dies.
- A worker that dies loses its open tickets (at most `OPEN`) and its prefetched batches. `_Arrivals` counts the loss.
- Batches arrive in the order in which workers finish them. Two runs with one seed have the same augmented examples in
  every epoch, but in another order and in other batches. A run is not repeatable bit by bit.
- A step with a non-finite loss cannot be repeated with the same batch, so the error message may name no tensor.
- Consecutive epochs overlap by the examples that the workers hold at the end of an epoch.
- A resumed training starts a new job at the first ticket that the earlier steps have not used up, in ticket order. Near
  that point, records that workers had open may be repeated or missing in the interrupted epoch. All later epochs are
  complete.

Workers read the shards themselves, under the same path as the trainer.
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

OPEN = 4  # tickets that a worker reads at a time; a worker that dies loses these tickets
TICKETS = 64  # fewest tickets of an epoch; in a split with fewer shards, a shard has several tickets
SECONDS = 10.0  # seconds between two reports of arrivals


class Arrivals(Struct):
    """Report of the examples that have reached one host of a training with --data_service."""

    hosts: Count
    epoch: Count
    examples: Count
    skipped: Count
    arrived: list[Count]


@dataclasses.dataclass(frozen=True)
class Service:
    """A tf.data service that makes the batches of a training.

    Attributes:
        address: address of the dispatcher, grpc://HOST:PORT.
        job: name of the dispatcher's stream: the same on all hosts of a training, and new at each start.
        folder: folder for reports of arrivals; None for no reports.
        seconds: seconds between two reports.
    """

    address: str
    job: str
    folder: str | None = None
    seconds: float = SECONDS


def connect(address, folder=None, job=None):
    """The `Service` of a training.

    Args:
        address: value of --data_service.
        folder: folder for reports; see `Service`.
        job: job number, the same in all processes of the training; None for a random one.

    Raises:
        InputError: `address` is not the address of a dispatcher, or nothing answers there.
    """
    check_answer("data_service", address)
    return Service(address, f"axial-{random_job() if job is None else job:x}", folder)


def random_job():
    """Number of a new job, small enough to be exact as a float32."""
    return random.SystemRandom().randrange(2**24)


# === Workers ===


class Tickets:
    """The records of a split, divided into tickets.

    Args:
        data_dir, manifest: a converted split; see `tfrecord.read_manifest`.
        seed: int.
        shuffle: number of records in a worker's shuffle buffers, one per open ticket; 0 keeps the order of the files.
        keep_mask: bool [records]: whether a record becomes an example; None if all do.
    """

    def __init__(self, data_dir, manifest, *, seed, shuffle, keep_mask=None):
        # Workers run in other working directories.
        folder = data_dir if gfile.is_remote(data_dir) else os.path.abspath(data_dir)
        counts = [count for _, count, _ in manifest["shards"]]
        self._files, self._seed, self._shuffle = shard_paths(folder, manifest), seed, shuffle
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self.records = int(self._starts[-1])
        self._keep_mask = np.ones(self.records, bool) if keep_mask is None else np.asarray(keep_mask, bool)
        self._stride = min(-(-TICKETS // len(counts)), max(counts))  # number of tickets per shard
        self.an_epoch = self._stride * len(counts)

    def after(self, used):
        """(first ticket after `used` records, number of examples in the earlier tickets of its epoch)."""
        epoch, position = divmod(used, self.records)
        tickets = epoch * self.an_epoch + np.arange(self.an_epoch)
        members = [self._members(*self._locate(tf.constant(ticket))) for ticket in tickets] if position else []
        whole = int(np.searchsorted(np.cumsum([len(rows) for rows in members]), position, "right"))
        examples = sum(int(self._keep_mask[rows].sum()) for rows in members[:whole])
        return epoch * self.an_epoch + whole, examples

    def examples(self):
        """Number of examples in an epoch."""
        return int(self._keep_mask.sum())

    def dataset(self, first=0, last=tf.int64.max):
        """Dataset of (number, serialised record) from the tickets `first` to `last` - 1.

        The number, int64, is the epoch times `records` plus the record's number in the split.
        """
        return tf.data.Dataset.range(first, last).interleave(self._read, OPEN, 1)

    def _locate(self, ticket):
        """(index of the shard, first record in the shard) of a ticket. It has every `_stride`-th record from there."""
        epoch, unit = ticket // self.an_epoch, ticket % self.an_epoch
        if self._shuffle:
            key = tf.stack([tf.constant(self._seed, tf.int64), epoch])
            unit = tf.random.experimental.index_shuffle(unit, key, tf.constant(self.an_epoch - 1, tf.int64))
        return unit // self._stride, unit % self._stride

    def _members(self, shard, offset):
        return np.arange(self._starts[int(shard)] + int(offset), self._starts[int(shard) + 1], self._stride)

    def _read(self, ticket):
        """The dataset of one ticket."""
        shard, offset = self._locate(ticket)
        first = tf.gather(tf.constant(self._starts), shard) + ticket // self.an_epoch * self.records
        records = tf.data.TFRecordDataset(tf.gather(tf.constant(self._files), shard)).enumerate(first)
        records = records.shard(self._stride, offset)
        if not self._shuffle:
            return records
        key = tf.random.experimental.stateless_fold_in([self._seed, 0], ticket)
        order = tf.random.stateless_uniform([], key, minval=0, maxval=tf.int64.max, dtype=tf.int64)
        return records.shuffle(max(self._shuffle // OPEN, 1), order)


# === Hosts of the training ===


def served(make, tickets, service, *, used, context=None, epochs=None):
    """Dataset of batches that the workers of a service make.

    Args:
        make: function from `Tickets.dataset` to a dataset of (record numbers, int64 [n]; batch).
        tickets: `Tickets`.
        service: `Service`.
        used: number of records that earlier steps have used, over all hosts.
        context: `tf.distribute.InputContext` of this host; all hosts take batches from one job. None for one host.
        epochs: number of epochs after which the stream ends; None for an endless stream.

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
    """Dataset of the elements of `dataset`, in the order in which a service's workers deliver them."""
    api = tf.data.experimental.service
    # Every host of a training registers the same dataset under the job's name.
    number = api.register_dataset(service.address, dataset, dataset_id=service.job)
    return api.from_dataset_id(
        api.ShardingPolicy.DYNAMIC, service.address, number, dataset.element_spec, job_name=service.job
    )


class _Arrivals:
    """Counts the examples of each epoch that reach a host, and reports the counts. No example comes twice.

    It counts with TensorFlow ops, because the hosts of a TPU slice do not run this process.

    Args:
        tickets, service, used, context: see `served`.
        skipped: number of examples of the first epoch that the job leaves out.
    """

    def __init__(self, tickets, service, *, used, skipped, context):
        self._records, self._seconds, self._epoch = tickets.records, service.seconds, used // tickets.records
        hosts, host = (context.num_input_pipelines, context.input_pipeline_id) if context else (1, 0)
        self._path = os.path.join(service.folder, f"{used:012d}-{service.job}-{host:05d}")
        numbers = {"hosts": hosts, "epoch": self._epoch, "examples": tickets.examples(), "skipped": skipped}
        self._start = json.dumps(numbers)[:-1] + ', "arrived": ['

    def state(self):
        return {
            "arrived": tf.zeros([1], tf.int64),  # number of examples of each epoch, from `_epoch` on
            "written": tf.constant(0.0, tf.float64),
            "writes": tf.constant(0, tf.int64),
        }

    def count(self, state, element):
        """Function for `Dataset.scan`: returns (new state, batch) for an element (record numbers, batch)."""
        numbers, batch = element
        epochs = numbers // self._records - self._epoch
        more = tf.maximum(tf.reduce_max(epochs) + 1 - tf.size(state["arrived"], tf.int64), 0)
        arrived = tf.pad(state["arrived"], [[0, more]])
        arrived += tf.math.unsorted_segment_sum(tf.ones_like(numbers), epochs, tf.size(arrived))
        return self._reported({**state, "arrived": arrived}), batch

    def _reported(self, state):
        """Returns the state. Writes its counts to a file if the last report is old enough.

        Reports alternate between two file names, so that one file is always complete: TensorFlow has no op that renames
        a file.
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
    """Sums the examples that have reached all hosts of a training, from the reports in a folder.

    Returns:
        dict from each job, in order of start, to a list of dicts: 'epoch', 'examples' (that the job should
            deliver in this epoch), 'arrived', and 'open' (whether more may arrive).

    Raises:
        InputError: the folder has no reports.
    """
    jobs = {}
    for path in sorted(gfile.glob(os.path.join(folder, ""), "*-*-*-[01].json")):
        start, host, _ = os.path.basename(path).rsplit("-", 2)
        used, job = start.split("-", 1)
        with contextlib.suppress(InputError):  # this report is being written; the other one is complete
            report, hosts = read_json(path, Arrivals)[1], jobs.setdefault((int(used), job), {})
            hosts[host] = max(report, hosts.get(host, report), key=lambda one: sum(one.arrived))
    if not jobs:
        raise InputError(f"{folder}: no reports of arrivals; a training with --data_service writes them")
    return {f"{job} from example {used}": _summed([*hosts.values()]) for (used, job), hosts in sorted(jobs.items())}


def _summed(reports):
    """The list of dicts that `read_arrivals` returns for one job, from the reports of all hosts."""
    first, rows = reports[0], []
    counts = [sum(by_host) for by_host in itertools.zip_longest(*(one.arrived for one in reports), fillvalue=0)]
    for i, arrived in enumerate(counts):
        examples = first.examples - (0 if i else first.skipped)
        is_open = (i + 2 >= len(counts) and arrived < examples) or len(reports) < first.hosts
        rows.append({"epoch": first.epoch + i, "examples": examples, "arrived": arrived, "open": is_open})
    return rows


def arrival_lines(folder, most=20):
    """Lines of text: for each job, its sums and then at most `most` of its incomplete epochs."""
    lines = []
    for job, epochs in read_arrivals(folder).items():
        closed = [row for row in epochs if not row["open"]]
        examples, arrived = (sum(row[name] for row in closed) for name in ("examples", "arrived"))
        whole = f"{counted(len(closed), 'whole epoch')} of {examples} examples"
        lines.append(f"{job}: {whole}: {arrived} arrived, {examples - arrived} did not")
        for row in [row for row in closed if row["arrived"] != row["examples"]][:most]:
            lines.append(f"  epoch {row['epoch']}: {row['examples'] - row['arrived']} of {row['examples']} missing")
    return lines
