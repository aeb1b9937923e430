"""Stand-alone local attention in two dimensions (Ramachandran et al., NeurIPS 2019), and Eq. 3.

A query o = (i, j) sees the keys p of the span x span square around it. For each head,

    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o}) v_p                                     (Eq. 2)
    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o} + k_p . r^k_{p-o}) (v_p + r^v_{p-o})       (Eq. 3)

where r_{p-o} is the sum of a row's and a column's vector, span of each, shared by the heads. The
letters of the shapes are those of `axial_attention`; L = h x w counts the pixels row by row.
"""

import tensorflow as tf

from axial.layers.attention import Attention
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.windows import SquareWindows, check_span

TERMS = {False: ("content", "query"), True: ("content", "query", "key")}


class LocalAttention(Attention):
    """Multi-head attention of every pixel to the square around it.

    The same weights serve every image size, also one smaller than the window.

    Args:
        key_channels: channels of the queries, and of the keys, of all heads together.
        value_channels: channels of the values of all heads together, and of the output.
        heads: number of heads; divides both channel counts.
        span: odd; rows and columns of the window.
        position_sensitive: Eq. 3; otherwise Eq. 2, with r^q alone.
        batch_norm: whether batch norms stand on q, k, v and on the logit terms. The one on the output,
            that of the 3x3 convolution whose place the layer takes, is always there.
        norm: `BatchNormConfig`, or None for the folded layer, as of `AxialAttention`.

    Shapes: [N, h, w, C] -> [N, h, w, value_channels]; h and w must be static.

    Raises:
        ValueError: an even span, channels that heads do not divide.

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
        **kwargs,
    ):
        check_span(span)
        self.span = span

        def windows(height, width):
            return SquareWindows(height, width, span)

        terms = TERMS[position_sensitive]
        uses = [t for t in terms if t != "content"] + ["value"] * position_sensitive
        tables = {f"{use}_{side}": (span, use, 0.5) for use in uses for side in ("row", "column")}
        super().__init__(key_channels, value_channels, heads, terms, tables, windows, norm, batch_norm, **kwargs)

    def lookup_tables(self):
        """dict of tables [span^2, D] at the offsets of `SquareWindows`, of those of the two axes."""

        def both(use):
            return tf.expand_dims(self.tables[f"{use}_row"], 1) + self.tables[f"{use}_column"]

        uses = {use for _, use, _ in self.table_shapes.values()}
        return {use: tf.reshape(both(use), [self.span**2, -1]) for use in sorted(uses)}
