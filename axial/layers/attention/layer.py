"""Position-sensitive attention: equation, options, weights, batch norms and reference implementation. Start here.

For each head, the query at pixel o attends to the keys at the pixels p of its neighbourhood:

    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o} + k_p . r^k_{p-o}) (v_p + r^v_{p-o})

In Eq. 3 of Axial-DeepLab (Wang et al., ECCV 2020) the neighbourhood is a square around o. In Eq. 4 it is the whole row
or column of o, or the `span` pixels of this line around o. q, k and v are linear projections of the image. r^q, r^k and
r^v are rows of learned position tables (relative positional encodings), which all heads share.

Batch norms follow q, k and v, each of the three logit terms (one scale per head) and each of the two output terms (one
scale per channel). Softmax ignores a shift that is the same for all keys. So the batch norm of a logit term reduces to
its scale, gamma / sqrt(variance + epsilon).

`attend` is the reference implementation. It stores all L x L maps in full, so it is slow and needs much memory. The
other implementations compute the same result in less time and memory: `cpu.py`, `xla.py`, and `tpu/` for a whole layer.
`device.choose` chooses the implementation.

Letters of the shapes: N images of h x w pixels; B lines (rows, columns, or whole maps for squares), whose pixels attend
only to pixels of the same line; L queries of a line; M keys of a line, which are the same pixels as its queries;
H heads; D query and key channels per head; E value channels per head; R rows of a table.
"""

import dataclasses
import functools

import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.io.check import check_choice
from axial.layers.attention import cpu, xla
from axial.layers.attention.windows import SquareWindows, Windows, check_span, join_heads, split_heads, table_rows
from axial.layers.batch_norm import BatchNorm, BatchNormConfig, BatchScales, LogitNorm
from axial.layers.configured import Layer
from axial.layers.conv import product
from axial.layers.device import BACKENDS, choose, import_kernels
from axial.layers.masking import hide
from axial.layers.precision import wide, widen
from axial.layers.rematerialisation import RECOMPUTE

TERMS = ("content", "query", "key")  # the logit terms, in the order of their scales
KERNELS = "axial.layers.attention.tpu.layer"
# Largest number of logits of one term that are held at a time, where the scales are known: 0.5 GB in float32. Inference
# with the form 'cpu' holds 16 MB, which stay in the cache.
LARGEST_MAP, LARGEST_CPU_MAP = 2**27, 2**22


# === Options ===


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The options that all attention layers of a network share.

    Attributes:
        heads: number of heads, H.
        span: odd number of keys that a query sees, with |p - o| <= span // 2; None for the whole axis.
        terms: the logit terms in use, some of `TERMS`.
        value_position: whether the output has the position term, sum_p w_p r^v_{p-o}.
        whole_up_to_span: whether a query sees the whole axis if the axis is not longer than the span. If False, the
            span is a window around the query on short axes too.
        recompute: one of `RECOMPUTE`. With 'softmax' training does not store the map of logits, and the backward pass
            repeats a third of the matrix products.
        backend: the implementation of the attention, one of `BACKENDS`.

    Raises:
        InputError: the span is even, no term is in use, or a name is unknown.
    """

    heads: int = 8
    span: int | None = None
    terms: tuple[str, ...] = TERMS
    value_position: bool = True
    whole_up_to_span: bool = False
    recompute: str = "none"
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_span(self.span)
        check_choice("recompute", self.recompute, RECOMPUTE)
        check_choice("backend", self.backend, BACKENDS)
        if not self.terms or not set(self.terms) <= set(TERMS):
            raise InputError(f"terms must be some of {', '.join(TERMS)}: got {self.terms}")
        object.__setattr__(self, "terms", tuple(term for term in TERMS if term in self.terms))


def local_options(
    span: int = 7, heads: int = 8, position_sensitive: bool = False, recompute: str = "none", backend: str = "auto"
) -> AttentionOptions:
    """`AttentionOptions` of local attention: Eq. 3 if `position_sensitive`, else Eq. 2, which uses only r^q.

    Eq. 2 is the attention of Ramachandran et al., NeurIPS 2019.
    """
    terms = TERMS if position_sensitive else TERMS[:2]
    return AttentionOptions(heads, span, terms, position_sensitive, recompute=recompute, backend=backend)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The options of one layer: the options of its network, its neighbourhood and its channels.

    Attributes:
        axis: 'height' or 'width'; 'square' for the span x span pixels around a query.
        key_channels: query channels of all heads together, H*D. The keys have the same number.
        value_channels: value channels of all heads together, H*E. The output has the same number.
        options: `AttentionOptions`.
        max_distance: the position table of an axis has one row for each offset with |p - o| < max_distance, which is
            2 max_distance - 1 rows. Larger offsets use the first or the last row.

    Raises:
        InputError: the axis is unknown, a square has no span, the heads do not divide the channels, or max_distance is
            below 1.
    """

    axis: str
    key_channels: int
    value_channels: int
    options: AttentionOptions = AttentionOptions()
    max_distance: int = 255

    def __post_init__(self) -> None:
        heads = self.options.heads
        check_choice("axis", self.axis, ("height", "width", "square"))
        if self.axis == "square" and self.options.span is None:
            raise InputError("span must be a number for attention to squares: got None")
        if self.max_distance < 1:
            raise InputError(f"max_distance must be at least 1: got {self.max_distance}")
        if heads < 1 or self.key_channels % heads or self.value_channels % heads:
            sizes = f"{self.key_channels} and {self.value_channels}"
            raise InputError(f"{heads} heads must divide key_channels and value_channels: got {sizes}")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of channels of q, k and v: H*D, H*D and H*E."""
        return self.key_channels, self.key_channels, self.value_channels

    @property
    def uses(self) -> list[str]:
        """The uses of position tables, some of 'query', 'key' and 'value'."""
        return [term for term in self.options.terms if term != "content"] + ["value"] * self.options.value_position

    def windows(self, x: tf.Tensor) -> Windows | SquareWindows:
        """The windows of an image [N, h, w, C]. Raises InputError unless h and w are static."""
        _, height, width, _ = x.shape
        if height is None or width is None:
            hint = "give the model's Input, or the data set's output_signature, a fixed size"
            raise InputError(f"attention needs a static height and width: got {x.shape}; {hint}")
        span = self.options.span
        if self.axis == "square":
            return SquareWindows(height, width, span)
        length = height if self.axis == "height" else width
        whole = self.options.whole_up_to_span and span is not None and length <= span
        return Windows(height, width, self.axis, None if whole else span)

    def add_tables(self, layer: Layer) -> dict[str, tf.Variable]:
        """Adds the position tables to a layer that is being built. Returns a dict from each table's name to the table.

        A square has two tables per use, one for row offsets and one for column offsets. r_{p-o} is the sum of one row
        of the first and one row of the second.
        """
        square, tables = self.axis == "square", {}
        rows, variance = (self.options.span, 0.5) if square else (2 * self.max_distance - 1, 1.0)
        for use in self.uses:
            depth = (self.value_channels if use == "value" else self.key_channels) // self.options.heads
            for name in (f"{use}_row", f"{use}_column") if square else (use,):
                normal = keras.initializers.TruncatedNormal(stddev=(variance / depth) ** 0.5)
                table = functools.partial(layer.add_weight, initializer=normal, experimental_autocast=False)
                tables[name] = table(f"{name}_table", [rows, depth])
        return tables

    def lookup_tables(self, tables):
        """dict from each use to its table: [R, D], or [R, E] for 'value'. `tables` is the dict from `add_tables`.

        The two tables of a square become one table with a row for each pair of a row offset and a column offset.
        """
        if self.axis != "square":
            return tables
        pairs = {use: tf.expand_dims(tables[f"{use}_row"], 1) + tables[f"{use}_column"] for use in self.uses}
        return {use: tf.reshape(table, [self.options.span**2, -1]) for use, table in pairs.items()}


# === The reference implementation ===


def attend(q, k, v, tables, *, windows, options, scales, training=False):
    """Computes the equation of this module. Each logit term has a scale in place of its batch norm.

    Args:
        q, k: [N, h, w, H*D].
        v: [N, h, w, H*E].
        tables: dict of the tables in use: 'query' [R, D], 'key' [R, D] and 'value' [R, E].
        windows: `Windows` or `SquareWindows` of the image.
        options: `AttentionOptions`. The field `recompute` has no effect here.
        scales: [terms, H], or `BatchScales`, which computes them from the sums of the logits and of their squares.
        training: not used here. Other implementations pass this argument to `hide`.

    Returns:
        A tuple of sum_p w_p v_p and sum_p w_p r^v_{p-o}, both [N, h, w, H*E]. The second is None without a 'value'
        table.
    """
    del training
    q, k, v = (split_heads(x, windows, options.heads) for x in (q, k, v))  # [B, L, H, D], [B, M, H, D], [B, M, H, E]
    offsets, visible = windows.all_pairs()  # [L, M]
    rows = {name: tf.cast(table_rows(table, offsets), q.dtype) for name, table in tables.items()}  # [L, M, D or E]
    maps = logit_maps(q, k, rows, options.terms)  # [terms, B, H, L, M]
    if isinstance(scales, BatchScales):
        masked = tf.where(visible, maps, tf.zeros([], maps.dtype))  # [terms, B, H, L, M]
        scales = scales.from_sums(tf.stack([tf.reduce_sum(s, [1, 3, 4]) for s in (masked, masked * masked)], 2))
    logits = tf.reduce_sum(maps * scales[:, None, :, None, None], 0)  # [B, H, L, M]
    w = tf.cast(tf.nn.softmax(hide(logits, visible)), v.dtype)  # [B, H, L, M]
    content, position = tf.einsum("bhlm,bmhe->blhe", w, v), None  # [B, L, H, E]
    if "value" in rows:
        position = join_heads(tf.einsum("bhlm,lme->blhe", w, rows["value"]), windows)  # [N, h, w, H*E]
    return join_heads(content, windows), position  # [N, h, w, H*E] each


def logit_maps(q, k, rows, terms):
    """q . k, q . r^q and k . r^k of every pair of a query and a key: [terms, B, H, L, M].

    Args:
        q, k: [B, L, H, D] and [B, M, H, D].
        rows: dict of the table rows 'query' and 'key', [L, M, D]. Entry [l, m] is r_{m-l}.
        terms: the terms to compute, some of `TERMS`.
    """
    products = {
        "content": lambda: tf.einsum("blhd,bmhd->bhlm", q, k),
        "query": lambda: tf.einsum("blhd,lmd->bhlm", q, rows["query"]),
        "key": lambda: tf.einsum("bmhd,lmd->bhlm", k, rows["key"]),
    }
    return widen(tf.stack([products[term]() for term in terms]))


# === The fast implementations ===

FORMS = {"cpu": cpu.attend, "xla": xla.attend, "reference": attend}


def attend_fast(q, k, v, tables, *, windows, options, scales, training=False):
    """Computes the result of `attend` with the implementation that `device.choose` returns.

    If the scales are known and the number of images is static, a map of logits that would exceed the largest size is
    computed in chunks of lines.
    """
    form = choose(options.backend)
    largest = LARGEST_CPU_MAP if form == "cpu" and not training else LARGEST_MAP

    def run(q, k, v, windows):
        return FORMS[form](q, k, v, tables, windows=windows, options=options, scales=scales, training=training)

    if isinstance(scales, BatchScales) or q.shape[0] is None:
        return run(q, k, v, windows)
    lines = q.shape[0] * windows.lines
    chunks = -(-lines * options.heads * windows.blocks * windows.queries * windows.keys // largest)
    if chunks <= 1:
        return run(q, k, v, windows)
    size = -(-lines // chunks)
    chunks = -(-lines // size)

    def cut(x):
        """[N, h, w, C] -> [chunks, size, h or 1, 1 or w, C], with zero lines at the end."""
        x = tf.pad(windows.split_lines(x), [[0, chunks * size - lines], [0, 0], [0, 0], [0, 0]])
        return tf.reshape(x, [chunks, size, *x.shape[1:]])

    def run_chunk(x):
        return [y for y in run(*x, windows.one_line()) if y is not None]

    inputs = cut(q), cut(k), cut(v)
    signature = [tf.TensorSpec(inputs[2].shape[1:], v.dtype)] * (1 + ("value" in tables))
    outputs = tf.map_fn(run_chunk, inputs, parallel_iterations=1, fn_output_signature=signature)
    outputs = [windows.join_lines(tf.reshape(y, [-1, *y.shape[2:]])[:lines]) for y in outputs]
    return (*outputs, None)[:2]


# === The layers ===


class Attention(Layer):
    """Multi-head attention of every pixel to the pixels of its neighbourhood, with batch norms.

    Args:
        spec: `AttentionSpec`.
        norm: `BatchNormConfig`.
        inner_norm: whether q, k, v and the logit terms have batch norms. The output terms always have them.

    Shapes:
        - x: [N, h, w, C], h and w static
        - output: [N, h, w, value_channels]
    """

    def __init__(self, spec, norm=BatchNormConfig(), inner_norm=True, **kwargs):
        super().__init__(**kwargs)
        self.spec, self.norm, self.inner_norm = spec, norm, inner_norm
        if inner_norm:
            self.qkv_norm = BatchNorm(norm, name="qkv_norm")
            shape, dtype = [len(spec.options.terms), spec.options.heads], wide(self.compute_dtype).name
            self.logit_norm = LogitNorm(shape, norm, dtype=dtype, name="logit_norm")
        self.content_output_norm = BatchNorm(norm, name="content_output_norm")
        self.position_output_norm = None
        if spec.options.value_position:
            self.position_output_norm = BatchNorm(norm, name="position_output_norm")

    def build(self, shape: tf.TensorShape) -> None:
        qkv, values = sum(self.spec.sizes), self.spec.value_channels
        scaled = keras.initializers.VarianceScaling(1.0, "fan_in")
        self.kernel = self.add_weight("kernel", [shape[-1], qkv], initializer=scaled)
        self.tables = self.spec.add_tables(self)
        norms: list[tuple[Layer, int | None]] = [(self.content_output_norm, values)]
        if self.inner_norm:
            norms += [(self.qkv_norm, qkv), (self.logit_norm, None)]
        if self.position_output_norm is not None:
            norms.append((self.position_output_norm, values))
        for norm, channels in norms:  # built here, because a call may skip some of these batch norms
            with tf.name_scope(norm.name):
                norm.build([channels])
        super().build(shape)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        """norm(sum_p w_p v_p) + norm(sum_p w_p r^v_{p-o}), where w_p = softmax_p(the sum of the scaled logit terms)."""
        x = self.sized(x)  # [N, h, w, C]
        learns = training and self.trainable and not self.norm.frozen
        windows, options = self.spec.windows(x), self.spec.options
        # The number of logits of each term and head, which only training needs.
        pairs = windows.pairs * tf.cast(tf.shape(x)[0], wide(x.dtype)) * windows.lines if learns else None
        tables = self.spec.lookup_tables(self.tables)  # 'query' and 'key' [R, D], 'value' [R, E]
        if choose(options.backend, lambda: self._kernels_can_serve(x, windows)) == "kernel":
            with tf.name_scope(windows.scope):
                return self._call_kernels(x, tables, windows, pairs=pairs, learns=learns)
        if self.inner_norm and learns:
            qkv = self.qkv_norm(product(x, self.kernel), training=True)  # [N, h, w, 2 H*D + H*E]
        else:
            qkv = product(x, self.kernel, self.qkv_norm if self.inner_norm else lambda y: y)
        q, k, v = tf.split(qkv, self.spec.sizes, 3)  # [N, h, w, H*D], [N, h, w, H*D], [N, h, w, H*E]
        scales = self._scales(pairs, learns)  # [terms, H], or `BatchScales`
        with tf.name_scope(windows.scope):
            content, position = attend_fast(
                q, k, v, tables, windows=windows, options=options, scales=scales, training=training
            )  # both [N, h, w, H*E]
        output = self.content_output_norm(content, training=learns)  # [N, h, w, H*E]
        if position is not None:
            output += self.position_output_norm(position, training=learns)  # [N, h, w, H*E]
        return output

    def _scales(self, pairs, learns):
        """The scales of the logit terms; see `attend`."""
        if not self.inner_norm:
            return tf.ones([len(self.spec.options.terms), self.spec.options.heads], wide(self.compute_dtype))
        if learns and self.logit_norm.trainable:
            return BatchScales(self.logit_norm, pairs)
        return self.logit_norm.stored_scales()

    # === TPU kernels ===

    def _kernels_can_serve(self, x, windows):
        return self.inner_norm and import_kernels(KERNELS).can_serve(x, self.kernel, self.spec, windows)

    def _call_kernels(self, x, tables, windows, *, pairs, learns):
        """The output of `call`, computed by the TPU kernels."""
        pixels = tf.cast(tf.reduce_prod(tf.shape(x)[:3]), tf.float32)
        outputs = self.content_output_norm, self.position_output_norm

        def affine(norm, sums):
            from_batch = learns and norm.trainable
            return tf.stack(norm.affine(*tf.unstack(sums), count=pixels) if from_batch else norm.folded())

        kernels = import_kernels(KERNELS)
        norms = kernels.Norms(
            qkv_affine=lambda sums: affine(self.qkv_norm, sums),
            logit_scales=self._scales(pairs, learns),
            output_affines=lambda sums: tf.stack([affine(*pair) for pair in zip(outputs, tf.unstack(sums))]),
        )
        kernel = tf.convert_to_tensor(self.kernel)
        return kernels.project_and_attend(x, kernel, self.spec, tables, windows=windows, norms=norms)

    # === Folding ===

    def folded_weights(self) -> list[tf.Tensor]:
        """The values of the weights of a `FoldedAttention` of the same spec, in the order of its weights.

        - The batch norm of q, k and v is folded into the projections and their biases.
        - Each logit term keeps one scale per head. If q and k absorbed these scales, the content term would have to
          divide by these scales. A scale near zero would then give a weight that overflows float16.
        - The scale of the content output is folded into v. The scale of the position output stays a separate weight,
          because all heads share the value table.
        - Attention weights sum to one, so the shifts of the output norms are folded into the bias of v.
        """
        dtype, channels = wide(self.compute_dtype), self.kernel.shape[1]
        scale, shift = tf.ones([channels], dtype), tf.zeros([channels], dtype)
        if self.inner_norm:
            scale, shift = self.qkv_norm.folded()
        rest = tf.unstack(self._scales(None, learns=False))
        output_scale, output_shift = self.content_output_norm.folded()
        if self.position_output_norm is not None:
            position_scale, position_shift = self.position_output_norm.folded()
            output_shift += position_shift
            rest.append(position_scale)
        on_columns = tf.concat([tf.ones([2 * self.spec.key_channels], output_scale.dtype), output_scale], 0)
        kernels = tf.split(self.kernel * scale * on_columns, self.spec.sizes, 1)
        q_bias, k_bias, v_bias = tf.split(shift * on_columns, self.spec.sizes)
        return [*kernels, q_bias, k_bias, v_bias + output_shift, *self.tables.values(), *rest]


class AxialAttention(Attention):
    """Multi-head position-sensitive attention along the height or the width of an image (Axial-DeepLab, Eq. 4).

    The same weights work for every image size and every span, because p - o indexes the tables.

    Args:
        key_channels, value_channels, axis, max_distance: see `AttentionSpec`.
        heads, span, terms, value_position, whole_up_to_span, recompute, backend: see `AttentionOptions`.
        norm: `BatchNormConfig`.

    Shapes:
        - x: [N, h, w, C], h and w static
        - output: [N, h, w, value_channels]

    Raises:
        InputError: the span is even, the heads do not divide the channels, no logit term is in use, or a name is
            unknown.

    Examples:
        >>> layer = AxialAttention(64, 128, axis="width", span=65)
        >>> layer(tf.random.normal([1, 33, 129, 128])).shape
        TensorShape([1, 33, 129, 128])
    """

    def __init__(
        self,
        key_channels: int,
        value_channels: int,
        axis: str,
        heads: int = 8,
        span: int | None = None,
        terms: tuple[str, ...] = TERMS,
        value_position: bool = True,
        max_distance: int = 255,
        whole_up_to_span: bool = False,
        norm: BatchNormConfig = BatchNormConfig(),
        recompute: str = "none",
        backend: str = "auto",
        **kwargs,
    ):
        options = AttentionOptions(
            heads, span, terms, value_position, whole_up_to_span=whole_up_to_span, recompute=recompute, backend=backend
        )
        spec = AttentionSpec(axis, key_channels, value_channels, options, max_distance=max_distance)
        super().__init__(spec, norm, **kwargs)


class LocalAttention(Attention):
    """Multi-head attention of every pixel to the square around it (Axial-DeepLab, Eq. 3; Ramachandran et al., 2019).

    The same weights work for every image size, even one smaller than the square.

    Args:
        key_channels, value_channels: see `AttentionSpec`.
        heads, recompute, backend: see `AttentionOptions`. The TPU kernels support axial attention only.
        span: odd side of the square.
        position_sensitive: True for Eq. 3; False for Eq. 2, which uses only r^q.
        batch_norm: whether q, k, v and the logit terms have batch norms. The output always has a batch norm, like the
            3x3 convolution that this layer replaces.
        norm: `BatchNormConfig`.

    Shapes:
        - x: [N, h, w, C], h and w static
        - output: [N, h, w, value_channels]

    Raises:
        InputError: the span is even, the heads do not divide the channels, or a name is unknown.

    Examples:
        >>> layer = LocalAttention(64, 64, position_sensitive=True)
        >>> layer(tf.random.normal([1, 33, 5, 128])).shape
        TensorShape([1, 33, 5, 64])
    """

    def __init__(
        self,
        key_channels: int,
        value_channels: int,
        heads: int = 8,
        span: int = 7,
        position_sensitive: bool = False,
        batch_norm: bool = True,
        norm: BatchNormConfig = BatchNormConfig(),
        recompute: str = "none",
        backend: str = "auto",
        **kwargs,
    ):
        options = local_options(span, heads, position_sensitive, recompute, backend=backend)
        super().__init__(AttentionSpec("square", key_channels, value_channels, options), norm, batch_norm, **kwargs)
