"""The Transformer: search with and without caches for each mechanism, precision, gradients, and positions."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.models.registry import ModelConfig
from axial.models.transformer.network import sinusoids
from tests.conftest import relative_error

PIECES, END, LONGEST = 11, 1, 6
TINY = dict(layers=1, channels=16, inner=24, heads=2)
MECHANISMS = {
    "1111": dict(window=3),
    "dynamic": dict(encoder="dynamic", decoder="dynamic", memory="0110", window=3),
    "deformable": dict(encoder="none", decoder="none", encoder_deformable=True, decoder_deformable=True),
    "0010 and deformable": dict(
        encoder="0010", decoder="0110", memory="0010", encoder_deformable=True, decoder_deformable=True
    ),
}
SOME = [name if name == "0010 and deformable" else pytest.param(name, marks=pytest.mark.slow) for name in MECHANISMS]


def make(**arguments):
    """A tiny model. Its random weights are so large that translations have different lengths."""
    model = ModelConfig("transformer_nano", arguments={**TINY, **arguments}).build(PIECES, (4,))
    rng = np.random.default_rng(5)
    for weight in model.weights:
        if "gamma" not in weight.name:
            weight.assign(rng.normal(0, 0.4, weight.shape))
    return model


def sources(sizes):
    """Random sentences of the given numbers of tokens, padded with 0: int32 [len(sizes), max(sizes)]."""
    rng = np.random.default_rng(1)
    source = np.zeros([len(sizes), max(sizes)], np.int32)
    for row, size in zip(source, sizes):
        row[:size] = [*rng.integers(2, PIECES, size - 1), END]
    return source


def next_logs(model):
    """A function of (source, tokens). It returns the next token's log probabilities, float64 [PIECES]."""

    def run(source, tokens):
        target = np.zeros([1, len(tokens) + 1], np.int32)
        target[0, : len(tokens)] = tokens
        last = model({"source": source[None], "target": target})["logits"][0, -1].numpy().astype(np.float64)
        last[0] = -1e6  # padding is never predicted
        return last - np.log(np.exp(last).sum())

    return functools.cache(lambda source, tokens: run(np.array(source), tokens))


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def beam(logs, source, end, beams=3, alpha=0.6):
    """(tokens, score) of a beam search, written with lists. It stops when no unfinished sentence can win."""
    alive, finished = [((), 0.0)], []
    for size in range(1, LONGEST + 1):
        rows = {tokens: logs(source, tokens) for tokens, _ in alive}
        grown = [((*tokens, i), total + rows[tokens][i]) for tokens, total in alive for i in range(PIECES)]
        grown = sorted(grown, key=lambda pair: -pair[1])[: 2 * beams]
        alive = [pair for pair in grown if pair[0][-1] != end][:beams]
        finished += [(tokens, total / penalty(size, alpha)) for tokens, total in grown if tokens[-1] == end]
        finished = sorted(finished, key=lambda pair: -pair[1])[:beams]
        if finished and finished[-1][1] > alive[0][1] / penalty(LONGEST, alpha):
            break
    return finished[0] if finished else alive[0]


@pytest.mark.parametrize("name", SOME)
def test_searches_with_caches_are_those_without(name):
    """`translate` gives the tokens and scores of `beam`, which searches single sentences without caches.

    The sentences have 2 and 5 tokens. They are in one padded batch, in both orders.
    """
    model, sizes = make(**MECHANISMS[name]), (2, 5)
    source, logs = sources(sizes), next_logs(model)
    alone = [tuple(row[:size].tolist()) for row, size in zip(source, sizes)]
    end = beam(logs, alone[0], None, beams=1)[0][2]  # a token with which one translation ends early

    def searches(source):
        return [model.translate(source, LONGEST, end=end, beams=beams) for beams in (3, 1)]

    translate = tf.function(searches, autograph=False)
    actual, again = translate(tf.constant(source)), translate(tf.constant(source[::-1]))
    for (ids, scores), (turned, _), beams in zip(actual, again, (3, 1)):
        np.testing.assert_array_equal(turned[::-1], ids)
        for row, score, sentence in zip(ids.numpy(), scores.numpy(), alone):
            tokens, expected = beam(logs, sentence, end, beams)
            np.testing.assert_array_equal(row[: len(tokens)], tokens)
            assert not row[len(tokens) :].any() and abs(score - expected) < 1e-4 * max(1, abs(expected))


def test_the_head_is_float32_in_half_precision():
    """Under mixed_bfloat16 the logits are float32 and equal a product in float64 up to 1e-6."""
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = make()
    source, inputs = tf.constant(sources((5, 5))), tf.random.stateless_normal([2, 6, model.backbone.channels], [0, 1])
    assert model({"source": source, "target": source})["logits"].dtype == tf.float32
    expected = inputs.numpy().astype(np.float64) @ model.embedding.numpy().astype(np.float64).T
    assert relative_error(model._logits(inputs), expected) < 1e-6


def test_every_weight_has_a_gradient():
    """For sentences of 5 and 6 tokens as source and target, each weight has a finite gradient."""
    model = ModelConfig("transformer_nano_deformable", arguments=TINY).build(PIECES, (4,))
    source = sources((5, 6))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model({"source": source, "target": source}, training=True)["logits"] ** 2)
    for weight, gradient in zip(model.weights, tape.gradient(loss, model.weights), strict=True):
        assert gradient is not None and np.isfinite(tf.convert_to_tensor(gradient)).all(), weight.name


def test_sinusoids_are_those_of_the_paper():
    """For 6 channels, each of 9 positions has 3 sines and then 3 cosines."""
    actual = sinusoids(tf.range(9), 6).numpy()
    for row in range(9):
        for i in range(3):
            angle = row / 10000 ** (2 * i / 6)
            assert abs(actual[row, i] - np.sin(angle)) < 1e-5 and abs(actual[row, 3 + i] - np.cos(angle)) < 1e-5
