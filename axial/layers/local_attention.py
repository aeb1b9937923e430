"""Stand-alone local attention in two dimensions (Ramachandran et al., NeurIPS 2019), and Axial-DeepLab's Eq. 3.

A query o = (i, j) sees the keys p of the span x span square around it. For each head,

    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o}) v_p                                     (Eq. 2)
    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o} + k_p . r^k_{p-o}) (v_p + r^v_{p-o})       (Eq. 3)

r_{p-o} is the sum of a vector for the row offset and a vector for the column offset. There are span vectors of each
kind, and all heads share them.
"""

from axial.layers.attention.layer import Attention
from axial.layers.attention.spec import AttentionSpec
from axial.layers.attention.windows import SquareNeighborhood
from axial.layers.batch_norm import BatchNormConfig

TERMS_OF = {False: ("content", "query"), True: ("content", "query", "key")}  # by `position_sensitive`


class LocalAttention(Attention):
    """Multi-head attention of every pixel to the square around it.

    The same weights work for every image size, even one smaller than the square.

    Args:
        key_channels: channels of the queries, and of the keys, of all heads together.
        value_channels: channels of the values of all heads together, and of the output.
        heads: number of heads; divides both channel counts.
        span: odd; rows and columns of the square.
        position_sensitive: True for Eq. 3; False for Eq. 2, which has r^q alone.
        batch_norm: whether there are batch norms on q, k, v and on the logit terms. The output always has a batch norm:
            it is that of the 3x3 convolution which the layer replaces.
        norm: `BatchNormConfig`.
        recompute, backend: see `Attention`. The TPU kernels support axial attention only.

    Shapes: [N, h, w, C] -> [N, h, w, value_channels]; h and w must be static.

    Raises:
        InputError: the span is even, the heads do not divide the channels, or a name is unknown.

    Example:
        >>> layer = LocalAttention(64, 64, position_sensitive=True)
        >>> layer(tf.random.normal([1, 33, 5, 128])).shape
        TensorShape([1, 33, 5, 64])
    """

    def __init__(
        self,
        key_channels,
        value_channels,
        heads=8,
        span=7,
        position_sensitive=False,
        batch_norm=True,
        norm=BatchNormConfig(),
        recompute="none",
        backend="auto",
        **kwargs,
    ):
        uses = dict(terms=TERMS_OF[position_sensitive], value_position=position_sensitive)
        spec = AttentionSpec(SquareNeighborhood(span), key_channels, value_channels, heads, **uses)
        super().__init__(spec, norm, batch_norm, recompute=recompute, backend=backend, **kwargs)
