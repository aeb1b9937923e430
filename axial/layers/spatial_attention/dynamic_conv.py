"""Dynamic convolution: each query computes a depthwise kernel (Wu et al., ICLR 2019; Zhu et al., ICCV 2019).

    h = GLU(x W_in)                         value times the sigmoid of the gate
    K(q) = softmax over the taps of h_q W_k, one kernel for each group of channels
    y(q) = (sum_j K_j(q) h(q + p_j)) W_out

h is zero outside the map and at padded tokens. The softmax includes the taps at these positions, so these taps reduce
the output, as in the published code.

Letters of the shapes: N images, L tokens or h x w pixels, G groups, T taps along an axis, C channels.
"""

import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.layers.configured import Layer, Unfolded
from axial.layers.precision import widen
from axial.layers.spatial_attention.decoding import Mask, check_axes, check_index, check_odd, joined_masks, written

GROUPS = 16


def convolve_line(h, weights, before):
    """sum_j weights_j h(q + j - before), as a product of the sequence with a band matrix.

    Args:
        h: [N, L, C].
        weights: [N, L, G, T]. The channels of a group are contiguous.
        before: number of taps before the query.

    Returns:
        [N, L, C].
    """
    _, length, groups, _ = weights.shape
    h = tf.reshape(h, [-1, length, groups, h.shape[2] // groups])
    band = _band(tf.transpose(weights, [0, 2, 1, 3]), before)
    return tf.reshape(tf.einsum("nglx,nxgc->nlgc", band, h), [-1, length, groups * h.shape[3]])


def convolve_map(h, weights):
    """sum_j weights_j h(q + p_j) on a map. Each row of taps is one product of all rows of pixels with band matrices.

    Args:
        h: [N, h, w, C].
        weights: [N, h, w, G, T * T].

    Returns:
        [N, h, w, C].
    """
    _, height, width, groups, taps = weights.shape
    side = round(taps**0.5)
    reach, depth = side // 2, h.shape[3] // groups
    padded = tf.reshape(h, [-1, height, width, groups, depth])
    padded = tf.pad(padded, [[0, 0], [reach, reach], [0, 0], [0, 0], [0, 0]])
    weights = tf.transpose(weights, [0, 1, 3, 2, 4])  # [N, h, G, w, T * T]
    total = 0.0
    for row in range(max(0, reach - height + 1), min(side, reach + height)):  # all other rows of taps see only zeros
        band = _band(weights[..., row * side : (row + 1) * side], reach)
        total += tf.einsum("nhgwx,nhxgc->nhwgc", band, padded[:, row : row + height])
    return tf.reshape(total, [-1, height, width, groups * depth])


def _band(weights, before):
    """[..., w, T] -> [..., w, w]: row i holds the T weights of query i from column i - before on, cut at the borders.

    Rows are padded to w + T numbers and read as rows of w + T - 1 numbers. So each row is shifted by one column more
    than the row before it.
    """
    *lead, width, taps = weights.shape
    lead = [-1, *lead[1:]]
    padded = tf.pad(weights, [[0, 0]] * (weights.shape.rank - 1) + [[0, width]])
    flat = tf.reshape(padded, [*lead, width * (width + taps)])[..., : width * (width + taps - 1)]
    return tf.reshape(flat, [*lead, width, width + taps - 1])[..., before : before + width]


class DynamicConv(Unfolded, Layer):
    """Dynamic convolution of a map or a sequence, with its GLU and its linear layers.

    Args:
        kernel: odd number of taps along each axis, which may exceed the length of the sequence.
        groups: number of groups of channels that share a kernel, a divisor of the number of channels.
        axes: 2 for maps, 1 for sequences.
        causal: whether the taps of a token are only at this token and at earlier tokens.

    Shapes:
        - x: [N, h, w, C] or [N, L, C]; h, w and L static
        - output: [N, h, w, C] or [N, L, C]

    Raises:
        InputError: the kernel is even, the groups do not divide the channels, or a map is causal.

    Examples:
        >>> layer = DynamicConv(7, groups=4, axes=1)
        >>> layer(tf.random.normal([2, 5, 8])).shape
        TensorShape([2, 5, 8])
    """

    def __init__(self, kernel: int = 3, groups: int = GROUPS, axes: int = 2, causal: bool = False, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        check_odd("kernel", kernel)
        check_axes(axes, causal)
        self.side, self.groups, self.axes, self.causal = kernel, groups, axes, causal
        self.before = kernel - 1 if causal else kernel // 2

    def build(self, shape: tf.TensorShape) -> None:
        channels = shape[-1]
        if self.groups < 1 or channels % self.groups:
            raise InputError(f"groups = {self.groups}: expected a divisor of the {channels} channels")

        def weight(name, size, initializer=None):
            return self.add_weight(name, size, initializer=initializer or keras.initializers.GlorotUniform())

        taps = self.groups * self.side**self.axes
        self.input_kernel = weight("input_kernel", [channels, 2 * channels])
        self.input_bias = weight("input_bias", [2 * channels], "zeros")
        self.tap_kernel = weight("tap_kernel", [channels, taps])
        self.output_kernel = weight("output_kernel", [channels, channels])
        self.output_bias = weight("output_bias", [channels], "zeros")
        super().build(shape)

    def call(self, x: tf.Tensor, key_mask: Mask = None, training: bool = False, mask: Mask = None) -> tf.Tensor:
        """The convolution of x. Tokens or pixels count as zero where `key_mask` or Keras' `mask` is False."""
        del training
        key_mask = joined_masks(key_mask, mask)
        x = self.sized(x)
        if None in x.shape[1:]:
            raise InputError(f"a dynamic convolution needs static sizes: got {x.shape}")
        h = self._gated(x)
        weights = self.kernels(h)
        if key_mask is not None:
            h = tf.where(key_mask[..., None], h, tf.zeros([], h.dtype))
        y = convolve_line(h, weights, self.before) if self.axes == 1 else convolve_map(h, weights)
        return _linear(y, self.output_kernel, self.output_bias)

    def _gated(self, x):
        value, gate = tf.split(_linear(x, self.input_kernel, self.input_bias), 2, -1)
        return value * tf.sigmoid(gate)

    def kernels(self, h: tf.Tensor) -> tf.Tensor:
        """The kernel of every query, [..., G, taps], in h's dtype. The softmax is float32 or float64."""
        logits = widen(_linear(h, self.tap_kernel))
        logits = tf.reshape(logits, [-1, *h.shape[1:-1], self.groups, self.side**self.axes])
        return tf.cast(tf.nn.softmax(logits), h.dtype)

    # === Decoding, a token at a time ===

    def new_cache(self, images: int | tf.Tensor, length: int) -> dict[str, tf.Tensor]:
        """The empty cache of a built layer, {'gated': [N, L, C]}. `step` stores h of each token in it."""
        return {"gated": tf.zeros([images, length, self.output_kernel.shape[0]], self.compute_dtype)}

    def step(self, x: tf.Tensor, index: int | tf.Tensor, cache: dict) -> tuple[tf.Tensor, dict]:
        """The output for the token x [N, 1, C] at `index`, and the new cache.

        Raises:
            InputError: the index is an int that is not below the length of the cache.
        """
        check_index(index, cache["gated"].shape[1])
        h = self._gated(x)
        gated = written(cache["gated"], h, index)
        near = tf.gather(tf.pad(gated, [[0, 0], [self.before, 0], [0, 0]]), index + tf.range(self.side), axis=1)
        near = tf.reshape(near, [-1, self.side, self.groups, h.shape[2] // self.groups])
        y = tf.einsum("nlgt,ntgc->nlgc", self.kernels(h), near)
        return _linear(tf.reshape(y, tf.shape(h)), self.output_kernel, self.output_bias), {"gated": gated}


def _linear(x, kernel, bias=None):
    """x [..., C] times a kernel [C, D], plus a bias."""
    kernel = tf.cast(kernel, x.dtype)
    y = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), kernel)
    y = tf.reshape(y, [-1, *x.shape[1:-1], kernel.shape[1]])
    return y if bias is None else y + tf.cast(bias, y.dtype)
