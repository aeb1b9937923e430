"""ResNet-50 with stand-alone local 2-D attention in place of its 3x3 convolutions."""

import tensorflow as tf
import tf_keras as keras

from axial.io.check import check_choice
from axial.layers.batch_norm import BatchNorm, BatchNormConfig
from axial.layers.blocks import StridedLocalAttention
from axial.layers.configured import Layer, makes_layer
from axial.layers.precision import widen
from axial.layers.recompute import RECOMPUTE
from axial.models.resnet import ResNet, base_filters, bottlenecks, make_stem

SIDE = 4  # of the stem's blocks


class AttentionStem(Layer):
    """The spatially-varying attention stem (Ramachandran et al., Sec. 3.2), at stride 4.

    Each pixel attends to the 4x4 block that contains it. The projection of the values depends on the place in the
    block. It mixes four matrices W^m:

        v_ab = sum_m softmax_m((row_a + column_b) . nu^m) W^m x_ab.

    The logits are q . k alone, because the values already depend on the place. A batch norm and a 4x4 max-pool of
    stride 4 follow. Zeros below and on the right pad an image whose sides are not multiples of 4.

    Args:
        filters: channels of queries, keys, values and of the output.
        norm: `BatchNormConfig`, or None (folded).
        heads: number of heads.
        mixtures: number of matrices W^m.

    Shapes: [N, h, w, C] -> [N, ceil(h / 4), ceil(w / 4), filters].
    """

    def __init__(self, filters, norm, heads=8, mixtures=4, **kwargs):
        super().__init__(**kwargs)
        self.filters, self.heads, self.mixtures, self.norm = filters, heads, mixtures, norm
        if norm is not None:
            self.output_norm = BatchNorm(norm, dtype=self.dtype_policy, name="output_norm")

    def build(self, shape):
        channels, filters = shape[-1], self.filters
        scaled = keras.initializers.VarianceScaling(1.0, "fan_in")
        self.kernel = self.add_weight("kernel", [channels, 2 * filters], initializer=scaled)
        normal = keras.initializers.TruncatedNormal  # each weight needs its own instance: one repeats its numbers
        depth = filters // self.heads
        self.values = self.add_weight(
            "values", [self.mixtures, channels, filters], initializer=normal(stddev=channels**-0.5)
        )
        shapes = {"row_embedding": [SIDE, depth], "column_embedding": [SIDE, depth], "mixture": [depth, self.mixtures]}
        self.row, self.column, self.mixture = (
            self.add_weight(name, shape, initializer=normal(stddev=1.0), experimental_autocast=False)
            for name, shape in shapes.items()
        )
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
        v = tf.einsum("bpc,pcf->bpf", x, self.place_kernels())
        depth = self.filters // self.heads
        q, k, v = (tf.reshape(t, [-1, SIDE * SIDE, self.heads, depth]) for t in (q, k, v))
        logits = tf.einsum("bphd,bmhd->bhpm", q, k)
        weights = tf.cast(tf.nn.softmax(widen(logits)), v.dtype)
        y = tf.reshape(tf.einsum("bhpm,bmhd->bphd", weights, v), [-1, SIDE * SIDE, self.filters])
        y = y + self.bias if self.norm is None else self.output_norm(y, training=training and self.trainable)
        # The window of the pool is the block.
        return tf.nn.relu(tf.reshape(tf.reduce_max(y, 1), [-1, rows, columns, self.filters]))

    def place_kernels(self):
        """[P, C, filters]: the projection of the values at each place of the block."""
        place = widen(tf.reshape(tf.expand_dims(self.row, 1) + self.column, [SIDE * SIDE, -1]))
        share = tf.nn.softmax(tf.matmul(place, tf.cast(self.mixture, place.dtype)))  # [P, mixtures]
        values = tf.convert_to_tensor(self.values)
        return tf.einsum("pm,mcf->pcf", tf.cast(share, values.dtype), values)

    def folded_weights(self):
        """Values for the weights of the folded layer, which has norm None."""
        if self.norm is None:
            return [tf.convert_to_tensor(w) for w in self.weights]
        scale, shift = self.output_norm.folded()
        return [self.kernel, self.values * scale, self.row, self.column, self.mixture, shift]


@makes_layer
def attention_resnet(
    width=1.0,
    repeats=(3, 4, 6, 3),
    stem="imagenet",
    output_stride=32,
    span=7,
    heads=8,
    position_sensitive=False,
    batch_norm=True,
    drop_path=0.0,
    recompute="none",
    backend="auto",
    norm=BatchNormConfig(),
):
    """ResNet-50 with `LocalAttention` in place of its 3x3 convolutions, with as many channels.

    Args:
        width: multiplies the channels.
        repeats, output_stride, drop_path: see `ResNet`. Attention is never dilated.
        stem: see `axial_resnet`, or 'attention' for Full Attention: `AttentionStem`.
        span, heads, position_sensitive, batch_norm: see `LocalAttention`.
        recompute, backend: see `axial_resnet`. The TPU kernels support axial attention only.
        norm: `BatchNormConfig`, or None for the folded network.

    Raises:
        InputError: the heads do not divide the channels of this width, or a name is unknown.
    """
    filters = base_filters(width, heads)
    check_choice("recompute", recompute, RECOMPUTE)
    check_choice("stem", stem, ("imagenet", "deeplab", "attention"))
    attention = dict(span=span, heads=heads, position_sensitive=position_sensitive, batch_norm=batch_norm)
    attention |= dict(recompute=recompute, backend=backend)

    def middle(filters, *, strides, dilation, input_stride, dtype):
        del dilation, input_stride  # attention is never dilated
        return StridedLocalAttention(filters, norm, strides, attention, dtype=dtype, name="attention")

    if stem == "attention":
        first, stride = AttentionStem(64, norm, heads, name="stem"), SIDE
    else:
        first, stride = make_stem(stem, width, norm), 2
    frame = dict(repeats=repeats, output_stride=output_stride, drop_path=drop_path, name="backbone")
    return ResNet(first, bottlenecks(middle, norm, recompute), filters=filters, stem_stride=stride, **frame)
