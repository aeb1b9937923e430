"""Distributes the training input with tf.data's service, as an option of every task.

A dispatcher hands out tickets in order, each to the first worker that asks (dynamic sharding). A ticket is a part of an
epoch: the records of a shard, or every n-th record of a shard if the split has few shards. The seed and the ticket's
number decide its records and their order. The seed and the record's number decide the augmentation. So the workers
agree without communication, and every epoch has another order.

Guarantees and limits:

- A ticket goes to one worker, so no record comes twice in an epoch. Each record comes once unless a worker dies.
- A worker that dies loses its open tickets (at most `OPEN`) and its prefetched batches.
- Batches arrive in the order in which workers finish them. Two runs with one seed have the same augmented examples in
  every epoch, but in another order and in other batches. A run is not repeatable bit by bit.
- A step with a non-finite loss cannot be repeated with the same batch, so the error message may name no tensor.
- Consecutive epochs overlap by the examples that the workers hold at the end of an epoch.
- A resumed training starts a new job at the first ticket that the earlier steps have not used up, in ticket order. Near
  that point, records that workers had open may be repeated or missing in the interrupted epoch. All later epochs are
  complete.

Workers read the shards themselves, under the same path as the trainer.
"""

import dataclasses
import os
import random

import numpy as np
import tensorflow as tf

from axial.data.tfrecord import shard_paths
from axial.io import gfile
from axial.io.loopback import check_answer

OPEN = 4  # tickets that a worker reads at a time; a worker that dies loses these tickets
TICKETS = 64  # fewest tickets of an epoch; in a split with fewer shards, a shard has several tickets


@dataclasses.dataclass(frozen=True)
class Service:
    """A tf.data service that makes the batches of a training.

    Attributes:
        address: address of the dispatcher, grpc://HOST:PORT.
        job: name of the dispatcher's stream: the same on all hosts of a training, and new at each start.
    """

    address: str
    job: str


def connect(address, job):
    """The `Service` of a training.

    Args:
        address: value of --data_service.
        job: job number, the same in all processes of the training; see `random_job`.

    Raises:
        InputError: `address` is not the address of a dispatcher, or nothing answers there.
    """
    check_answer("data_service", address)
    return Service(address, f"axial-{job:x}")


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
    """

    def __init__(self, data_dir, manifest, *, seed, shuffle):
        # Workers run in other working directories.
        folder = data_dir if gfile.is_remote(data_dir) else os.path.abspath(data_dir)
        counts = [count for _, count, _ in manifest["shards"]]
        self._files, self._seed, self._shuffle = shard_paths(folder, manifest), seed, shuffle
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self.records = int(self._starts[-1])
        self._stride = min(-(-TICKETS // len(counts)), max(counts))  # number of tickets per shard
        self.an_epoch = self._stride * len(counts)

    def after(self, used):
        """The first ticket after `used` records."""
        epoch, position = divmod(used, self.records)
        tickets = epoch * self.an_epoch + np.arange(self.an_epoch if position else 0)
        records = [len(self._members(*self._locate(tf.constant(ticket)))) for ticket in tickets]
        return epoch * self.an_epoch + int(np.searchsorted(np.cumsum(records), position, "right"))

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


def served(make, tickets, service, *, used, epochs=None):
    """Dataset of batches that the workers of a service make.

    Args:
        make: function from `Tickets.dataset` to a dataset of batches.
        tickets: `Tickets`.
        service: `Service`. All hosts of a training take batches from its job.
        used: number of records that earlier steps have used, over all hosts.
        epochs: number of epochs after which the stream ends; None for an endless stream.
    """
    last = tf.int64.max if epochs is None else epochs * tickets.an_epoch
    dataset = make(tickets.dataset(tickets.after(used), last))
    api = tf.data.experimental.service
    # Every host of a training registers the same dataset under the job's name.
    number = api.register_dataset(service.address, dataset, dataset_id=service.job)
    policy, spec = api.ShardingPolicy.DYNAMIC, dataset.element_spec
    return api.from_dataset_id(policy, service.address, number, spec, job_name=service.job)
