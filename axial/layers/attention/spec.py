"""The sizes of an attention layer, shared by the layer that trains and the layer that serves."""

import dataclasses

import tf_keras as keras

from axial.errors import InputError
from axial.layers.attention.reference import TERMS
from axial.layers.attention.windows import NEIGHBORHOODS, AxisNeighborhood, SquareNeighborhood


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Channels, heads, terms and neighbourhood of an attention layer.

    Attributes:
        neighborhood: `AxisNeighborhood` or `SquareNeighborhood`.
        key_channels: channels of the queries, and of the keys, of all heads together.
        value_channels: channels of the values of all heads together, and of the output.
        heads: number of heads; divides both channel counts.
        terms: logit terms in use, of `TERMS`.
        value_position: whether r^v is in use.

    Raises:
        InputError: the heads do not divide the channels, there is no term, or a term is unknown.
    """

    neighborhood: AxisNeighborhood | SquareNeighborhood
    key_channels: int
    value_channels: int
    heads: int = 8
    terms: tuple = TERMS
    value_position: bool = True

    def __post_init__(self):
        if not self.terms or not set(self.terms) <= set(TERMS):
            raise InputError(f"terms must be some of {', '.join(TERMS)}: got {self.terms}")
        object.__setattr__(self, "terms", tuple(term for term in TERMS if term in self.terms))
        if self.heads < 1 or self.key_channels % self.heads or self.value_channels % self.heads:
            raise InputError(
                f"{self.heads} heads must divide key_channels and value_channels: "
                f"got {self.key_channels} and {self.value_channels}"
            )

    @property
    def sizes(self):
        """Channels of q, k and v."""
        return self.key_channels, self.key_channels, self.value_channels

    @property
    def uses(self):
        """What position tables are used for, of 'query', 'key' and 'value'."""
        return [term for term in self.terms if term != "content"] + ["value"] * self.value_position

    def windows(self, x):
        """The windows of an image [N, h, w, C]. Raises InputError unless h and w are static."""
        _, height, width, _ = x.shape
        if height is None or width is None:
            raise InputError(
                f"attention needs a static height and width: got {x.shape}; give the model an Input of a fixed size, "
                "and tf.data.Dataset.from_generator an output_signature"
            )
        return self.neighborhood.windows(height, width)

    def add_tables(self, layer):
        """Adds the position tables to a layer that is being built. Returns them as a dict by name."""
        tables = {}
        for (use, name), (rows, variance) in self.neighborhood.table_shapes(self.uses).items():
            depth = (self.value_channels if use == "value" else self.key_channels) // self.heads
            tables[name] = layer.add_weight(
                f"{name}_table",
                [rows, depth],
                initializer=keras.initializers.TruncatedNormal(stddev=(variance / depth) ** 0.5),
                experimental_autocast=False,
            )
        return tables

    def to_config(self):
        """A dict that JSON can hold, for `from_config`."""
        config = dataclasses.asdict(self)
        kinds = {kind: name for name, kind in NEIGHBORHOODS.items()}
        config["neighborhood"]["kind"] = kinds[type(self.neighborhood)]
        return config

    @classmethod
    def from_config(cls, config):
        """The spec from the result of `to_config`."""
        neighborhood = dict(config["neighborhood"])
        kind = NEIGHBORHOODS[neighborhood.pop("kind")]
        return cls(**{**config, "neighborhood": kind(**neighborhood), "terms": tuple(config["terms"])})
