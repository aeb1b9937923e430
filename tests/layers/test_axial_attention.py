"""Axial attention, compared with a float64 oracle and with golden files of DeepLab2 and csrhddlam."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.layers.attention.folded import FoldedAttention
from axial.layers.attention.layer import TERMS, AxialAttention
from axial.layers.attention.windows import table_rows
from axial.layers.batch_norm import BatchNormConfig
from axial.weights.names import assign_weights, csrhddlam_weights, deeplab2_weights, weight_names
from tests import oracles
from tests.conftest import (
    BACKENDS,
    built,
    check_golden,
    golden_files,
    jit_values,
    prefixed,
    read_golden,
    relative_error,
)

HEADS = 2
TOLERANCE = 1e-4


def make(terms=TERMS, value=True, span=None, max_distance=5, axis="width", **options):
    return AxialAttention(
        2 * HEADS,
        3 * HEADS,
        axis,
        HEADS,
        span=span,
        terms=terms,
        value_position=value,
        max_distance=max_distance,
        name="attention",
        **options,
    )


def same_weights(layer, source):
    """Copies the weights of a layer to another built layer."""
    for ours, theirs in zip(layer.weights, source.weights, strict=True):
        ours.assign(theirs)
    return layer


def step(layer, x):
    """Returns [y, gradient of x, *gradients of the weights] in training, for a random gradient of y."""
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
        loss = tf.reduce_sum(tf.cast(y, tf.float64) * np.random.default_rng(2).normal(size=y.shape))
    return [y, *map(tf.convert_to_tensor, tape.gradient(loss, [x, *layer.trainable_weights]))]


def check_steps(actual, expected, tolerance):
    """Compares results of `step`. A gradient below 1 % of the largest one is compared relative to this 1 %."""
    largest = max(np.abs(value).max() for value in expected[1:])
    for ours, theirs in zip(actual, expected, strict=True):
        scale = max(np.abs(theirs).max(), 1e-2 * largest)
        assert np.abs(tf.cast(ours, theirs.dtype) - theirs).max() < tolerance * scale


def folded_copy(layer, x, dtype=None):
    """A `FoldedAttention` with the folded weights of a built layer, by default with the layer's dtype policy."""
    folded = FoldedAttention(layer.spec, dtype=dtype or layer.dtype_policy)
    folded.build(x.shape)
    for weight, value in zip(folded.weights, layer.folded_weights(), strict=True):
        weight.assign(value)
    return folded


def oracle_weights(layer):
    """dict from the oracle's names to the layer's weights as float64 arrays."""
    w = {"kernel": layer.kernel.numpy()}
    w.update({f"{name}_table": table.numpy() for name, table in layer.tables.items()})
    outputs = [layer.content_output_norm]
    if layer.spec.options.value_position:
        outputs.append(layer.position_output_norm)
    for ours in ("gamma", "beta", "moving_mean", "moving_variance"):
        theirs = ours.removeprefix("moving_")
        w[f"output_{theirs}"] = np.stack([getattr(norm, ours).numpy() for norm in outputs])
        if layer.inner_norm:
            w[f"qkv_{theirs}"] = getattr(layer.qkv_norm, ours).numpy()
            if ours != "beta":
                w[f"logit_{theirs}"] = getattr(layer.logit_norm, ours).numpy()
    return {name: value.astype(np.float64) for name, value in w.items()}


CASES = [
    # number of lines, length, span, terms, whether the value has a position table
    (3, 7, None, TERMS, True),
    (2, 1, None, TERMS, True),
    (2, 13, None, TERMS, True),  # offsets beyond the table of max_distance 5
    (2, 18, 5, TERMS, True),  # several blocks
    (1, 37, 21, TERMS, True),  # blocks of the largest width
    (2, 18, 1, TERMS, True),  # a query sees only itself
    (2, 8, None, ("content",), False),
    (2, 33, 7, ("content", "key"), True),
    (2, 3, None, TERMS, True),  # more channels than keys
]


def compare(layers, x, span, terms=TERMS, tolerance=TOLERANCE):
    """Gives the layers the same random weights. Compares their outputs and moving statistics with the oracle."""
    for layer in layers:
        built(layer, x)
    weights = oracle_weights(layers[0])
    for training in (False, True):
        options = dict(terms=terms, epsilon=1e-3, training=training)
        expected, statistics = oracles.axial_attention(x[:, 0], weights, HEADS, span, **options)
        for layer in layers:
            assert relative_error(layer(x, training=training)[:, 0], expected) < tolerance, layer.spec.options.backend
    for layer, (i, kind) in itertools.product(layers, enumerate(("mean", "variance"))):
        content, backend = layer.content_output_norm, layer.spec.options.backend
        for name, norm, batch in (
            ("qkv", layer.qkv_norm, statistics["qkv"][i]),
            ("logit", layer.logit_norm, statistics["logit"][i]),
            ("output", content, statistics["output"][i][0]),
        ):
            old = weights[f"{name}_{kind}"][0] if norm is content else weights[f"{name}_{kind}"]
            moved = 0.9 * old + 0.1 * batch
            assert relative_error(getattr(norm, f"moving_{kind}"), moved) < tolerance, (backend, name)


@pytest.mark.parametrize(
    "case,dtype,tolerance",
    [*((case, "float64", 1e-9) for case in CASES), *((CASES[i], "float32", TOLERANCE) for i in (0, 3, 8))],
    ids=str,
)
def test_matches_the_oracle(case, dtype, tolerance):
    """Outputs of every backend and of folded layers equal the oracle's. Gradients equal the 'reference' backend's."""
    rows, length, span, terms, value = case
    norm = BatchNormConfig(momentum=0.9, epsilon=1e-3)
    layers = [make(terms, value, span, norm=norm, backend=backend, dtype=dtype) for backend in BACKENDS]
    x = np.random.default_rng(length).normal(size=[rows, 1, length, 4]).astype(dtype)
    compare(layers, x, span, terms, tolerance)
    *fast, plain = layers
    for layer in fast:
        check_steps(step(layer, x), step(plain, x), 10 * tolerance)
    for layer in layers:
        assert relative_error(folded_copy(layer, x)(x), layer(x)) < tolerance


@pytest.mark.parametrize("length,effective_span", [(9, None), (10, 9)])
def test_an_axis_up_to_the_span_is_seen_whole(length, effective_span):
    norm = BatchNormConfig(momentum=0.9, epsilon=1e-3)
    layers = [make(span=9, whole_up_to_span=True, norm=norm, backend=backend) for backend in BACKENDS]
    x = np.random.default_rng(length).normal(size=[2, 1, length, 4]).astype(np.float32)
    compare(layers, x, effective_span)
    window = make(span=9, norm=norm)
    window(x)
    same_weights(window, layers[0])
    assert (relative_error(window(x), layers[0](x)) > 1e-3) == (effective_span is None)


@pytest.mark.parametrize("terms,silent", [(TERMS, 0.0), (("query", "key"), -1e-3)])
def test_a_silent_term_is_folded(backend, terms, silent):
    """The folded layer has the same output, even if the scale of a term is zero for a head.

    All folded weights are in the range of float16.
    """
    x = tf.random.normal([2, 6, 20, 4], seed=7)
    source = built(make(terms=terms, backend=backend), x)
    gamma = source.logit_norm.gamma
    gamma.assign(gamma * [[silent, 1.0]])
    folded = folded_copy(source, x)
    assert relative_error(folded(x), source(x)) < 1e-5
    for weight in folded.weights:
        assert "norm" not in weight.name
        weight.assign(tf.cast(tf.cast(weight, tf.float16), tf.float32))
    assert relative_error(folded(x), source(x)) < 1e-2


# === Golden files of other implementations ===


def golden_layer(arrays, meta, span=None):
    """Returns (layer of a golden file, function to axial's order of axes, function that converts weights, stride)."""
    if "torch" in meta:
        norm = BatchNormConfig(1 - meta["bn_momentum"], meta["bn_eps"], unbiased=True)
        layer = AxialAttention(
            meta["out_planes"] // 2,
            meta["out_planes"],
            "width" if meta["width"] else "height",
            meta["groups"],
            span=span,
            max_distance=meta["kernel_size"],
            norm=norm,
            name="attention",
        )

        def convert(arrays):
            shapes = {name: w.shape for name, w in weight_names(layer).items()}
            return csrhddlam_weights(arrays, shapes, meta["groups"])

        to_ours, stride = lambda a: a.transpose(0, 2, 3, 1), meta["stride"]
    else:
        flags = "use_content_similarity", "use_query_rpe_similarity", "use_key_rpe_similarity"
        terms = [term for term, flag in zip(TERMS, flags) if meta.get(flag, True)]
        statistics = next(iter(meta["batch_norms"].values()))
        layer = AxialAttention(
            meta["total_key_depth"],
            meta["total_value_depth"],
            meta.get("axis", "width"),
            meta["num_heads"],
            span=span,
            terms=terms,
            value_position=meta.get("retrieve_value_rpe", True),
            norm=BatchNormConfig(statistics["momentum"], statistics["eps"]),
            name="attention",
        )

        def convert(arrays):
            return deeplab2_weights({k.removeprefix("attn/"): v for k, v in arrays.items()})

        to_ours = (lambda a: a[:, None]) if arrays["x"].ndim == 3 else (lambda a: a)
        stride = 1
    return layer, to_ours, convert, stride


@pytest.mark.parametrize(
    "name", [n for p in ("d2_attn1d_*", "d2_attn_axis_*", "pt_attn_*") for n in golden_files(p + ".npz")]
)
def test_golden_attention(name):
    arrays, meta = read_golden(name)
    layer, to_ours, convert, stride = golden_layer(arrays, meta)
    x = tf.constant(to_ours(arrays["x"]))
    layer(x)
    assign_weights(layer, convert(prefixed(arrays, "w/")))

    def run(x, training):
        y = layer(x, training=training)
        return tf.nn.avg_pool2d(y, stride, stride, "VALID") if stride > 1 else y

    def by_name(weights):
        return {w.name.split("/", 1)[1][:-2]: w for w in weights}

    names = check_golden(arrays, run, by_name(layer.weights), convert=convert, to_ours=to_ours)
    assert names == (set(by_name(layer.trainable_weights)), set(by_name(layer.non_trainable_weights)))


@pytest.mark.parametrize("name", golden_files("ref_localspan_*.npz"))
def test_golden_local_span(name):
    reference, meta = read_golden(name)
    arrays, source_meta = read_golden(meta["weights_and_input"])
    for key, expected in reference.items():
        layer, to_ours, convert, _ = golden_layer(arrays, source_meta, span=int(key.rsplit("span", 1)[1]))
        x = to_ours(arrays["x"])
        layer(x)
        assign_weights(layer, convert(prefixed(arrays, "w/")))
        assert relative_error(layer(x), to_ours(expected)) < TOLERANCE


# === Shapes, spans, memory ===


def test_one_set_of_weights_serves_every_size_and_span():
    layer, whole = make(span=5), make()
    for size in ((1, 1), (3, 8), (50, 2)):
        assert layer(tf.zeros([1, *size, 4])).shape == (1, *size, 3 * HEADS)
    assert whole(tf.zeros([1, 9, 31, 4])).shape == (1, 9, 31, 3 * HEADS)
    assert same_weights(whole, layer)(tf.zeros([1, 50, 2, 4])).shape == (1, 50, 2, 3 * HEADS)


def test_eager_equals_compiled(backend):
    x = tf.random.normal([2, 4, 20, 4], seed=5)
    layer = built(make(span=5, backend=backend), x)
    compiled = tf.function(layer, jit_compile=jit_values()[-1], autograph=False)
    assert relative_error(compiled(x), layer(x)) < 1e-5


@pytest.mark.parametrize(
    "arguments,words",
    [
        (dict(span=8), "nearest are 7 and 9"),
        (dict(terms=()), "terms"),
        (dict(axis="depth"), "axis"),
        (dict(max_distance=0), "max_distance must be at least 1"),
        (dict(recompute="keep"), "recompute must be one of none, softmax, block: got 'keep'"),
        (dict(backend="kernels"), "did you mean 'kernel'"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(InputError, match=words):
        make(**arguments)


@pytest.mark.parametrize("rows,first,count", [(1, -3, 4), (2, 0, 1), (9, -20, 15), (9, -3, 15), (9, -3, 4), (9, 20, 4)])
def test_neighbouring_rows_of_a_table_need_no_scatter(rows, first, count):
    random, offsets = np.random.default_rng(0), np.arange(first, first + count)
    index = np.clip(offsets + rows // 2, 0, rows - 1)
    table, weight = random.normal(size=[rows, 3]), random.normal(size=[count, 3])
    expected = np.zeros_like(table)
    np.add.at(expected, index, weight)

    @tf.function
    def step(table):
        with tf.GradientTape() as tape:
            tape.watch(table)
            neighbours = table_rows(table, offsets)
            loss = tf.reduce_sum(neighbours * weight)
        return neighbours, tape.gradient(loss, table)

    neighbours, gradient = step(tf.constant(table))
    np.testing.assert_array_equal(neighbours, table[index])
    np.testing.assert_allclose(gradient, expected, atol=1e-12)
    graph = step.get_concrete_function(tf.TensorSpec(table.shape, tf.float64)).graph
    assert not [op.name for op in graph.get_operations() if "Gather" in op.type or "Segment" in op.type]
