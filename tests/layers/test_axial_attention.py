"""Axial attention, compared with its float64 definition and with both public implementations."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.layers.attention.reference import TERMS
from axial.layers.axial_attention import AxialAttention
from axial.layers.batch_norm import BatchNormConfig
from axial.weights.names import assign_weights, deeplab2_weights, pytorch_weights
from tests import oracles
from tests.conftest import check_golden, golden_files, jit_values, part, randomize, read_golden, relative_error

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
    """Gives a built layer the weights of another."""
    for ours, theirs in zip(layer.weights, source.weights, strict=True):
        ours.assign(theirs)
    return layer


def oracle_weights(layer):
    """The layer's weights under the oracle's names, float64."""
    w = {"kernel": layer.kernel.numpy()}
    w.update({f"{name}_table": table.numpy() for name, table in layer.tables.items()})
    outputs = [layer.content_output_norm]
    if layer.spec.value_position:
        outputs.append(layer.position_output_norm)
    for ours, theirs in (
        ("gamma", "gamma"),
        ("beta", "beta"),
        ("moving_mean", "mean"),
        ("moving_variance", "variance"),
    ):
        w[f"output_{theirs}"] = np.stack([getattr(norm, ours).numpy() for norm in outputs])
        if layer.inner_norm:
            w[f"qkv_{theirs}"] = getattr(layer.qkv_norm, ours).numpy()
            if ours != "beta":
                w[f"logit_{theirs}"] = getattr(layer.logit_norm, ours).numpy()
    return {name: value.astype(np.float64) for name, value in w.items()}


CASES = [
    # rows, length, span, terms, value position
    (3, 7, None, TERMS, True),
    (2, 1, None, TERMS, True),
    (2, 13, None, TERMS, True),  # offsets beyond the table of max_distance 5
    (2, 9, 5, TERMS, True),
    (2, 40, 5, TERMS, True),  # several blocks
    (1, 37, 21, TERMS, True),  # blocks as wide as the span allows
    (2, 18, 1, TERMS, True),  # a query sees only itself
    (2, 8, None, ("content",), False),
    (2, 8, None, ("content", "query"), False),
    (2, 8, 5, ("query", "key"), True),
    (2, 33, 7, ("content", "key"), True),
    (2, 3, None, TERMS, True),  # more channels than keys: sums over the logits themselves
]


def compare(layer, x, span, terms=TERMS, tolerance=TOLERANCE):
    """Compares a layer with random weights with the oracle. Returns these weights and the statistics of training."""
    layer(x)
    randomize(layer)
    weights = oracle_weights(layer)
    for training in (False, True):
        wanted, statistics = oracles.axial_attention(x[:, 0], weights, HEADS, span, terms, 1e-3, training)
        assert relative_error(layer(x, training=training)[:, 0], wanted) < tolerance
    return weights, statistics


@pytest.mark.parametrize("rows,length,span,terms,value", [CASES[0], CASES[4], CASES[8], CASES[11]])
def test_float64_matches_the_oracle(backend, rows, length, span, terms, value):
    x = np.random.default_rng(length).normal(size=[rows, 1, length, 4])
    layer = make(terms, value, span, norm=BatchNormConfig(epsilon=1e-3), backend=backend, dtype="float64")
    compare(layer, x, span, terms, tolerance=1e-10)
    folded = layer.folded()
    folded.build(x.shape)
    for weight, number in zip(folded.weights, layer.folded_weights(), strict=True):
        weight.assign(number)
    assert relative_error(folded(x), layer(x)) < 1e-10


@pytest.mark.parametrize("rows,length,span,terms,value", CASES)
def test_matches_the_oracle(backend, rows, length, span, terms, value):
    rng = np.random.default_rng(length)
    layer = make(terms, value, span, norm=BatchNormConfig(momentum=0.9, epsilon=1e-3), backend=backend)
    x = rng.normal(size=[rows, 1, length, 4]).astype(np.float32)
    w, statistics = compare(layer, x, span, terms)

    def moved(old, new):
        return 0.9 * old + 0.1 * new

    for i, kind in enumerate(("mean", "variance")):
        weight = f"moving_{kind}"
        assert (
            relative_error(getattr(layer.qkv_norm, weight), moved(w[f"qkv_{kind}"], statistics["qkv"][i])) < TOLERANCE
        )
        assert (
            relative_error(getattr(layer.logit_norm, weight), moved(w[f"logit_{kind}"], statistics["logit"][i]))
            < TOLERANCE
        )
        assert (
            relative_error(
                getattr(layer.content_output_norm, weight),
                moved(w[f"output_{kind}"][0], statistics["output"][i][0]),
            )
            < TOLERANCE
        )


@pytest.mark.parametrize("length,seen", [(7, None), (9, None), (10, 9), (40, 9)])
def test_an_axis_up_to_the_span_is_seen_whole(backend, length, seen):
    layer = make(span=9, whole_up_to_span=True, norm=BatchNormConfig(epsilon=1e-3), backend=backend)
    x = np.random.default_rng(length).normal(size=[2, 1, length, 4]).astype(np.float32)
    compare(layer, x, seen)
    window = make(span=9, norm=BatchNormConfig(epsilon=1e-3), backend=backend)
    window(x)
    same_weights(window, layer)
    assert (relative_error(window(x), layer(x)) > 1e-3) == (seen is None)
    copy = AxialAttention.from_config(layer.get_config())
    copy(x)
    np.testing.assert_array_equal(same_weights(copy, layer)(x), layer(x))


@pytest.mark.parametrize("rows,length,span", [(2, 5, None), (1, 20, 5), (2, 2, None)])
@pytest.mark.parametrize("training", [False, True])
def test_gradients_match_the_oracle(backend, rows, length, span, training):
    rng = np.random.default_rng(0)
    layer = make(span=span, norm=BatchNormConfig(epsilon=1e-2), backend=backend)
    x = rng.normal(size=[rows, 1, length, 3]).astype(np.float32)
    cotangent = rng.normal(size=[rows, length, 3 * HEADS])
    layer(x)
    randomize(layer)
    w = oracle_weights(layer)
    inputs = {"x": x[:, 0].astype(np.float64), **w}

    def loss():
        y, _ = oracles.axial_attention(
            inputs["x"], {k: v for k, v in inputs.items() if k != "x"}, HEADS, span, TERMS, 1e-2, training
        )
        return (y * cotangent).sum()

    variables = {
        "x": tf.Variable(x),
        "kernel": layer.kernel,
        **{f"{name}_table": table for name, table in layer.tables.items()},
        "qkv_gamma": layer.qkv_norm.gamma,
        "qkv_beta": layer.qkv_norm.beta,
        "logit_gamma": layer.logit_norm.gamma,
    }
    with tf.GradientTape() as tape:
        y = layer(variables["x"].value(), training=training)[:, 0]
        value = tf.reduce_sum(tf.cast(y, tf.float64) * cotangent)
    gradients = tape.gradient(value, variables)
    for name, gradient in gradients.items():
        ours = tf.convert_to_tensor(gradient).numpy().astype(np.float64).reshape(-1)
        entries = rng.permutation(ours.size)[:6]
        numeric = oracles.numeric_gradient(loss, inputs[name], entries=entries)
        scale = max(np.abs(ours).max(), 1e-3)
        for i, wanted in numeric.items():
            assert abs(ours[i] - wanted) / scale < TOLERANCE, name


def test_the_mean_of_the_logits_does_not_matter():
    """`LogitNorm` relies on this: softmax ignores what is the same for all keys."""
    layer = make()
    x = tf.random.stateless_normal([2, 3, 5, 4], [0, 0])
    layer(x)
    randomize(layer)
    wanted = layer(x)
    layer.logit_norm.moving_mean.assign_add(tf.ones_like(layer.logit_norm.moving_mean))
    np.testing.assert_array_equal(layer(x), wanted)


# === Other implementations ===


def golden_layer(arrays, meta, span=None):
    """(layer, axes of the input, converter of weights, stride) for a golden file of one attention layer."""
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
            return pytorch_weights(arrays, meta["groups"])

        to_ours, stride = lambda a: a.transpose(0, 2, 3, 1), meta["stride"]
    else:
        terms = [
            term
            for term, flag in zip(
                TERMS, ("use_content_similarity", "use_query_rpe_similarity", "use_key_rpe_similarity")
            )
            if meta.get(flag, True)
        ]
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
    assign_weights(layer, convert(part(arrays, "w/")))

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
    for key, wanted in reference.items():
        layer, to_ours, convert, _ = golden_layer(arrays, source_meta, span=int(key.rsplit("span", 1)[1]))
        x = to_ours(arrays["x"])
        layer(x)
        assign_weights(layer, convert(part(arrays, "w/")))
        assert relative_error(layer(x), to_ours(wanted)) < TOLERANCE


# === Shapes, spans, memory ===


def test_one_set_of_weights_serves_every_size_and_span():
    layer, whole = make(span=5), make()
    for size in ((1, 1), (3, 8), (50, 2)):
        assert layer(tf.zeros([1, *size, 4])).shape == (1, *size, 3 * HEADS)
    assert whole(tf.zeros([1, 9, 31, 4])).shape == (1, 9, 31, 3 * HEADS)
    assert same_weights(whole, layer)(tf.zeros([1, 50, 2, 4])).shape == (1, 50, 2, 3 * HEADS)


def test_height_is_width_of_the_transposed_image():
    height, width = make(axis="height"), make(axis="width")
    x = tf.random.normal([2, 6, 9, 4], seed=3)
    height(x), width(x)
    randomize(width)
    same_weights(height, width)
    turned = tf.transpose(width(tf.transpose(x, [0, 2, 1, 3])), [0, 2, 1, 3])
    np.testing.assert_allclose(height(x), turned, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("jit", jit_values())
@pytest.mark.parametrize("span", [None, 5])
def test_eager_equals_compiled(backend, jit, span):
    layer = make(span=span, backend=backend)
    x = tf.random.normal([2, 4, 20, 4], seed=5)
    layer(x)
    randomize(layer)
    compiled = tf.function(layer, jit_compile=jit, autograph=False)
    assert relative_error(compiled(x), layer(x)) < 1e-5


def test_mixed_bfloat16_stays_near_float32(backend):
    x = tf.random.normal([2, 6, 20, 4], seed=6)
    full = make(backend=backend)
    full(x)
    randomize(full)
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    half = make(backend=backend)
    assert half(x).dtype == tf.bfloat16
    for ours, theirs in zip(half.weights, full.weights):
        assert ours.dtype == tf.float32
        ours.assign(theirs)
    for training in (False, True):
        found = tf.cast(half(x, training=training), tf.float32)
        assert relative_error(found, full(x, training=training)) < 0.05


@pytest.mark.parametrize(
    "arguments,words",
    [
        (dict(span=8), "nearest are 7 and 9"),
        (dict(span=0), "odd"),
        (dict(terms=()), "terms"),
        (dict(terms=("contents",)), "terms"),
        (dict(axis="depth"), "axis"),
        (dict(max_distance=0), "max_distance must be at least 1"),
        (dict(recompute="keep"), "recompute must be one of none, softmax, block: got 'keep'"),
        (dict(backend="kernels"), "did you mean 'kernel'"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(InputError, match=words):
        make(**arguments)


def test_heads_must_divide_channels():
    with pytest.raises(InputError, match="8 heads"):
        AxialAttention(12, 16, "width")


def test_norms_inside_can_be_frozen_alone(backend):
    """A frozen norm has its moving statistics in training too, and the others learn."""
    layer = make(span=3, norm=BatchNormConfig(momentum=0.5), backend=backend)
    x = tf.random.stateless_normal([2, 1, 9, 4], [0, 1])
    layer(x)
    randomize(layer)
    norms = {"qkv_norm", "logit_norm", "content_output_norm", "position_output_norm"}
    for name in sorted(norms):
        getattr(layer, name).trainable = False
        before = {w.name: w.numpy() for w in layer.weights}
        layer(x, training=True)
        moved = {w.name.split("/")[1] for w in layer.weights if np.any(w.numpy() != before[w.name])}
        assert moved == norms - {name}
        getattr(layer, name).trainable = True
    for name in norms:
        getattr(layer, name).trainable = False
    np.testing.assert_array_equal(layer(x, training=True), layer(x))


def test_fitting_on_a_frozen_layer_moves_nothing_in_it():
    layer = make(span=3)
    photo = keras.Input([4, 9, 4])
    model = keras.Model(photo, keras.layers.Dense(2)(keras.layers.Flatten()(layer(photo))))
    layer.trainable = False
    before, head = layer.get_weights(), model.layers[-1].get_weights()
    model.compile(keras.optimizers.legacy.SGD(0.1), "mse")
    rng = np.random.default_rng(0)
    model.fit(rng.normal(size=[8, 4, 9, 4]), rng.normal(size=[8, 2]), batch_size=4, verbose=0)
    for found, value in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, value)
    assert np.any(model.layers[-1].get_weights()[0] != head[0])
