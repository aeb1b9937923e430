"""Position-sensitive axial attention (Wang et al., ECCV 2020, Eq. 4).

Along one axis of an image, for each head,

    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o} + k_p . r^k_{p-o}) (v_p + r^v_{p-o})

p runs over the whole axis, or over the keys with |p - o| <= span // 2. Batch norms normalise q, k and v, each of the
three logit terms (one scale for each head) and each of the two output terms (one scale for each channel).
"""

from axial.layers.attention.layer import Attention
from axial.layers.attention.reference import TERMS
from axial.layers.attention.spec import AttentionSpec
from axial.layers.attention.windows import AxisNeighborhood
from axial.layers.batch_norm import BatchNormConfig


class AxialAttention(Attention):
    """Multi-head position-sensitive attention along the height or the width of an image.

    The same weights work for every image size and every span, because the tables are indexed by p - o.

    Args:
        key_channels: channels of the queries, and of the keys, of all heads together.
        value_channels: channels of the values of all heads together, and of the output.
        axis: 'height' or 'width'.
        heads: number of heads; divides both channel counts.
        span: odd; a query sees the keys with |p - o| <= span // 2. None: the whole axis.
        terms: logit terms in use, of 'content', 'query', 'key'.
        value_position: whether r^v is in use.
        max_distance: the tables hold the offsets below it, 2 max_distance - 1 rows. Positions that are farther apart
            share the end rows.
        whole_up_to_span: whether a query sees the whole axis where that is not longer than the span.
        norm: `BatchNormConfig`.
        recompute, backend: see `Attention`.

    Shapes: [N, h, w, C] -> [N, h, w, value_channels]; h and w must be static.

    Raises:
        InputError: the span is even, the heads do not divide the channels, there is no logit term, or a name is
            unknown.

    Example:
        >>> layer = AxialAttention(64, 128, axis="width", span=65)
        >>> layer(tf.random.normal([1, 33, 129, 128])).shape
        TensorShape([1, 33, 129, 128])
    """

    def __init__(
        self,
        key_channels,
        value_channels,
        axis,
        heads=8,
        span=None,
        terms=TERMS,
        value_position=True,
        max_distance=255,
        whole_up_to_span=False,
        norm=BatchNormConfig(),
        recompute="none",
        backend="auto",
        **kwargs,
    ):
        neighborhood = AxisNeighborhood(axis, span, max_distance, whole_up_to_span)
        spec = AttentionSpec(
            neighborhood, key_channels, value_channels, heads, terms=terms, value_position=value_position
        )
        super().__init__(spec, norm, recompute=recompute, backend=backend, **kwargs)
