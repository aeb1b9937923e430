"""Generalised attention: Transformer attention with a switch for each of its four terms (Zhu et al., ICCV 2019).

For each head, y_q = sum_k softmax_k(E1 + E2 + E3 + E4) W' x_k. A projection W combines the heads. `attention_terms.py`
defines and computes E1 to E4. A layer has only the weights that its attention type needs.
"""

import dataclasses
from typing import Any

import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.io.check import check_choice
from axial.layers.configured import Layer, Unfolded
from axial.layers.conv import product, subsample
from axial.layers.precision import wide, widen
from axial.layers.rematerialisation import RECOMPUTE
from axial.layers.spatial_attention.attention_terms import Axis, Grid, Terms, attend, encode, logits, weigh
from axial.layers.spatial_attention.decoding import Mask, check_axes, check_index, check_odd, joined_masks, written
from axial.layers.spatial_attention.pair_free import pool, pool_near, separable

# The options of the paper's systems: maps of pixels, and sequences of tokens.
VISION: dict = dict(axes=2, scaled=False, wavelength=1000.0)
TEXT: dict = dict(axes=1, scaled=True, wavelength=10000.0)


def split_heads(x, heads):
    """[N, Y, X, C] -> [N, heads, Y, X, C / heads]."""
    _, rows, columns, channels = x.shape
    return tf.transpose(tf.reshape(x, [-1, rows, columns, heads, channels // heads]), [0, 3, 1, 2, 4])


def join_heads(y):
    """[N, M, Y, X, D] -> [N, Y, X, M * D]."""
    _, heads, rows, columns, depth = y.shape
    return tf.reshape(tf.transpose(y, [0, 2, 3, 1, 4]), [-1, rows, columns, heads * depth])


class GeneralizedAttention(Unfolded, Layer):
    """Attention of every query to all keys, or to the keys of a window.

    Args:
        setting: the attention type, one bit per term. '1111' is Transformer attention. See `attention_terms`.
        heads: number of heads, a divisor of the number of channels.
        axes: 2 for maps, 1 for sequences.
        key_stride: stride of the keys along each axis of the map or sequence.
        window: odd number of rows and columns that a query sees around itself; None for all keys.
        causal: whether a token of a sequence sees only itself and earlier tokens.
        scaled: whether the sum of the terms is divided by the square root of the channels per head.
        wavelength: base of the wavelengths of the sinusoidal relative positions: 1000 for maps in the paper's code,
            10000 for sequences in Transformer-XL.
        recompute: one of `RECOMPUTE`. With 'softmax' the backward pass recomputes all attention weights, otherwise only
            the weights of maps that are computed in chunks.

    Shapes:
        - x: [N, h, w, C] or [N, L, C]; h, w and L static
        - output: [N, h, w, C] or [N, L, C]

    The layer supports Keras masks: a masked key has weight 0, and the layer passes the mask on to the next layer.

    Raises:
        InputError: the attention type is unknown, the heads do not divide the channels, the window is even or combined
            with a key stride, a map is causal, or the key stride is larger than the map.

    Examples:
        >>> layer = GeneralizedAttention("0110")
        >>> layer(tf.random.normal([2, 9, 7, 32])).shape
        TensorShape([2, 9, 7, 32])
    """

    def __init__(
        self,
        setting: str = "1111",
        heads: int = 8,
        axes: int = 2,
        *,
        key_stride: int = 1,
        window: int | None = None,
        causal: bool = False,
        scaled: bool = False,
        wavelength: float = 1000.0,
        recompute: str = "none",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.setting, self.terms = setting, Terms.of(setting)
        check_choice("recompute", recompute, RECOMPUTE)
        check_axes(axes, causal)
        if key_stride < 1:
            raise InputError(f"key_stride = {key_stride}: expected at least 1")
        if window is not None:
            check_odd("window", window)
            if key_stride > 1:
                raise InputError(f"window = {window}: expected key_stride = 1 beside it, got {key_stride}")
        self.heads, self.axes, self.key_stride, self.window = heads, axes, key_stride, window
        self.causal, self.scaled, self.wavelength, self.recompute = causal, scaled, wavelength, recompute
        # The number of positions that a query sees before and after itself; None for all.
        reach = None if window is None else window // 2
        self.reach = reach, 0 if causal else reach

    # === Weights ===

    def build(self, shape: tf.TensorShape) -> None:
        channels, terms = shape[-1], self.terms
        if self.heads < 1 or channels % self.heads:
            raise InputError(f"heads = {self.heads}: expected a divisor of the {channels} channels")
        self.depth = channels // self.heads
        if terms.needs_position and channels % (4 if self.axes == 2 else 2):
            raise InputError(f"{channels} channels: expected a multiple of {4 if self.axes == 2 else 2} for positions")

        def weight(name, shape, initializer):
            """A weight that Keras does not cast, because `step` runs outside of `call` and needs the same numbers."""
            return self.add_weight(name, shape, initializer=initializer, experimental_autocast=False)

        def kernel(name, inputs=channels):
            return weight(name, [inputs, channels], keras.initializers.VarianceScaling(1.0, "fan_in", "uniform"))

        def vector(name):
            bound = (2 * self.depth) ** -0.5
            return weight(name, [self.heads, self.depth], keras.initializers.RandomUniform(-bound, bound))

        self.query_kernel = kernel("query_kernel") if terms.needs_query else None
        self.key_kernel = kernel("key_kernel") if terms.query_key or terms.key else None
        self.value_kernel = kernel("value_kernel")
        sides = ("row", "column")[: self.axes] if terms.needs_position else ()
        self.position_kernels = {f"{name}s": kernel(f"{name}_position_kernel", channels // self.axes) for name in sides}
        self.key_vector = vector("key_vector") if terms.key else None
        self.position_vector = vector("position_vector") if terms.position else None
        self.output_kernel = kernel("output_kernel")
        self.output_bias = weight("output_bias", [channels], "zeros")
        super().build(shape)

    # === The forward pass ===

    def call(
        self,
        x: tf.Tensor,
        keys: tf.Tensor | None = None,
        key_mask: Mask = None,
        training: bool = False,
        mask: Mask = None,
    ) -> tf.Tensor:
        """The attention output of every query of x.

        Args:
            x: [N, h, w, C] or [N, L, C].
            keys: tensor of the same rank as x, from which keys and values are projected; None for x itself.
            key_mask: bool [N, Y, X] or [N, L], False for padded keys, which get no weight; None if no key is padded.
            training: see `hide`.
            mask: Keras' mask of x, which applies if `keys` is None. Otherwise the Keras mask of `keys` applies.
        """
        key_mask = joined_masks(key_mask, mask if keys is None else getattr(keys, "_keras_mask", None))
        x, keys, key_mask = self._as_maps(self.sized(x), keys, key_mask)
        return self._from_map(self._project(self._attended(x, keys, key_mask, training), x))

    def _as_maps(self, x, keys, key_mask):
        """The arguments as maps, with strided keys. A sequence becomes a map with one column."""
        keys = x if keys is None else tf.cast(keys, self.compute_dtype)  # Keras casts only the first argument
        if None in x.shape[1:] or None in keys.shape[1:]:
            raise InputError(f"attention needs static sizes: got {x.shape} and {keys.shape}")
        if self.axes == 1:
            x, keys = x[:, :, None], keys[:, :, None]
            key_mask = None if key_mask is None else key_mask[:, :, None]
        strides = self.key_stride, self.key_stride if self.axes == 2 else 1
        if self.key_stride > 1 and any(s > n for s, n in zip(strides, keys.shape[1:3])):
            size = "x".join(str(n) for n in keys.shape[1 : 1 + self.axes])
            raise InputError(f"key_stride = {self.key_stride}: expected at most the size of the keys, {size}")
        if key_mask is not None:
            key_mask = key_mask[:, :: strides[0], :: strides[1]]
        return x, subsample(keys, *strides), key_mask

    def _from_map(self, y):
        return tf.squeeze(y, 2) if self.axes == 1 else y

    def grid(self, queries: tuple[int, int], keys: tuple[int, int]) -> Grid:
        """The `Grid` of a map of queries and a map of keys, from both sizes (height, width)."""
        rows = Axis(queries[0], keys[0], self.key_stride, *self.reach)
        columns = Axis(queries[1], keys[1], self.key_stride, *self.reach) if self.axes == 2 else Axis(1, 1)
        return Grid(rows, columns)

    def _attended(self, x, keys, key_mask, training):
        """The outputs of all heads [N, h, w, C], or [N, 1, 1, C] if they are the same for all queries."""
        grid, operands = self.grid(x.shape[1:3], keys.shape[1:3]), Operands(self, self.terms)
        saliency = operands.saliency(keys)
        if self.terms.key_only and not grid.visible():
            # Pooling before the projection avoids the projection of every key to a value.
            pooled = pool(saliency, keys, key_mask, training)
            kernel = tf.reshape(operands.cast(self.value_kernel), [-1, self.heads, self.depth])
            y = tf.einsum("nmc,cmd->nmd", pooled, kernel)
            return tf.reshape(y, [-1, 1, 1, self.heads * self.depth])
        value = split_heads(product(keys, operands.cast(self.value_kernel)), self.heads)
        same = all(axis.queries == axis.keys for axis in (grid.rows, grid.columns))
        if self.terms.key_only and same and self.key_stride == 1:
            return join_heads(tf.cast(pool_near(saliency, value, grid, key_mask), value.dtype))
        tables = operands.tables(grid)
        if not (self.terms.needs_query or self.terms.key) and key_mask is None:
            return join_heads(separable(tables, value, grid, training))
        query, key = operands.queries(x), operands.keys(keys, saliency)
        key["value"] = value
        if key_mask is not None:
            # The mask is float, because `in_chunks` computes a gradient for every shared tensor.
            key["real"] = tf.cast(key_mask, tf.float32)[:, None]
        keeps_weights = self.recompute != "softmax"
        return join_heads(attend(query, key, tables, grid, keeps_weights=keeps_weights, training=training))

    def _project(self, y, x):
        cast = Operands(self, self.terms).cast
        y = product(y, cast(self.output_kernel)) + cast(self.output_bias)
        return y if y.shape[1:3] == x.shape[1:3] else tf.broadcast_to(y, tf.shape(x))

    # === The weights of one query ===

    def query_weights(self, x: tf.Tensor, position: Any, *, terms: str | None = None) -> tf.Tensor:
        """float32 [N, M, Y, X]: the attention weights of one query over all keys, which sum to one.

        The method computes only the logits of this query.

        Args:
            x: [N, h, w, C] or [N, L, C].
            position: (row, column) of the query, or its index in a sequence.
            terms: four bits such as '0010', for some of the terms of the layer's attention type; None for all terms.

        Raises:
            InputError: the position is outside the map, or the layer's attention type lacks a term.
        """
        operands = Operands(self, self.terms if terms is None else Terms.of(terms))
        if terms is not None and any(bit > setting_bit for bit, setting_bit in zip(terms, self.setting)):
            raise InputError(f"terms = {terms!r}: expected some of the terms of setting {self.setting!r}")
        row, column = (position, 0) if self.axes == 1 else position
        x, keys, _ = self._as_maps(x, None, None)
        if not (0 <= row < x.shape[1] and 0 <= column < x.shape[2]):
            raise InputError(f"position = {position}: expected a pixel of the map of {x.shape[1]}x{x.shape[2]}")
        grid = self.grid(x.shape[1:3], keys.shape[1:3])
        one = x[:, row : row + 1, column : column + 1]
        query, key = operands.queries(one), operands.keys(keys, operands.saliency(keys))
        tables = operands.tables(grid)
        if tables:
            query["rows"] = tf.gather(tables["rows"], grid.rows.rows()[[row]], axis=1)
            key["columns"] = tf.gather(tables["columns"], grid.columns.rows()[[column]], axis=1)
        visible = grid.rows.visible()[[row]], grid.columns.visible()[[column]]
        weights = tf.nn.softmax(logits(query, key, visible))
        weights = tf.reshape(weights, [-1, weights.shape[1], *keys.shape[1:3]])
        return tf.broadcast_to(weights, [tf.shape(x)[0], self.heads, *keys.shape[1:3]])

    def factors(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        """dict of the factors of all logits of a map [1, h, w, C], for the terms of the layer's attention type.

        'query' [M, h, w, D], 'key' [M, Y, X, D] and 'scale' [M] for E1; 'query_rows' and 'query_columns' [M, R, D] for
        E2; 'saliency' [M, Y, X] for E3; 'rows' and 'columns' [M, R] for E4. Entry i of a table belongs to the i-th of
        the differences q - k (`Axis.differences`). E2 and E4 are sums of a row's and a column's logit.
        """
        x, keys, _ = self._as_maps(x, None, None)
        grid = self.grid(x.shape[1:3], keys.shape[1:3])
        content, query_position, key, position = (Operands(self, Terms.of(f"{8 >> i:04b}")) for i in range(4))
        factors = {}
        if self.terms.query_key:
            factors |= {"query": content.queries(x)["content"][0], "key": content.keys(keys, None)["key"][0]}
            factors["scale"] = tf.ones([self.heads])
        if self.terms.query_position:
            factors["query"] = query_position.queries(x)["position"][0]
            factors |= {f"query_{name}": table for name, table in query_position.tables(grid).items()}
        if self.terms.key:
            factors["saliency"] = key.saliency(keys)[0]
        return factors | (position.tables(grid) if self.terms.position else {})

    # === Decoding, a token at a time ===

    def new_cache(self, images: int | tf.Tensor, length: int) -> dict[str, tf.Tensor]:
        """The empty cache of self-attention over at most `length` tokens, as a dict of tensors [N, M, keys, 1, ...].

        With a key stride s, every s-th token is a key.

        Args:
            images: N.
            length: largest number of tokens.
        """
        length = -(-length // self.key_stride)
        empty = tf.zeros([images, self.heads, length, 1, self.depth], self.compute_dtype)
        cache = {"value": empty}
        if self.terms.query_key:
            cache["key"] = empty
        elif self.terms.key:
            cache["saliency"] = tf.zeros([images, self.heads, length, 1], wide(self.compute_dtype))
        return cache

    def memory_cache(self, keys: tf.Tensor, key_mask: Mask = None) -> dict[str, tf.Tensor]:
        """The cache of encoder-decoder attention over the keys [N, L, C]. `step` does not change it."""
        _, keys, key_mask = self._as_maps(keys, keys, key_mask)
        cache = Operands(self, self.terms).cached(keys)
        if key_mask is not None:
            cache["real"] = tf.cast(key_mask, wide(self.compute_dtype))[:, None]
        return cache

    def positions(self, length: int, keys: int | None = None) -> dict:
        """dict of the relative positions that `step` needs. The entries do not depend on the tokens.

        Args:
            length: largest number of decoded tokens.
            keys: number of keys; None if the tokens are the keys.
        """
        keys = -(-(length if keys is None else keys) // self.key_stride)
        grid = self.grid((length, 1), (keys, 1))
        return {"axis": grid.rows, **Operands(self, self.terms).tables(grid)}

    def step(self, x: tf.Tensor, index: int | tf.Tensor, cache: dict, positions: dict) -> tuple[tf.Tensor, dict]:
        """The output for the token at `index`, and the new cache.

        Args:
            x: [N, 1, C].
            index: int or int32 tensor: the number of earlier tokens.
            cache: a cache from `new_cache` or `memory_cache`.
            positions: from `positions`.

        Raises:
            InputError: the index is an int that is not below the length of the cache.
        """
        axis, operands = positions["axis"], Operands(self, self.terms)
        check_index(index, axis.queries)
        if self.causal:
            # A token that the key stride skips has the key index -1, at which `written` writes nothing.
            key_index = tf.where(index % axis.stride == 0, index // axis.stride, -1)
            new = operands.cached(x[:, :, None])
            cache = {name: written(cache[name], one, key_index, axis=2) for name, one in new.items()}
        row = index - axis.stride * tf.range(axis.keys) + axis.stride * (axis.keys - 1)
        query, key = operands.queries(x[:, :, None]), dict(cache)
        if "rows" in positions:
            query["rows"] = tf.gather(positions["rows"], row[None], axis=1)
            key["columns"] = tf.gather(positions["columns"], [[0]], axis=1)
        visible = tf.gather(tf.constant(axis.visible()), [index]), tf.ones([1, 1], tf.bool)
        y = join_heads(weigh(query, key, visible, 1))
        return self._from_map(self._project(y, x[:, :, None])), cache


@dataclasses.dataclass(frozen=True)
class Operands:
    """Computes the operands of a layer's terms from its weights; see `attention_terms.logits`.

    Attributes:
        layer: a built `GeneralizedAttention`.
        terms: `Terms`, all or some of the layer's terms.
    """

    layer: GeneralizedAttention
    terms: Terms

    def cast(self, x):
        return tf.cast(x, self.layer.compute_dtype)

    @property
    def scale(self):
        return self.layer.depth**-0.5 if self.layer.scaled else 1.0

    def saliency(self, keys):
        """The logits of E3, float32 or float64 [N, M, Y, X]. None without E3, or if the operands of E1 include E3."""
        if self.terms.query_key or not self.terms.key:
            return None
        kernel = tf.reshape(self.layer.key_kernel, [-1, self.layer.heads, self.layer.depth])
        kernel = tf.einsum("cmd,md->cm", kernel, self.layer.key_vector) * self.scale  # gives u . k without computing k
        return tf.transpose(widen(product(keys, self.cast(kernel))), [0, 3, 1, 2])

    def keys(self, keys, saliency):
        """The dict `key` of `attention_terms.logits`, without 'value'."""
        key = {} if saliency is None else {"saliency": saliency}
        if self.terms.query_key:
            key["key"] = split_heads(product(keys, self.cast(self.layer.key_kernel)), self.layer.heads)
        return key

    def queries(self, x):
        """The dict `query` of `attention_terms.logits`, without 'rows'."""

        def add(q, vector, used):  # q [N, M, h, w, D] plus u or v [M, D]
            return q + self.cast(vector * self.scale)[:, None, None] if used else q

        layer, terms, query = self.layer, self.terms, {}
        if terms.needs_query:
            q = split_heads(product(x, self.cast(layer.query_kernel)) * self.scale, layer.heads)
            if terms.query_key:
                query["content"] = add(q, layer.key_vector, terms.key)
            if terms.query_position:
                query["position"] = add(q, layer.position_vector, terms.position)
        return query

    def tables(self, grid):
        """dict of 'rows' and 'columns': the projected relative positions [M, R, D], or without E2 their logits [M, R].

        The dict is empty without E2 and E4.
        """
        if not self.terms.needs_position:
            return {}
        return {name: self._table(name, axis) for name, axis in (("rows", grid.rows), ("columns", grid.columns))}

    def _table(self, name, axis):
        layer, differences = self.layer, axis.differences()
        kernel, dtype = layer.position_kernels.get(name), wide(layer.compute_dtype)
        if kernel is None:  # a sequence has a single column
            table = tf.zeros([layer.heads, len(differences), layer.depth], dtype)
        else:
            codes = encode(differences, kernel.shape[0], layer.wavelength) * layer.axes**-0.5
            table = tf.matmul(tf.constant(codes, dtype), tf.cast(kernel, dtype))
            table = tf.transpose(tf.reshape(table, [-1, layer.heads, layer.depth]), [1, 0, 2])
        if self.terms.query_position:
            return self.cast(table)
        return tf.einsum("mrd,md->mr", table, tf.cast(layer.position_vector, dtype)) * self.scale

    def cached(self, keys):
        """The dict `key` of `attention_terms.logits` for the keys of a map with one column; see `new_cache`."""
        value = split_heads(product(keys, self.cast(self.layer.value_kernel)), self.layer.heads)
        return {**self.keys(keys, self.saliency(keys)), "value": value}
