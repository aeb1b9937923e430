"""Input pipeline of translation: batches of sentence pairs.

Before conversion, a split is two text files with one sentence a line, SPLIT.SOURCE and SPLIT.TARGET, such as train.en
and train.de. Both languages share one SentencePiece vocabulary of type BPE (Kudo and Richardson, EMNLP 2018; Sennrich
et al., ACL 2016).

All batches have one static shape: rows of L tokens, where L is the largest bucket length. All pairs of a
batch are from one bucket. With a bucket length of l, a row has L / l sentences of at most l tokens, each padded to l.
`unpack_rows` reshapes rows to sentences.
"""

import dataclasses
import itertools
from typing import Annotated

import numpy as np
import tensorflow as tf
from msgspec import Meta

from axial.data import tfrecord
from axial.data.streams import check_records, check_spec, made_ahead, name_damaged_records
from axial.errors import InputError
from axial.io.check import Checked, Name
from axial.io.show import say

# === Batches ===

Length = Annotated[int, Meta(ge=2, le=2**12)]


@dataclasses.dataclass(frozen=True)
class TextData(Checked):
    """Splits, buckets and direction of a translator's input pipeline.

    Attributes:
        train_split, eval_split: names of the training and the evaluation split.
        lengths: bucket lengths in tokens, increasing; each divides the last. A pair is in the first bucket that fits
            both its sides. Training drops longer pairs; evaluation truncates longer sources.
        reverse: whether to translate from the second language to the first.

    Raises:
        InputError: the lengths do not increase, or one of them does not divide the last.
    """

    train_split: Name
    eval_split: Name
    lengths: Annotated[tuple[Length, ...], Meta(min_length=1)] = (16, 32, 64, 128)
    reverse: bool = False

    def __post_init__(self):
        super().__post_init__()
        rising = all(a < b for a, b in zip(self.lengths, self.lengths[1:]))
        if not rising or any(self.lengths[-1] % length for length in self.lengths):
            raise InputError(f"TextData.lengths = {self.lengths}: expected rising lengths that divide the last")

    @property
    def sides(self):
        """Prefixes of a record's fields for (source, target)."""
        return ("target", "source") if self.reverse else ("source", "target")


def unpack_rows(rows, length):
    """Reshapes the rows of a batch to sentences: [R, L] -> [R L / length, length]."""
    return tf.reshape(rows, [-1, length])


class Sentences:
    """All pairs of the training split, in memory, with four bytes a token.

    Args:
        data_dir: folder of the converted data set.
        data: `TextData`.
        spec: the data set's `TextSpec`.

    Raises:
        InputError: the data set is missing or damaged, or has another spec or schema; no pair fits into a bucket.
    """

    def __init__(self, data_dir, data, spec):
        manifest = tfrecord.read_manifest(data_dir, data.train_split)
        check_spec(manifest, spec, data_dir, "text")
        records = tf.data.TFRecordDataset(tfrecord.shard_paths(data_dir, manifest)).batch(4096)
        schema = {name: kind for name, kind in tfrecord.SCHEMAS["text"].items() if name.endswith("/ids")}
        with name_damaged_records(data_dir, data.train_split):
            chunks = list(records.map(lambda chunk: tf.io.parse_example(chunk, schema)))
        self.lengths, self._ids, self._starts = data.lengths, [], []
        sizes = []
        for side in data.sides:
            ragged = [chunk[f"{side}/ids"] for chunk in chunks]
            ids = np.concatenate([chunk.flat_values.numpy() for chunk in ragged])
            if ids.size and not 0 <= ids.min() <= ids.max() < spec.num_classes:
                check_records(data_dir, data.train_split)  # raises an error that names the record
            sizes.append(np.concatenate([chunk.row_lengths().numpy() for chunk in ragged]))
            self._ids.append(ids.astype(np.int32))
            self._starts.append(np.concatenate([[0], np.cumsum(sizes[-1])]))
        # The bucket of each pair; len(lengths) for pairs that are too long.
        self.buckets = np.searchsorted(data.lengths, np.maximum(*sizes))
        self.dropped = int(np.sum(self.buckets == len(data.lengths)))
        if self.dropped == len(self.buckets):
            raise InputError(f"{data_dir}: no pair of {data.train_split!r} has at most {data.lengths[-1]} tokens")

    def epoch(self, seed, epoch, rows):
        """The batches of an epoch, shuffled by the seed: list of (bucket, indices of pairs).

        Every pair with a bucket is in a batch. The last batch of a bucket is filled up with the bucket's first pairs.
        """
        rng = np.random.default_rng([seed, epoch])
        order, batches = rng.permutation(len(self.buckets)), []
        for bucket, length in enumerate(self.lengths):
            members = order[self.buckets[order] == bucket]
            size = rows * (self.lengths[-1] // length)
            count = -(-len(members) // size)
            batches += [(bucket, pairs) for pairs in np.resize(members, [count, size])]
        return [batches[i] for i in rng.permutation(len(batches))]

    def batch(self, bucket, numbers, rows):
        """A batch: dict of 'source' and 'target' int32 [rows, L], and 'bucket' int32 [rows], the same in all rows."""
        sides = []
        for ids, starts in zip(self._ids, self._starts):
            table = np.zeros([len(numbers), self.lengths[bucket]], np.int32)
            for row, number in zip(table, numbers):
                sentence = ids[starts[number] : starts[number + 1]]
                row[: len(sentence)] = sentence
            sides.append(table.reshape(rows, self.lengths[-1]))
        return {"source": sides[0], "target": sides[1], "bucket": np.full(rows, bucket, np.int32)}


def training_text(data_dir, data, spec, stream):
    """An endless stream of per-replica batches, from the stream's `first_step` on. A resumed run gets the same batches.

    Every host has all pairs in memory and makes only the batches of its replicas.

    Args:
        data_dir: folder of the converted data set.
        data: `TextData`.
        spec: the data set's `TextSpec`.
        stream: `Stream`. Its batch is the number of source tokens in a global batch, padding included, and also the
            number of target tokens. The number is rounded down to whole rows on each replica.

    Raises:
        InputError: see `Sentences`; the batch has less than one row for each replica.
    """
    (host, hosts), replicas, length = stream.host, stream.replicas, data.lengths[-1]
    rows, least = stream.batch // replicas // length, replicas * length
    if not rows:
        raise InputError(f"batch {stream.batch}: tokens; expected at least {least}, a row on each replica")
    sentences = Sentences(data_dir, data, spec)
    if sentences.dropped:
        left = f"{sentences.dropped} of {len(sentences.buckets)} pairs of {data.train_split!r}"
        say(f"{left} have more than {length} tokens and are left out", error=True)
    a_step = replicas // hosts

    def batches():
        epoch, order = 0, sentences.epoch(stream.seed, 0, rows)  # all epochs have equally many batches
        for number in itertools.count(stream.first_step * a_step):  # counts this host's batches
            index = number // a_step * replicas + host * a_step + number % a_step
            if index // len(order) != epoch:
                epoch = index // len(order)
                order = sentences.epoch(stream.seed, epoch, rows)
            yield sentences.batch(*order[index % len(order)], rows)

    tokens = tf.TensorSpec([rows, length], tf.int32)
    signature = {"source": tokens, "target": tokens, "bucket": tf.TensorSpec([rows], tf.int32)}
    return made_ahead(tf.data.Dataset.from_generator(batches, output_signature=signature), stream.context, 4)


def truncate(ids, length):
    """Truncates ids to `length`, but keeps the end token as the last: int32 [n] -> [at most length]."""
    return tf.cond(tf.size(ids) > length, lambda: tf.concat([ids[: length - 1], ids[-1:]], 0), lambda: ids)
