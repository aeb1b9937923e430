"""Axial attention against its float64 definition and against both public implementations."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

import oracles
from axial.layers import attend, device
from axial.layers.attend import TERMS
from axial.layers.axial_attention import AxialAttention
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.windows import Windows
from axial.models.import_weights import assign_weights, deeplab2_weights, pytorch_weights
from conftest import golden_files, randomize, read_golden, relative_error

HEADS = 2
TOLERANCE = 1e-4


def make(terms=TERMS, value=True, span=None, max_distance=5, norm=BatchNormConfig(), axis="width"):
    return AxialAttention(2 * HEADS, 3 * HEADS, axis, HEADS, span, terms, value, max_distance, norm, name="attention")


def oracle_weights(layer):
    """The layer's weights under the oracle's names, float64."""
    w = {"kernel": layer.kernel.numpy()}
    w.update({f"{name}_table": table.numpy() for name, table in layer.tables.items()})
    outputs = [layer.content_output_norm]
    if "value" in layer.tables:
        outputs.append(layer.position_output_norm)
    for ours, theirs in (
        ("gamma", "gamma"),
        ("beta", "beta"),
        ("moving_mean", "mean"),
        ("moving_variance", "variance"),
    ):
        w[f"qkv_{theirs}"] = getattr(layer.qkv_norm, ours).numpy()
        w[f"output_{theirs}"] = np.stack([getattr(norm, ours).numpy() for norm in outputs])
        if ours != "beta":
            w[f"logit_{theirs}"] = getattr(layer.logit_norm, ours).numpy()
    return {name: value.astype(np.float64) for name, value in w.items()}


CASES = [
    # rows, length, span, terms, value position
    (3, 7, None, TERMS, True),
    (2, 1, None, TERMS, True),
    (2, 13, None, TERMS, True),  # offsets beyond the table of max_distance 5
    (2, 9, 5, TERMS, True),
    (2, 40, 5, TERMS, True),  # blocks
    (1, 37, 21, TERMS, True),  # blocks as wide as the span allows
    (2, 18, 1, TERMS, True),  # a query sees only itself
    (2, 8, None, ("content",), False),
    (2, 8, None, ("content", "query"), False),
    (2, 8, 5, ("query", "key"), True),
    (2, 33, 7, ("content", "key"), True),
    (2, 3, None, TERMS, True),  # deeper than long: sums over the logits themselves
]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("rows,length,span,terms,value", CASES)
def test_matches_the_oracle(rows, length, span, terms, value):
    rng = np.random.default_rng(length)
    layer = make(terms, value, span, norm=BatchNormConfig(momentum=0.9, epsilon=1e-3))
    x = rng.normal(size=[rows, 1, length, 4]).astype(np.float32)
    layer(x)
    randomize(layer)
    w = oracle_weights(layer)
    for training in (False, True):
        wanted, statistics = oracles.axial_attention(x[:, 0], w, HEADS, span, terms, 1e-3, training)
        assert relative_error(layer(x, training=training)[:, 0], wanted) < TOLERANCE

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


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("rows,length,span", [(2, 5, None), (1, 20, 5), (2, 2, None)])
@pytest.mark.parametrize("training", [False, True])
def test_gradients_match_the_oracle(rows, length, span, training):
    rng = np.random.default_rng(0)
    layer = make(span=span, norm=BatchNormConfig(epsilon=1e-2))
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


def test_logit_offset_and_mean_do_not_matter():
    """The identity behind `LogitNorm`: a shift that is constant for a head leaves softmax alone."""
    logits = tf.random.normal([3, 4, 5], seed=1)
    shifted = logits + tf.random.normal([3, 1, 1], seed=2)
    np.testing.assert_allclose(tf.nn.softmax(logits), tf.nn.softmax(shifted), rtol=1e-5)


# === Other implementations ===


def golden_layer(arrays, meta):
    """(layer, input, output axes, weights) for a golden file of one attention layer."""
    if "torch" in meta:
        norm = BatchNormConfig(1 - meta["bn_momentum"], meta["bn_eps"], unbiased=True)
        layer = AxialAttention(
            meta["out_planes"] // 2,
            meta["out_planes"],
            "width" if meta["width"] else "height",
            meta["groups"],
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


def part(arrays, prefix):
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


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

    assert relative_error(run(x, False), to_ours(arrays["y_inference"])) < TOLERANCE
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = run(x, True)
        loss = tf.reduce_sum(y * to_ours(arrays["cotangent"]))
    assert relative_error(y, to_ours(arrays["y_training"])) < TOLERANCE
    gradients = part(arrays, "grad_train/")
    wanted_x = to_ours(gradients.pop("x"))
    wanted = convert(gradients)
    named = {w.name.split("/", 1)[1][:-2]: w for w in layer.trainable_weights}
    assert set(named) == set(wanted)
    found_x, found = tape.gradient(loss, [x, named])
    assert relative_error(found_x, wanted_x) < TOLERANCE
    for key, gradient in found.items():
        assert relative_error(tf.convert_to_tensor(gradient), wanted[key]) < TOLERANCE, key
    moved = convert(part(arrays, "after_train/"))
    weights = {w.name.split("/", 1)[1][:-2]: w for w in layer.non_trainable_weights}
    assert set(weights) == set(moved)
    for key, value in moved.items():
        assert relative_error(weights[key], value) < TOLERANCE, key


@pytest.mark.parametrize("name", golden_files("ref_localspan_*.npz"))
def test_golden_local_span(name):
    reference, meta = read_golden(name)
    arrays, source_meta = read_golden(meta["weights_and_input"])
    for key, wanted in reference.items():
        layer, to_ours, convert, _ = golden_layer(arrays, source_meta)
        layer.span = int(key.rsplit("span", 1)[1])
        x = to_ours(arrays["x"])
        layer(x)
        assign_weights(layer, convert(part(arrays, "w/")))
        assert relative_error(layer(x), to_ours(wanted)) < TOLERANCE


# === Shapes, spans, memory ===


def test_one_set_of_weights_serves_every_size_and_span():
    layer = make(span=5)
    for size in ((1, 1), (3, 8), (50, 2)):
        assert layer(tf.zeros([1, *size, 4])).shape == (1, *size, 3 * HEADS)
    layer.span = None
    assert layer(tf.zeros([1, 9, 31, 4])).shape == (1, 9, 31, 3 * HEADS)


def test_height_is_width_of_the_transposed_image():
    height, width = make(axis="height"), make(axis="width")
    x = tf.random.normal([2, 6, 9, 4], seed=3)
    height(x), width(x)
    randomize(width)
    for ours, theirs in zip(height.weights, width.weights):
        ours.assign(theirs)
    turned = tf.transpose(width(tf.transpose(x, [0, 2, 1, 3])), [0, 2, 1, 3])
    np.testing.assert_allclose(height(x), turned, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("training", [False, True])
def test_local_span_makes_no_tensor_of_length_times_length(training):
    """Every tensor of the forward and the backward pass stays linear in the length."""
    layer, length, span = make(span=9), 512, 9
    layer(tf.zeros([1, 1, length, 4]))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=training)
        return tape.gradient(y, [x, *layer.trainable_weights])

    graph = step.get_concrete_function(tf.TensorSpec([1, 1, length, 4])).graph
    sizes = [
        output.shape.num_elements()
        for operation in graph.get_operations()
        for output in operation.outputs
        if output.shape.rank is not None and output.shape.is_fully_defined()
    ]
    block = 16 + span - 1
    assert max(sizes) <= HEADS * length * block * 1.2
    assert max(sizes) < length * length


@pytest.mark.parametrize("softmax", ["keep", "recompute", "kernel"])
@pytest.mark.parametrize(
    "axis,span,length,parts",
    [("height", None, 20, 3), ("width", 5, 40, 16), ("height", 3, 40, 3), ("width", None, 3, 3)],
)
def test_parts_and_memory_change_nothing(monkeypatch, axis, span, length, parts, softmax):
    """Outputs and gradients of a step made part after part, with w kept or made again."""
    layer = AxialAttention(16, 32, axis, heads=2, span=span, max_distance=9)
    x = tf.random.stateless_normal([3, length, length, 8], [0, 1])
    layer(x)
    randomize(layer)

    cotangent = tf.random.stateless_normal([3, length, length, 32], [0, 2])

    def step(part_bytes, softmax):
        monkeypatch.setattr(attend, "PART_BYTES", part_bytes)
        layer.softmax = softmax

        def run():
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                loss = tf.reduce_sum(y * cotangent)
            return [y, *(tf.convert_to_tensor(g) for g in tape.gradient(loss, [x, *layer.trainable_weights]))]

        function = tf.function(run, autograph=False)
        graph = function.get_concrete_function().graph
        return function(), sum(op.type == "Softmax" for op in graph.get_operations())

    wanted, whole = step(2**40, "keep")
    found, many = step(2**8, softmax)
    assert whole == 1 and many == parts * (1 if softmax == "keep" else 2)
    for a, b in zip(found, wanted):
        assert np.abs(a - b).max() < 1e-5 * max(np.abs(b).max(), np.abs(wanted[1]).max())  # some cancel to zero


@pytest.mark.parametrize("size,span", [((20, 5), None), ((20, 40), 5), ((64, 6), None)])
def test_memory_changes_nothing_on_an_accelerator(monkeypatch, size, span):
    """As above; the last size has the 128 rows of pixels that stay apart from the heads."""
    monkeypatch.setattr(device, "on_processor", lambda: False)
    layer = AxialAttention(16, 32, "width", heads=2, span=span, max_distance=9)
    x = tf.random.stateless_normal([2, *size, 8], [0, 1])
    layer(x)
    randomize(layer)
    cotangent = tf.random.stateless_normal([2, *size, 32], [0, 2])

    def step(softmax):
        layer.softmax = softmax

        @tf.function(autograph=False)
        def run():
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(layer(x, training=True) * cotangent)
            return [tf.convert_to_tensor(g) for g in tape.gradient(loss, [x, *layer.trainable_weights])]

        operations = run.get_concrete_function().graph.get_operations()
        return run(), sum(op.type == "Softmax" for op in operations)

    (kept, once), (again, twice) = step("keep"), step("recompute")
    assert (once, twice) == (1, 2)
    for a, b in zip(again, kept):
        assert np.abs(a - b).max() < 1e-5 * max(np.abs(b).max(), np.abs(kept[1]).max())


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("span,value", [(None, True), (5, True), (None, False)])
def test_large_maps_are_made_in_parts(monkeypatch, span, value, compiled):
    """The same output in inference, and no tensor as large as the whole map."""
    layer = AxialAttention(16, 32, "height", heads=4, span=span, value_position=value)
    x = tf.random.stateless_normal([2, 40, 7, 12], [0, 1])
    layer(x)
    randomize(layer)

    def compile_():
        return tf.function(layer, autograph=False) if compiled else layer

    whole = compile_()(x)
    monkeypatch.setattr(attend, "LARGEST_MAP", 20000)
    call = compile_()
    assert relative_error(call(x), whole) < 1e-6
    if compiled:
        graph = call.get_concrete_function(x).graph
        graphs = [graph, *(f.graph for f in graph._functions.values() if hasattr(f, "graph"))]
        assert any(op.type in ("While", "StatelessWhile") for op in graph.get_operations())
        rows, pairs = 14 * 4, 40 * 40 if span is None else 40 * 24
        shapes = [t.shape for g in graphs for op in g.get_operations() for t in op.outputs]
        assert max(s.num_elements() or 0 for s in shapes if s.is_fully_defined()) < rows * pairs


@pytest.mark.parametrize("length,span", [(129, 65), (65, 65), (33, 65), (100, 3), (16, 5), (17, 5)])
def test_windows_show_each_query_the_keys_of_its_span(length, span):
    windows = Windows(1, length, "width", span)
    seen = np.zeros([length, length], int)
    visible = np.ones([1, length, length]) if windows.visible is None else windows.visible
    for block in range(windows.blocks):
        for i in range(windows.queries):
            query = block * windows.queries + i
            for j in np.flatnonzero(visible[block, i]):
                seen[query, query + windows.offsets[i, j]] += 1
    positions = np.arange(length)
    wanted = abs(positions[:, None] - positions[None, :]) <= span // 2
    np.testing.assert_array_equal(seen, wanted)
    assert windows.pairs == wanted.sum()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("mode", ["graph", "jit"])
@pytest.mark.parametrize("span", [None, 5])
def test_eager_equals_compiled(mode, span):
    layer = make(span=span)
    x = tf.random.normal([2, 4, 20, 4], seed=5)
    layer(x)
    randomize(layer)
    compiled = tf.function(layer, jit_compile=mode == "jit", autograph=False)
    assert relative_error(compiled(x), layer(x)) < 1e-5


@pytest.mark.usefixtures("form")
def test_mixed_bfloat16_stays_near_float32():
    x = tf.random.normal([2, 6, 20, 4], seed=6)
    full = make()
    full(x)
    randomize(full)
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    half = make()
    assert half(x).dtype == tf.bfloat16
    for ours, theirs in zip(half.weights, full.weights):
        assert ours.dtype == tf.float32
        ours.assign(theirs)
    for training in (False, True):
        found = tf.cast(half(x, training=training), tf.float32)
        assert relative_error(found, full(x, training=training)) < 0.05


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("silent", [0.0, 1e-9, 1.0])
@pytest.mark.parametrize("terms", [TERMS, ("content",), ("query", "key"), ("content", "key")])
def test_folded_layer_equals_its_source(terms, silent):
    """Also where a head's scale of a term, by which folding divides, is nothing."""
    source = make(terms=terms)
    x = tf.random.normal([2, 6, 20, 4], seed=7)
    source(x)
    randomize(source)
    gamma = source.logit_norm.gamma
    gamma.assign(gamma * [[silent, 1.0]])
    folded = make(norm=None, terms=terms)
    folded(x)
    for weight, value in zip(folded.weights, source.folded_weights(), strict=True):
        weight.assign(value)
    assert relative_error(folded(x), source(x)) < 1e-5
    assert not any("norm" in w.name for w in folded.weights)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (dict(span=8), "nearest are 7 and 9"),
        (dict(span=0), "odd"),
        (dict(terms=()), "terms"),
        (dict(terms=("contents",)), "terms"),
        (dict(axis="depth"), "axis"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(**arguments)


def test_heads_must_divide_channels():
    with pytest.raises(ValueError, match="8 heads"):
        AxialAttention(12, 16, "width")
