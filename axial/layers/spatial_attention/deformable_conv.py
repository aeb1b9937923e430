"""Deformable convolution: every tap of the kernel has a learned offset that depends on the query's content.

The papers are Dai et al., ICCV 2017 (v1), Zhu et al., CVPR 2019 (v2, with a mask for each tap), and Zhu et al., ICCV
2019 (Eq. 4). At output pixel q, tap k samples the map at

    p_k = stride * q - padding + dilation * k + offset_k(q)

with bilinear interpolation and zeros outside the map. The output is y(q) = sum_k w_k mask_k x(p_k). A convolution of
the same map, whose kernel starts at zero, computes the offsets and the masks of v2. Offsets are float32 under every
precision except float64, and whole pixels are int32. So neither large maps nor int8 files round positions.

Two implementations give the same result. 'gather' reads the four neighbours of each position, in one gather per tap.
'hat' computes the weight of every input pixel, max(0, 1 - |p_y - y|) max(0, 1 - |p_x - x|), and sums the pixels by a
matrix product. 'hat' needs no gather, but one map of (output pixel, input pixel) pairs per tap. So 'hat' suits small
maps and accelerators.

Letters of the shapes: N images, a map of h x w pixels, an output of h' x w' = P pixels, K taps, O offset groups,
C channels.
"""

import functools

import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.io.check import check_choice
from axial.layers.batch_norm import BatchNorm, Norm
from axial.layers.configured import Initializer, Layer
from axial.layers.conv import run_nonempty
from axial.layers.precision import widen
from axial.layers.spatial_attention.decoding import Mask, check_index, check_odd, joined_masks, written

FORMS = ("gather", "hat")


def conv_size(size, kernel, strides, dilation, padding):
    """Size of an axis of a convolution's output."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // strides + 1


def tap_positions(offsets, kernel, strides, dilation, padding):
    """A pair (position without offset, offset) for rows and one for columns, int32 [P, K, 1] and float [N, P, K, O].

    Args:
        offsets: [N, h', w', 2 * K * O]. For each offset group and each tap, in row-major order, the channels hold a row
            offset and a column offset.
        kernel: (rows, columns) of the kernel.
        strides, dilation, padding: stride, dilation rate and padding of the convolution, the same for both axes.
    """
    _, height, width, channels = offsets.shape
    taps = kernel[0] * kernel[1]
    offsets = tf.reshape(widen(offsets), [-1, height * width, channels // (2 * taps), taps, 2])
    offsets = tf.transpose(offsets, [0, 1, 3, 2, 4])  # [N, P, K, O, 2]: TFLite slices at most five axes
    tap = tf.range(taps) // kernel[1] * dilation, tf.range(taps) % kernel[1] * dilation
    rows, columns = (tf.range(n)[:, None] * strides - padding + a for n, a in zip((height, width), tap))
    rows, columns = tf.repeat(rows, width, 0), tf.tile(columns, [height, 1])  # [P, K]
    return (rows[..., None], offsets[..., 0]), (columns[..., None], offsets[..., 1])


def neighbors(tap, offset, size, last=None):
    """(index, fraction) of positions. The weights of pixels `index` and `index` + 1 are 1 - `fraction` and `fraction`.

    An index far outside the axis is clipped to an index whose two pixels both lie outside the axis and are zero. At a
    whole number the gradient is the derivative from the right.

    Args:
        tap: int32 positions without offsets.
        offset: float32 or float64 offsets.
        size: number of pixels of the axis.
        last: int32, the largest allowed position; None for no limit. At this position the gradient is the derivative
            from the left, so no pixel after it has an influence.
    """
    below = tf.floor(offset)
    fraction = offset - below
    index = tap + tf.clip_by_value(tf.cast(below, tf.int32), -(2**30), 2**30)
    if last is not None:
        # Beyond the largest position, the second of the two pixels has all the weight.
        index = tf.minimum(index, last - 1)
        fraction = tf.minimum(offset - tf.cast(index - tap, offset.dtype), 1.0)
    return tf.clip_by_value(index, -2, size), fraction


def sample_by_gather(x, rows, columns):
    """list of the samples [N, P, C], one tensor per tap.

    The four neighbours of each position are first stored side by side, on a map padded with zeros. So each tap needs
    one gather, without bounds checks.

    Args:
        x: [N, h, w, C].
        rows, columns: pairs (index, fraction) of `neighbors`, int32 and float [N, P, K, O]. O divides C.
    """
    _, height, width, channels = x.shape
    (top, fraction_y), (left, fraction_x) = rows, columns
    _, pixels, taps, groups = top.shape
    padded = tf.pad(x, [[0, 0], [2, 2], [2, 2], [0, 0]])
    above, below = padded[:, :-1], padded[:, 1:]
    corners = tf.stack([above[:, :, :-1], above[:, :, 1:], below[:, :, :-1], below[:, :, 1:]], 3)
    corners = tf.reshape(corners, [-1, (height + 3) * (width + 3), 4, groups, channels // groups])
    index = (top + 2) * (width + 3) + left + 2
    across = [1 - fraction_x, fraction_x]
    weights = tf.stack([y * x for y in (1 - fraction_y, fraction_y) for x in across], 3)  # [N, P, K, 4, O]
    weights = tf.cast(weights, x.dtype)
    samples = []
    for tap in range(taps):
        values = [tf.gather(corners[:, :, :, g], index[:, :, tap, g], batch_dims=1) for g in range(groups)]
        values = tf.stack(values, 3) if groups > 1 else values[0][:, :, :, None]  # [N, P, 4, O, C / O]
        samples.append(tf.reshape(tf.reduce_sum(values * weights[:, :, tap][..., None], 2), [-1, pixels, channels]))
    return samples


def sample_by_hat(x, rows, columns):
    """The result of `sample_by_gather`, from matrix products with the weights of all pixels."""
    _, height, width, channels = x.shape
    _, pixels, taps, groups = rows[0].shape
    values = tf.reshape(x, [-1, height * width, groups, channels // groups])
    samples = []
    for tap in range(taps):
        group_samples = []
        for g in range(groups):
            sides = (*rows, height), (*columns, width)
            near_y, near_x = (_hat(low[:, :, tap, g], fraction[:, :, tap, g], n) for low, fraction, n in sides)
            weights = tf.reshape(near_y[..., None] * near_x[:, :, None], [-1, pixels, height * width])
            group_samples.append(tf.matmul(tf.cast(weights, x.dtype), values[:, :, g]))
        samples.append(tf.concat(group_samples, 2))
    return samples


def _hat(low, fraction, size):
    """[..., size]: the weights max(0, 1 - |position - i|) of all pixels of an axis."""
    low, fraction, pixel = low[..., None], fraction[..., None], tf.range(size)
    return tf.where(pixel == low, 1 - fraction, tf.where(pixel == low + 1, fraction, tf.zeros([], fraction.dtype)))


_SAMPLE = {"gather": sample_by_gather, "hat": sample_by_hat}


def add_taps(samples, kernel, masks=None):
    """sum_k mask_k x(p_k) w_k: [N, P, filters].

    Args:
        samples: list of the samples [N, P, C], one tensor per tap.
        kernel: [K, C / groups, filters]. The channels of a group are contiguous, and so are its filters.
        masks: [N, P, K, O], or None.
    """
    x = tf.stack(samples, 2)
    _, pixels, taps, channels = x.shape
    if masks is not None:
        offset_groups = masks.shape[3]
        x = tf.reshape(x, [-1, pixels, taps, offset_groups, channels // offset_groups])
        x = x * tf.cast(masks, x.dtype)[..., None]
    depth, filters = kernel.shape[1:]
    groups = channels // depth
    if groups == 1:
        return tf.matmul(tf.reshape(x, [-1, pixels, taps * channels]), tf.reshape(kernel, [taps * channels, filters]))
    x = tf.reshape(x, [-1, pixels, taps, groups, depth])
    y = tf.einsum("npkgc,kcgf->npgf", x, tf.reshape(kernel, [taps, depth, groups, filters // groups]))
    return tf.reshape(y, [-1, pixels, filters])


def deformable_conv(x, kernel, offsets, masks=None, *, strides=1, dilation=1, padding=0, form="gather"):
    """Deformable convolution with given offsets, without bias.

    Args:
        x: [N, h, w, C].
        kernel: [rows, columns, C / groups, filters].
        offsets: [N, h', w', 2 * K * O]; see `tap_positions`.
        masks: [N, h', w', K * O], or None for v1.
        strides, dilation, padding: stride, dilation rate and padding of the convolution, the same for both axes.
        form: one of `FORMS`.

    Returns:
        [N, h', w', filters].

    Raises:
        InputError: the size of the map is not static.
    """
    check_choice("form", form, FORMS)
    if None in x.shape[1:]:
        raise InputError(f"a deformable convolution needs static sizes: got {x.shape}")
    taps = kernel.shape[0] * kernel.shape[1]
    size = [conv_size(n, k, strides, dilation, padding=padding) for n, k in zip(x.shape[1:3], kernel.shape[:2])]
    groups = offsets.shape[3] // (2 * taps)
    if masks is not None:
        masks = tf.transpose(tf.reshape(masks, [-1, size[0] * size[1], groups, taps]), [0, 1, 3, 2])
    pairs = tap_positions(offsets, kernel.shape[:2], strides, dilation, padding=padding)
    samples = _SAMPLE[form](x, *(neighbors(*pair, n) for pair, n in zip(pairs, x.shape[1:3])))
    return tf.reshape(add_taps(samples, kernel_by_tap(kernel), masks), [-1, *size, kernel.shape[3]])


def kernel_by_tap(kernel):
    """[rows, columns, ...] -> [rows * columns, ...]."""
    return tf.reshape(kernel, [-1, *kernel.shape[2:]])


def add_offset_weights(layer, shape, factor):
    """Adds the offsets' kernel and bias, both zero, to a layer that is being built. Returns both.

    The learning rate of both is `factor` times the optimizer's learning rate (see `axial.training.optimizers`). Dai et
    al., ICCV 2017, use 0.1.
    """
    zeros = functools.partial(layer.add_weight, initializer="zeros", experimental_autocast=False)
    weights = zeros("offset_kernel", shape), zeros("offset_bias", shape[-1:])
    for weight in weights:
        weight.learning_rate_factor = factor
    return weights


# The factor of the sigmoid that turns a logit into a mask. With 2.0 a mask starts at 1, as in a plain convolution.
MODULATIONS = {"none": None, "sigmoid": 1.0, "twice_sigmoid": 2.0}


class DeformableConv(Layer):
    """Deformable convolution, batch norm, ReLU.

    Args:
        filters: output channels.
        kernel: odd side of the kernel.
        norm: `BatchNormConfig`, or None for a bias in place of the batch norm.
        strides, dilation: stride and dilation rate of the convolution and of the convolution that computes the offsets.
        groups: number of groups of the convolution, a divisor of the numbers of channels and of filters.
        offset_groups: number of groups of channels with separate offsets, a divisor of the number of channels.
        modulation: one of `MODULATIONS`. 'none' is v1. The other values are v2.
        padding: pixels on each side; None for (kernel - 1) / 2 times the dilation, which keeps the size.
        relu, use_bias, kernel_initializer: see `Conv`.
        offset_rate: factor of the learning rate of the offsets' convolution; see `add_offset_weights`.
        form: one of `FORMS`.

    Shapes:
        - x: [N, h, w, C], h and w static
        - output: [N, ceil(h / strides), ceil(w / strides), filters] with the default padding

    Raises:
        InputError: the kernel is even, groups do not divide channels, or a name is unknown.

    Examples:
        >>> layer = DeformableConv(16, 3, None, strides=2)
        >>> layer(tf.random.normal([1, 9, 7, 8])).shape
        TensorShape([1, 5, 4, 16])
    """

    def __init__(
        self,
        filters: int,
        kernel: int,
        norm: Norm,
        strides: int = 1,
        dilation: int = 1,
        groups: int = 1,
        offset_groups: int = 1,
        modulation: str = "none",
        padding: int | None = None,
        relu: bool = True,
        use_bias: bool = True,
        offset_rate: float = 0.1,
        kernel_initializer: Initializer = "he_normal",
        form: str = "gather",
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_odd("kernel", kernel)
        check_choice("modulation", modulation, MODULATIONS)
        check_choice("form", form, FORMS)
        if groups < 1 or filters % groups:
            raise InputError(f"groups = {groups}: expected a divisor of the {filters} filters")
        self.filters, self.side, self.strides, self.dilation = filters, kernel, strides, dilation
        self.groups, self.offset_groups, self.modulation = groups, offset_groups, modulation
        self.padding = dilation * (kernel - 1) // 2 if padding is None else padding
        self.relu, self.use_bias, self.offset_rate, self.form = relu, use_bias, offset_rate, form
        self.kernel_initializer = kernel_initializer
        self.norm = None if norm is None else BatchNorm(norm, name="norm")

    def build(self, shape: tf.TensorShape) -> None:
        channels, taps = shape[-1], self.side**2
        for name, count in (("groups", self.groups), ("offset_groups", self.offset_groups)):
            if count < 1 or channels % count:
                raise InputError(f"{name} = {count}: expected a divisor of the {channels} channels")
        window = [self.side, self.side]
        size = [*window, channels // self.groups, self.filters]
        self.kernel = self.add_weight("kernel", size, initializer=self.kernel_initializer)
        has_bias = self.norm is None and self.use_bias
        self.bias = self.add_weight("bias", [self.filters], initializer="zeros") if has_bias else None
        offsets = [*window, channels, taps * self.offset_groups * (2 if self.modulation == "none" else 3)]
        self.offset_kernel, self.offset_bias = add_offset_weights(self, offsets, self.offset_rate)
        super().build(shape)

    def offsets(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """(offsets, masks) of a map: [N, h', w', 2 * K * O], and [N, h', w', K * O] or None for v1."""
        if self.padding:
            x = tf.pad(x, [[0, 0], [self.padding] * 2, [self.padding] * 2, [0, 0]])
        with tf.name_scope("offsets"):
            kernel = tf.cast(self.offset_kernel, x.dtype)
            y = run_nonempty(lambda x: tf.nn.conv2d(x, kernel, self.strides, "VALID", dilations=self.dilation), x)
        y = widen(y)
        y += tf.cast(self.offset_bias, y.dtype)
        if self.modulation == "none":
            return y, None
        offsets, masks = tf.split(y, [y.shape[3] * 2 // 3, y.shape[3] // 3], 3)
        return offsets, MODULATIONS[self.modulation] * tf.sigmoid(masks)

    def factors(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        """dict of what the taps sample of a map [1, h, w, C]: 'sample_rows' and 'sample_columns', positions on the map,
        and 'masks', which are 1 for v1; each [O, P, K].
        """
        offsets, masks = self.offsets(self.sized(x))
        pairs = tap_positions(offsets, [self.side] * 2, self.strides, dilation=self.dilation, padding=self.padding)
        rows, columns = (tf.transpose((tf.cast(tap, offset.dtype) + offset)[0], [2, 0, 1]) for tap, offset in pairs)
        if masks is None:
            masks = tf.ones_like(rows)
        else:
            masks = tf.transpose(tf.reshape(masks, [-1, self.offset_groups, self.side**2]), [1, 0, 2])
        return {"sample_rows": rows, "sample_columns": columns, "masks": masks}

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = self.sized(x)
        offsets, masks = self.offsets(x)
        conv = functools.partial(deformable_conv, strides=self.strides, dilation=self.dilation, padding=self.padding)
        y = conv(x, tf.cast(self.kernel, x.dtype), offsets, masks, form=self.form)
        if self.bias is not None:
            y += tf.cast(self.bias, y.dtype)
        if self.norm is not None:
            y = self.norm(y, training=training and self.trainable)
        return tf.nn.relu(y) if self.relu else y

    @property
    def added_weights(self) -> list[tf.Variable]:
        """The weights that a regular convolution does not have; see `weights.restore.initialize`."""
        return [self.offset_kernel, self.offset_bias]

    def folded_weights(self) -> list[tf.Tensor]:
        """The values of the weights of the folded layer, a `DeformableConv` with the same arguments and norm None."""
        if self.norm is None:
            return [tf.convert_to_tensor(w) for w in self.weights]
        scale, shift = self.norm.folded()
        return [self.kernel * scale, shift, *(tf.convert_to_tensor(w) for w in (self.offset_kernel, self.offset_bias))]


class DeformableConv1D(Layer):
    """Deformable convolution of a sequence, without bias.

    Args:
        filters: output channels.
        kernel: odd number of taps.
        causal: whether no tap of a token, and no position where a tap samples, lies after this token. If True, the
            gradient of an output with respect to a later token is exactly zero, also through the offsets.
        offset_rate, form: see `DeformableConv`.

    Shapes:
        - x: [N, L, C], L static
        - output: [N, L, filters]

    Raises:
        InputError: the kernel is even, or a name is unknown.

    Examples:
        >>> from axial.layers import DeformableConv1D
        >>> x = tf.ones([2, 9, 16])
        >>> y = DeformableConv1D(8)(x)
    """

    def __init__(
        self,
        filters: int,
        kernel: int = 3,
        causal: bool = False,
        offset_rate: float = 0.1,
        form: str = "gather",
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_odd("kernel", kernel)
        check_choice("form", form, FORMS)
        self.supports_masking = True
        self.filters, self.taps, self.causal = filters, kernel, causal
        self.offset_rate, self.form = offset_rate, form
        self.before = kernel - 1 if causal else kernel // 2

    def build(self, shape: tf.TensorShape) -> None:
        scaled = keras.initializers.VarianceScaling(1.0, "fan_in", "uniform")
        self.kernel = self.add_weight("kernel", [self.taps, shape[-1], self.filters], initializer=scaled)
        offsets = [self.taps, shape[-1], self.taps]
        self.offset_kernel, self.offset_bias = add_offset_weights(self, offsets, self.offset_rate)
        super().build(shape)

    def call(self, x: tf.Tensor, key_mask: Mask = None, training: bool = False, mask: Mask = None) -> tf.Tensor:
        """The convolution of x. Tokens count as zero where `key_mask` [N, L] or Keras' `mask` is False."""
        del training
        key_mask = joined_masks(key_mask, mask)
        x = self.sized(x)
        if x.shape[1] is None:
            raise InputError(f"a deformable convolution needs a static length: got {x.shape}")
        if key_mask is not None:
            x = tf.where(key_mask[..., None], x, tf.zeros([], x.dtype))
        padded = tf.pad(x, [[0, 0], [self.before, self.taps - 1 - self.before], [0, 0]])
        near = tf.stack([padded[:, i : i + x.shape[1]] for i in range(self.taps)], 2)  # [N, L, K, C]
        return self._convolve(x, near, tf.range(x.shape[1]))

    def _convolve(self, x, near, tokens):
        """The outputs at the token indices `tokens` [P]. The inputs `near` [N, P, K, C] determine the offsets."""
        with tf.name_scope("offsets"):
            offsets = tf.einsum("npkc,kcj->npj", near, tf.cast(self.offset_kernel, x.dtype))
        offsets = widen(offsets)
        offsets += tf.cast(self.offset_bias, offsets.dtype)  # [N, P, K]
        taps = tokens[:, None] + tf.range(self.taps) - self.before  # [P, K]
        index, fraction = neighbors(taps, offsets, x.shape[1], tokens[:, None] if self.causal else None)
        rows = index[..., None], fraction[..., None]
        columns = tuple(tf.zeros_like(a) for a in rows)
        samples = _SAMPLE[self.form](x[:, :, None], rows, columns)
        return add_taps(samples, tf.cast(self.kernel, x.dtype))

    # === Decoding, a token at a time ===

    def new_cache(self, images: int | tf.Tensor, length: int) -> dict[str, tf.Tensor]:
        """The empty cache of a built layer, {'inputs': [N, L, C]}. `step` stores each token in it."""
        return {"inputs": tf.zeros([images, length, self.kernel.shape[1]], self.compute_dtype)}

    def step(self, x: tf.Tensor, index: int | tf.Tensor, cache: dict) -> tuple[tf.Tensor, dict]:
        """The output for the token x [N, 1, C] at `index`, and the new cache.

        Raises:
            InputError: the index is an int that is not below the length of the cache.
        """
        length = cache["inputs"].shape[1]
        check_index(index, length)
        inputs = written(cache["inputs"], x, index)
        padded = tf.pad(inputs, [[0, 0], [self.before, 0], [0, 0]])
        near = tf.gather(padded, index + tf.range(self.taps), axis=1)[:, None]
        return self._convolve(inputs, near, tf.cast([index], tf.int32)), {"inputs": inputs}
