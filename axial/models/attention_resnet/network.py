"""ResNet-50 with stand-alone local 2-D attention in place of its 3x3 convolutions."""

import dataclasses
import functools
import typing

import tensorflow as tf
import tf_keras as keras

from axial.layers.attention.layer import local_options
from axial.layers.batch_norm import BatchNorm, BatchNormConfig
from axial.layers.blocks import StridedLocalAttention
from axial.layers.configured import Layer
from axial.layers.device import BACKENDS
from axial.layers.precision import widen
from axial.models.resnet.network import ResNet, ResNetOptions, base_filters

SIDE = 4  # side of the stem's blocks, in pixels


class AttentionStem(Layer):
    """The spatially-varying attention stem (Ramachandran et al., Sec. 3.2), at stride 4.

    Each pixel attends to the 4x4 block that contains it. The value projection depends on the pixel's row a and column b
    in the block, and mixes four matrices W^m. row_a, column_b and nu^m are learned vectors:

        v_ab = sum_m softmax_m((row_a + column_b) . nu^m) W^m x_ab.

    The logits are q . k alone, because the values already depend on the position. A batch norm and a 4x4 max-pool
    with stride 4 follow. Zeros below and on the right pad an image whose sides are not multiples of 4.

    Args:
        filters: channels of queries, keys, values and output.
        norm: `BatchNormConfig`, or None for the folded layer.
        heads: number of heads.
        mixtures: number of matrices W^m.

    Shapes: [N, h, w, C] -> [N, ceil(h / 4), ceil(w / 4), filters].
    """

    def __init__(self, filters, norm, heads=8, mixtures=4, name=None):
        super().__init__(name=name)
        self.filters, self.heads, self.mixtures, self.norm = filters, heads, mixtures, norm
        if norm is not None:
            self.output_norm = BatchNorm(norm, name="output_norm")

    def build(self, shape):
        channels, filters = shape[-1], self.filters
        scaled = keras.initializers.VarianceScaling(1.0, "fan_in")
        self.kernel = self.add_weight("kernel", [channels, 2 * filters], initializer=scaled)
        normal = keras.initializers.TruncatedNormal  # a shared instance would give each weight the same numbers
        depth = filters // self.heads
        small = normal(stddev=channels**-0.5)
        self.values = self.add_weight("values", [self.mixtures, channels, filters], initializer=small)
        vectors = functools.partial(self.add_weight, experimental_autocast=False)
        self.row = vectors("row_embedding", [SIDE, depth], initializer=normal(stddev=1.0))
        self.column = vectors("column_embedding", [SIDE, depth], initializer=normal(stddev=1.0))
        self.mixture = vectors("mixture", [depth, self.mixtures], initializer=normal(stddev=1.0))
        if self.norm is None:
            self.bias = self.add_weight("bias", [filters])
        super().build(shape)

    def call(self, x, training=False):
        _, height, width, channels = x.shape
        rows, columns = -(-height // SIDE), -(-width // SIDE)
        x = tf.pad(x, [[0, 0], [0, rows * SIDE - height], [0, columns * SIDE - width], [0, 0]])
        x = tf.reshape(x, [-1, rows, SIDE, columns, SIDE, channels])
        x = tf.reshape(tf.transpose(x, [0, 1, 3, 2, 4, 5]), [-1, SIDE * SIDE, channels])  # [B, P, C]
        q, k = tf.split(tf.einsum("bpc,cf->bpf", x, self.kernel), 2, -1)
        v = tf.einsum("bpc,pcf->bpf", x, self.position_kernels())
        depth = self.filters // self.heads
        q, k, v = (tf.reshape(t, [-1, SIDE * SIDE, self.heads, depth]) for t in (q, k, v))
        logits = tf.einsum("bphd,bmhd->bhpm", q, k)
        weights = tf.cast(tf.nn.softmax(widen(logits)), v.dtype)
        y = tf.reshape(tf.einsum("bhpm,bmhd->bphd", weights, v), [-1, SIDE * SIDE, self.filters])
        y = y + self.bias if self.norm is None else self.output_norm(y, training=training and self.trainable)
        # The pool's window is the whole block.
        return tf.nn.relu(tf.reshape(tf.reduce_max(y, 1), [-1, rows, columns, self.filters]))

    def position_kernels(self):
        """[P, C, filters]: the value projection at each position in the block."""
        position = widen(tf.reshape(tf.expand_dims(self.row, 1) + self.column, [SIDE * SIDE, -1]))
        weights = tf.nn.softmax(tf.matmul(position, tf.cast(self.mixture, position.dtype)))  # [P, mixtures]
        values = tf.convert_to_tensor(self.values)
        return tf.einsum("pm,mcf->pcf", tf.cast(weights, values.dtype), values)

    def folded_weights(self):
        """Weights of the folded layer, whose norm is None."""
        if self.norm is None:
            return [tf.convert_to_tensor(w) for w in self.weights]
        scale, shift = self.output_norm.folded()
        return [self.kernel, self.values * scale, self.row, self.column, self.mixture, shift]


@dataclasses.dataclass(frozen=True)
class AttentionResNetOptions(ResNetOptions):
    """Options of `AttentionResNet`.

    Attributes:
        stem: see `make_stem`; 'attention' is `AttentionStem`, for Full Attention.
        span, heads, position_sensitive, batch_norm: see `LocalAttention`.
        backend: implementation of attention, one of `BACKENDS`. The TPU kernels support only axial attention.
    """

    stem: typing.Literal["imagenet", "deeplab", "attention"] = "imagenet"
    span: int = 7
    heads: int = 8
    position_sensitive: bool = False
    batch_norm: bool = True
    backend: typing.Literal[BACKENDS] = "auto"

    @property
    def attention(self):
        """`AttentionOptions` of every attention layer."""
        return local_options(self.span, self.heads, self.position_sensitive, self.recompute, backend=self.backend)


class AttentionResNet(ResNet):
    """ResNet-50 with `LocalAttention` in place of its 3x3 convolutions, with the same numbers of channels.

    Args:
        options: `AttentionResNetOptions`.
        norm: `BatchNormConfig`, or None for the folded network.

    Raises:
        InputError: the number of heads does not divide the channels at this width, or the span is even.
    """

    defaults = AttentionResNetOptions()

    def __init__(self, options=defaults, norm=BatchNormConfig(), name="backbone"):
        stride = SIDE if options.stem == "attention" else 2
        super().__init__(options, norm, base_filters(options.width, options.heads), stem_stride=stride, name=name)

    def make_stem(self):
        if self.options.stem == "attention":
            return AttentionStem(64, self.norm, self.options.heads, name="stem")
        return super().make_stem()

    def make_block(self, spec):
        attend = functools.partial(StridedLocalAttention, batch_norm=self.options.batch_norm, name="attention")
        return self.bottleneck(spec, attend(spec.filters, self.norm, spec.strides, self.options.attention))
