"""Runs a function of canvases on all replicas."""

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
        batch: photos on each replica; see `batch_size`.
        compiled: whether XLA compiles the function, a program for each size of canvases.
    """

    def __init__(self, function, strategy=None, batch=1, *, compiled=False):
        self.strategy, self.batch = strategy or tf.distribute.get_strategy(), batch
        self.replicas = local_replicas(self.strategy)  # of several workers, one evaluates
        function = tf.function(function, autograph=False, jit_compile=compiled or None)
        self._run = by_size(lambda *x: self.strategy.run(function, x))

    def __call__(self, examples):
        """Yields (example, dict of its tensors, without the batch axis)."""
        size, examples = batch_size(examples, self.batch), iter(examples)
        while waiting := list(itertools.islice(examples, self.replicas * size)):
            of_size = {}
            for example in waiting:
                of_size.setdefault(tuple(example["image"].shape), []).append(example)
            found = {shape: self._flush(alike, size) for shape, alike in of_size.items()}
            yield from (next(found[tuple(example["image"].shape)]) for example in waiting)

    def _flush(self, examples, size):
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


def batch_size(examples, most):
    """How many examples are computed together: 1 for a list of one, which waits for its answer, else `most`.

    The last ones are repeated where there are fewer, as another size takes another graph, which rounds in its own way.
    A TPU takes a minute to compile one.

    >>> [batch_size(examples, 32) for examples in (["a"], ["a", "b"], iter(["a"]))]
    [1, 32, 32]
    """
    alone = isinstance(examples, list) and len(examples) == 1
    return 1 if alone and not has_tpu() else most


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
