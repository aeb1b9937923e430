"""Runs a function of canvases on all replicas."""

import functools
import itertools

import tensorflow as tf

from axial.layers.device import has_tpu, local_replicas


class Replicated:
    """Runs a function of canvases, or of other inputs, on all replicas. Inputs of one size run together.

    Args:
        function: function of images [batch, H, W, 3] and the sizes [batch, 2] of the photos on them, or of other
            `inputs`; returns a dict of tensors.
        strategy: `tf.distribute` strategy.
        batch: examples on each replica; see `batch_size`.
        compiled: whether XLA compiles the function, a program for each size of canvases.
        inputs: function of an example that returns a tuple of what `function` takes, without the batch axis.
        ahead: examples that are read before the first of them is computed; by default as many as run together.
    """

    def __init__(self, function, strategy=None, batch=1, *, compiled=False, inputs=None, ahead=None):
        self.strategy, self.batch = strategy or tf.distribute.get_strategy(), batch
        self.replicas = local_replicas(self.strategy)  # of several workers, one evaluates
        self.inputs, self.ahead = inputs or (lambda example: (example["image"], example["content"])), ahead
        function = tf.function(function, autograph=False, jit_compile=compiled or None)
        self._run = by_size(lambda *x: self.strategy.run(function, x))

    def __call__(self, examples):
        """Yields (example, dict of its tensors, without the batch axis)."""
        size, examples = batch_size(examples, self.batch), iter(examples)
        together = self.replicas * size
        while waiting := list(itertools.islice(examples, self.ahead or together)):
            inputs, of_size, found = [self.inputs(example) for example in waiting], {}, {}
            for number, given in enumerate(inputs):
                of_size.setdefault(tuple(given[0].shape), []).append(number)
            for numbers in of_size.values():
                for first in range(0, len(numbers), together):
                    chosen = numbers[first : first + together]
                    found |= zip(chosen, self._computed([inputs[n] for n in chosen], size))
            yield from ((example, found[number]) for number, example in enumerate(waiting))

    def _computed(self, inputs, size):
        """The results of at most `size` inputs for each replica, in order."""

        def spread(values):
            def pick(context):  # repeats the last one if there are too few
                first = context.replica_id_in_sync_group * size
                return tf.stack([values[min(first + i, len(values) - 1)] for i in range(size)])

            return self.strategy.experimental_distribute_values_from_function(pick)

        results = self._run(*map(spread, zip(*inputs)))
        parts = {k: self.strategy.experimental_local_results(v) for k, v in results.items()}
        return [{k: v[i // size][i % size] for k, v in parts.items()} for i in range(len(inputs))]


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
