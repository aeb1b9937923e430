"""The mechanisms of the spatial-attention study as their equations are written (Zhu et al., ICCV 2019).

Every product that an equation has is one operation here, so that the operations of a traced graph can be counted.
Relative positions are materialised for every pair where E1 and E2 share one product, so only small maps can run. The
tests hold these forms to the layers.
"""

import numpy as np
import tensorflow as tf

from axial.layers.masking import MASKED
from axial.layers.spatial_attention.attention_terms import Terms, encode

WAVELENGTH = 1000.0  # of `GeneralizedAttention`


def weight_shapes(setting, channels, heads, axes=2, codes=None):
    """Shapes of the weights of generalised attention, by name.

    Args:
        setting: four bits.
        channels, heads: of the layer.
        axes: 2 for maps, 1 for sequences.
        codes: channels of the code of a relative position along each axis; channels / axes if None.
    """
    terms, square = Terms.of(setting), [channels, channels]
    shapes = {"value_kernel": square, "output_kernel": square, "output_bias": [channels]}
    if terms.needs_query:
        shapes["query_kernel"] = square
    if terms.needs_key:
        shapes["key_kernel"] = square
    if terms.needs_position:
        for name in ("row", "column")[:axes]:
            shapes[f"{name}_position_kernel"] = [codes or channels // axes, channels]
    if terms.key:
        shapes["key_vector"] = [heads, channels // heads]
    if terms.position:
        shapes["position_vector"] = [heads, channels // heads]
    return shapes


def generalized_attention(x, w, setting, *, heads, window=None):
    """Generalised attention of one map, Eq. 8.

    Letters of the shapes: N queries, K keys that a query sees, M heads, D channels of a head.

    Args:
        x: [H, W, C]; a sequence is [L, 1, C].
        w: dict of `weight_shapes`.
        setting: four bits.
        heads: M.
        window: rows and columns that a query sees; a sequence has one column. Keys outside the map are masked.

    Returns:
        [H, W, C].
    """
    terms = Terms.of(setting)
    height, width, channels = x.shape

    def project(name):
        y = tf.matmul(tf.reshape(x, [-1, channels]), w[name])
        return tf.reshape(y, [height, width, heads, channels // heads])

    places, logits = _Places(x.shape[:2], window), 0.0
    value = places.near(project("value_kernel"))
    key = places.near(project("key_kernel")) if terms.needs_key else None
    q = project("query_kernel") if terms.needs_query else None
    codes = places.project_codes(w, heads) if terms.needs_position else None
    if terms.query_key:
        place = places.pairs(codes) if terms.query_position else 0.0
        q = tf.reshape(q, [height * width, heads, -1])
        logits += (
            tf.einsum("nmd,nkmd->mnk", q, key + place)
            if key.shape[0] > 1 or terms.query_position
            else (tf.einsum("nmd,kmd->mnk", q, key[0]))
        )
    elif terms.query_position:
        logits += places.query_logits(q, codes)
    if terms.key:
        logits += tf.einsum("md,nkmd->mnk", w["key_vector"], key)
    if terms.position:
        logits += places.logits([tf.einsum("md,rmd->rm", w["position_vector"], code) for code in codes])
    weights = tf.nn.softmax(logits + places.mask())  # [M, N or 1, K]
    equation = "mnk,nkmd->nmd" if value.shape[0] > 1 else "mnk,kmd->nmd"
    y = tf.einsum(equation, weights, value if value.shape[0] > 1 else value[0])
    y = tf.broadcast_to(tf.reshape(y, [-1, channels]), [height * width, channels])
    return tf.reshape(tf.matmul(y, w["output_kernel"]) + w["output_bias"], [height, width, channels])


class _Places:
    """Which keys the queries of a map see, and their relative positions. Both are in raster order."""

    def __init__(self, size, window):
        self.size, self.window = size, window
        # A map with one column is a sequence, whose columns have no positions.
        self.axes = 1 if size[1] == 1 else 2
        self.index, self.differences = [], []  # of each axis: keys of each query, and the unique q - k
        for axis, n in enumerate(size):
            if window is None or axis >= self.axes:
                self.index.append(np.broadcast_to(np.arange(n), [n, n]))
                self.differences.append(np.arange(1 - n, n))
            else:
                self.index.append(np.arange(n)[:, None] + np.arange(window) - window // 2)
                self.differences.append(np.arange(-(window // 2), window // 2 + 1))

    def near(self, x):
        """[N or 1, K, M, D] of a map [Y, X, M, D]: the keys of every query, or of all queries alike."""
        if self.window is None:
            return tf.reshape(x, [1, -1, *x.shape[2:]])
        rows, columns = (np.clip(index, 0, n - 1) for index, n in zip(self.index, self.size))
        x = tf.gather(tf.gather(x, rows), columns, axis=2)  # [H, a, W, b, M, D]
        x = tf.transpose(x, [0, 2, 1, 3, 4, 5])
        return tf.reshape(x, [x.shape[0] * x.shape[1], -1, *x.shape[4:]])

    def mask(self):
        """[N or 1, K] to add to the logits: `MASKED` for keys outside the map."""
        if self.window is None:
            return 0.0
        inside = [(index >= 0) & (index < n) for index, n in zip(self.index, self.size)]
        inside = inside[0][:, None, :, None] & inside[1][None, :, None]
        return np.where(inside, 0.0, MASKED).reshape(inside.shape[0] * inside.shape[1], -1).astype(np.float32)

    def project_codes(self, w, heads):
        """The projected codes of the unique differences of each axis, [R, M, D]."""
        codes = []
        for name, differences in list(zip(("row", "column"), self.differences))[: self.axes]:
            kernel = w[f"{name}_position_kernel"]
            code = encode(differences, kernel.shape[0], WAVELENGTH) * self.axes**-0.5
            codes.append(tf.reshape(tf.matmul(tf.constant(code, kernel.dtype), kernel), [len(code), heads, -1]))
        return codes

    def _rows(self, axis):
        """[queries, keys]: which unique difference each pair of an axis has."""
        difference = np.arange(self.size[axis])[:, None] - self.index[axis]
        return difference - self.differences[axis][0]

    def pairs(self, codes):
        """[N, K, M, D]: the relative position of every pair."""
        code = tf.gather(codes[0], self._rows(0))[:, None, :, None]  # [H, 1, a, 1, M, D]
        if self.axes == 2:
            code = code + tf.gather(codes[1], self._rows(1))[None, :, None]
        return tf.reshape(code, [self.size[0] * self.size[1], -1, *code.shape[4:]])

    def query_logits(self, q, codes):
        """[M, N, K]: q . R, made for each axis on its own."""
        y = tf.einsum("hwmd,hamd->mhwa", q, tf.gather(codes[0], self._rows(0)))[..., None]
        if self.axes == 2:
            y = y + tf.einsum("hwmd,wbmd->mhwb", q, tf.gather(codes[1], self._rows(1)))[..., None, :]
        return tf.reshape(y, [y.shape[0], y.shape[1] * y.shape[2], -1])

    def logits(self, own):
        """[M, N, K] of the logits [R, M] of the differences themselves."""
        y = tf.gather(own[0], self._rows(0))[:, None, :, None]
        if self.axes == 2:
            y = y + tf.gather(own[1], self._rows(1))[None, :, None]
        return tf.transpose(tf.reshape(y, [self.size[0] * self.size[1], -1, y.shape[4]]), [2, 0, 1])


def dynamic_conv(x, w, *, kernel, groups):
    """Dynamic convolution of one map, Eq. 5 to 7.

    Args:
        x: [H, W, C]; a sequence is [L, 1, C].
        w: dict of the weights of `DynamicConv`, by name.
        kernel: rows and columns of the kernel; a sequence has one column.
        groups: of channels that share a kernel.
    """
    height, width, channels = x.shape
    value, gate = tf.split(tf.matmul(tf.reshape(x, [-1, channels]), w["input_kernel"]) + w["input_bias"], 2, 1)
    h = value * tf.sigmoid(gate)
    weights = tf.nn.softmax(tf.reshape(tf.matmul(h, w["tap_kernel"]), [height * width, groups, -1]))
    places = _Places((height, width), kernel)
    near = places.near(tf.reshape(h, [height, width, groups, channels // groups]))
    near = tf.where(tf.constant(places.mask() == 0)[..., None, None], near, 0.0)
    y = tf.reshape(tf.einsum("ngk,nkgc->ngc", weights, near), [-1, channels])
    return tf.reshape(tf.matmul(y, w["output_kernel"]) + w["output_bias"], x.shape)


def dynamic_shapes(channels, *, kernel, groups, axes=2):
    """Shapes of the weights of `DynamicConv`, by name."""
    return {
        "input_kernel": [channels, 2 * channels],
        "input_bias": [2 * channels],
        "tap_kernel": [channels, groups * kernel**axes],
        "output_kernel": [channels, channels],
        "output_bias": [channels],
    }
