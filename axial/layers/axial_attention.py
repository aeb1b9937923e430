"""Position-sensitive axial attention (Axial-DeepLab, ECCV 2020, Eq. 4).

Along one axis of an image, for each head,

    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o} + k_p . r^k_{p-o}) (v_p + r^v_{p-o})

with a batch norm on q, k, v, on each of the three logit terms (one scale per head) and on each of
the two output terms (one scale per channel). p runs over the whole axis, or over the keys with
|p - o| <= span // 2.
"""

from axial.layers.attend import TERMS
from axial.layers.attention import Attention
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.windows import Windows


class AxialAttention(Attention):
    """Multi-head position-sensitive attention along the height or the width of an image.

    The same weights serve every image size and every span: tables are looked up by p - o.

    Args:
        key_channels: channels of the queries, and of the keys, of all heads together.
        value_channels: channels of the values of all heads together, and of the output.
        axis: 'height' or 'width'.
        heads: number of heads; divides both channel counts.
        span: odd; a query sees the keys with |p - o| <= span // 2. None: the whole axis.
        terms: logit terms in use, of 'content', 'query', 'key'.
        value_position: whether r^v is in use.
        max_distance: the tables hold offsets below it, 2 max_distance - 1 rows; positions farther
            apart share the end rows.
        norm: `BatchNormConfig`, or None for the folded layer: no batch norm, a bias on q, k and v,
            and fixed scales of the content term and of the position output.
        softmax: as of `attend`; "recompute" saves one map and costs a third of the products.

    Shapes: [N, h, w, C] -> [N, h, w, value_channels]; h and w must be static.

    Raises:
        ValueError: an even span, channels that heads do not divide, no logit term.

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
        norm=BatchNormConfig(),
        softmax="keep",
        **kwargs,
    ):
        if not terms or not set(terms) <= set(TERMS):
            raise ValueError(f"terms must be some of {TERMS}: got {terms}")
        Windows(1, 1, axis, span)  # refuses another axis and an even span

        def windows(height, width):
            return Windows(height, width, axis, self.span)

        self.axis, self.span, self.max_distance = axis, span, max_distance
        terms = tuple(t for t in TERMS if t in terms)
        uses = [t for t in terms if t != "content"] + ["value"] * value_position
        tables = {use: (2 * max_distance - 1, use, 1.0) for use in uses}
        super().__init__(key_channels, value_channels, heads, terms, tables, windows, norm, softmax=softmax, **kwargs)
