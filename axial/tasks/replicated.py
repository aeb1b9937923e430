"""Runs a function of canvases on all replicas."""

import collections
import functools
import itertools

import tensorflow as tf

from axial.layers.device import has_tpu, local_replicas


class Replicated:
    """Runs a function of canvases on all replicas.

    Canvases of one size run together.

    Args:
        function: function of images [batch, H, W, 3] and the sizes [batch, 2] of the photos on them; returns a dict of
            tensors.
        strategy: `tf.distribute` strategy.
        batch: most photos on each replica; see `batch_size`.
    """

    def __init__(self, function, strategy=None, batch=1):
        self.strategy, self.batch = strategy or tf.distribute.get_strategy(), batch
        self.replicas = local_replicas(self.strategy)  # of several workers, one evaluates
        self._used = collections.defaultdict(set)  # batch sizes of each size of canvases
        function = tf.function(function, autograph=False)
        self._run = by_size(lambda *x: self.strategy.run(function, x))

    def __call__(self, examples):
        """Yields (example, dict of its tensors, without the batch axis)."""
        examples = iter(examples)
        while waiting := list(itertools.islice(examples, self.replicas * self.batch)):
            of_size = {}
            for example in waiting:
                of_size.setdefault(tuple(example["image"].shape), []).append(example)
            found = {size: self._flush(alike) for size, alike in of_size.items()}
            yield from (next(found[tuple(example["image"].shape)]) for example in waiting)

    def _flush(self, examples):
        size = -(-len(examples) // self.replicas)
        size = batch_size(size, self.batch, self._used[tuple(examples[0]["image"].shape)])

        def spread(value):
            def pick(context):  # repeats the last example if there are too few
                first = context.replica_id_in_sync_group * size
                chosen = (examples[min(first + i, len(examples) - 1)] for i in range(size))
                return tf.stack([value(example) for example in chosen])

            return self.strategy.experimental_distribute_values_from_function(pick)

        results = self._run(spread(lambda e: e["image"]), spread(lambda e: e["content"]))
        parts = {k: self.strategy.experimental_local_results(v) for k, v in results.items()}
        for i, example in enumerate(examples):
            yield example, {k: v[i // size][i % size] for k, v in parts.items()}


def batch_size(count, largest, used):
    """Examples in the batch that `count` examples are computed as; the rest of it repeats the last one.

    The least of the `used` sizes that holds them, or else a power of two, which is added to these. So a photo alone is
    computed alone, and the last photos of a split in a batch as large as those before: a new size takes a new graph. A
    TPU, which takes a minute to compile one, always has the `largest`.

    >>> used = set()
    >>> [batch_size(count, 32, used) for count in (1, 3, 2, 32, 7, 1)]
    [1, 4, 4, 32, 32, 1]
    """
    if has_tpu():
        return largest
    size = min((size for size in used if size >= count), default=min(1 << (count - 1).bit_length(), largest))
    used.add(size)
    return size


def by_size(function):
    """A function that is traced once for each size of its tensors.

    Args:
        function: function of tensors, or of dicts of tensors. Those of one call have one size; replicas have the same.
    """

    @functools.cache
    def graph(shapes):
        return tf.function(functools.partial(function), autograph=False)  # one for all would warn of many traces

    def run(*arguments):
        values = tf.nest.flatten(arguments, expand_composites=True)
        return graph(tuple(tuple(x.shape) for x in values))(*arguments)

    return run
