"""Layers of the base Transformer with any mechanism as self-attention (Zhu et al., ICCV 2019, Fig. 2b and 2c).

    encoder:  x <- norm(x + self(x))                              x <- norm(x + feed_forward(x))
    decoder:  x <- norm(x + self(x))  x <- norm(x + memory(x))    x <- norm(x + feed_forward(x))

The normalisation follows the sum, as in Vaswani et al., 2017. self(x) is A(x), where A is generalised attention or
dynamic convolution. With `deformable`, self(x) is A(D(x)), where D is a deformable convolution of three taps. So
queries, keys and values all come from D(x). With `deformable` and no mechanism, self(x) is D(x). Without a mechanism
and `deformable`, the layer has no self-attention. memory(x) attends to the encoder's output.

Every decoder layer can also decode one token at a time, with `step`. `new_cache` and `constants` make its arguments.
"""

import tensorflow as tf
import tf_keras as keras

from axial.layers import random
from axial.layers.configured import Layer
from axial.layers.precision import wide, widen
from axial.layers.spatial_attention.attended import Mechanism
from axial.layers.spatial_attention.decoding import Mask, joined_masks
from axial.layers.spatial_attention.deformable_conv import DeformableConv1D
from axial.layers.spatial_attention.generalized_attention import TEXT, GeneralizedAttention

FULL = Mechanism("1111")


class Residual(Layer):
    """norm(x + dropout(y)). The layer normalisation is float32 under every precision except float64.

    Args:
        dropout: probability with which training zeroes an element of y.

    Raises:
        InputError: dropout is outside [0, 1).
    """

    def __init__(self, dropout=0.1, name=None):
        super().__init__(name=name)
        random.check_rate("dropout", dropout)
        self.dropout = dropout
        self.norm = keras.layers.LayerNormalization(epsilon=1e-6, dtype=wide(self.compute_dtype).name, name="norm")

    def call(self, x, y, training=False):
        if training and self.trainable and self.dropout:
            y = random.dropout(y, self.dropout)
        return tf.cast(self.norm(widen(x) + widen(y)), self.compute_dtype)


class FeedForward(Layer):
    """Two linear layers with a ReLU between them, [N, L, C] -> [N, L, C].

    Args:
        channels: C.
        inner: channels between the two layers.
    """

    def __init__(self, channels, inner, name=None):
        super().__init__(name=name)
        self.first = keras.layers.Dense(inner, activation="relu", dtype=self.dtype_policy, name="first")
        self.second = keras.layers.Dense(channels, dtype=self.dtype_policy, name="second")

    def call(self, x):
        return self.second(self.first(x))


class SelfAttention(Layer):
    """self(x) of the equations above, [N, L, C] -> [N, L, C].

    Args:
        channels: C.
        mechanism: `Mechanism`.
        deformable: whether a deformable convolution precedes the mechanism.
        causal: whether a token sees only itself and earlier tokens.
    """

    def __init__(self, channels, mechanism, deformable=False, causal=False, name=None):
        super().__init__(name=name)
        self.supports_masking = True
        self.units = {}
        if deformable:
            self.units["deformable"] = DeformableConv1D(channels, 3, causal, name="deformable")
        attention = mechanism.layer(causal=causal, **TEXT)
        if attention is not None:
            self.units["attention"] = attention

    def call(self, x, key_mask=None, training=False, mask=None):
        training, key_mask = training and self.trainable, joined_masks(key_mask, mask)
        for unit in self.units.values():
            x = unit(x, key_mask=key_mask, training=training)
        return x

    def new_cache(self, images, length):
        """The empty cache of `step`, for `length` tokens."""
        return {name: unit.new_cache(images, length) for name, unit in self.units.items()}

    def constants(self, length):
        """The arguments of `step` that depend only on the weights."""
        attention = self.units.get("attention")
        return attention.positions(length) if isinstance(attention, GeneralizedAttention) else {}

    def step(self, x, index, cache, constants):
        """(output, new cache) for the token x [N, 1, C] at `index`."""
        cache = dict(cache)
        for name, unit in self.units.items():
            more = (constants,) if isinstance(unit, GeneralizedAttention) else ()
            x, cache[name] = unit.step(x, index, cache[name], *more)
        return x, cache


class EncoderLayer(Layer):
    """A layer of the encoder.

    Args:
        channels: C.
        inner: channels inside the feed-forward layer.
        mechanism: `Mechanism` of the self-attention.
        deformable: whether a deformable convolution precedes the mechanism.
        dropout: dropout rate of each residual branch.

    Shapes:
        - x: [N, L, channels], L static
        - output: [N, L, channels]

    Examples:
        >>> from axial.layers import EncoderLayer
        >>> x = tf.ones([2, 9, 16])
        >>> y = EncoderLayer(16, 32)(x)
    """

    causal = False

    def __init__(
        self,
        channels: int = 512,
        inner: int = 2048,
        mechanism: Mechanism = FULL,
        deformable: bool = False,
        dropout: float = 0.1,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.attention = None
        if mechanism.name != "none" or deformable:
            self.attention = SelfAttention(channels, mechanism, deformable, self.causal, name="self")
            self.after_attention = Residual(dropout, name="after_attention")
        self.feed_forward = FeedForward(channels, inner, name="feed_forward")
        self.after_feed_forward = Residual(dropout, name="after_feed_forward")

    def call(self, x: tf.Tensor, key_mask: Mask = None, training: bool = False, mask: Mask = None) -> tf.Tensor:
        """The layer's output. `key_mask` and Keras' `mask` are bool [N, L], False for padding."""
        training, key_mask = training and self.trainable, joined_masks(key_mask, mask)
        x = self._attend(x, key_mask, training)
        return self.after_feed_forward(x, self.feed_forward(x), training=training)

    def _attend(self, x, key_mask, training):
        if self.attention is None:
            return x
        return self.after_attention(x, self.attention(x, key_mask=key_mask, training=training), training=training)


class DecoderLayer(EncoderLayer):
    """A layer of the decoder. A token sees itself, earlier tokens, and the encoder's output.

    Args:
        channels, inner, mechanism, deformable, dropout: see `EncoderLayer`.
        memory: `Mechanism` of the encoder-decoder attention. Only its name, an attention type, and its heads are used.

    Shapes:
        - x: [N, L, channels], L static
        - memory: [N, M, C], M static
        - output: [N, L, channels]

    Examples:
        >>> from axial.layers import DecoderLayer
        >>> tokens, memory = tf.ones([2, 9, 16]), tf.ones([2, 5, 16])
        >>> y = DecoderLayer(16, 32)(tokens, memory)
    """

    causal = True

    def __init__(
        self,
        channels: int = 512,
        inner: int = 2048,
        mechanism: Mechanism = FULL,
        deformable: bool = False,
        dropout: float = 0.1,
        *,
        memory: Mechanism = FULL,
        **kwargs,
    ):
        super().__init__(channels, inner, mechanism, deformable, dropout=dropout, **kwargs)
        self.memory = GeneralizedAttention(memory.name, memory.heads, name="memory", **TEXT)
        self.after_memory = Residual(dropout, name="after_memory")
        self._memory_shape = None

    def call(
        self, x: tf.Tensor, memory: tf.Tensor, memory_mask: Mask = None, training: bool = False, mask: Mask = None
    ) -> tf.Tensor:
        """The layer's output.

        Args:
            x: [N, L, C]. Padding comes last, so no other token sees it.
            memory: the encoder's output [N, M, C].
            memory_mask: bool [N, M], False for padded tokens of the memory; None if the memory has no padding.
            training: whether to apply dropout.
            mask: Keras' mask of x.
        """
        training = training and self.trainable
        x, memory = self._attend(x, mask, training), self.sized(memory, self._memory_shape or memory.shape)
        if memory.shape[1:].is_fully_defined():
            self._memory_shape = memory.shape
        attended = self.memory(x, keys=memory, key_mask=memory_mask, training=training)
        x = self.after_memory(x, attended, training=training)
        return self.after_feed_forward(x, self.feed_forward(x), training=training)

    def new_cache(self, memory: tf.Tensor, length: int, memory_mask: Mask = None) -> dict:
        """The cache of `step`, as a nested dict of tensors [N, ...].

        Args:
            memory, memory_mask: see `call`.
            length: largest number of tokens.
        """
        cache = {"memory": self.memory.memory_cache(memory, memory_mask)}
        if self.attention is not None:
            cache["self"] = self.attention.new_cache(tf.shape(memory)[0], length)
        return cache

    def constants(self, length: int, memory_length: int) -> dict:
        """The arguments of `step` that depend only on the weights."""
        attention = {} if self.attention is None else self.attention.constants(length)
        return {"self": attention, "memory": self.memory.positions(length, memory_length)}

    def step(self, x: tf.Tensor, index: int | tf.Tensor, cache: dict, constants: dict) -> tuple[tf.Tensor, dict]:
        """(output, new cache) for one token.

        Args:
            x: [N, 1, C].
            index: int or int32 tensor: the number of earlier tokens.
            cache: from `new_cache`.
            constants: from `constants`.

        Raises:
            InputError: the index is an int that is not below the length of the cache.
        """
        cache = dict(cache)
        if self.attention is not None:
            attended, cache["self"] = self.attention.step(x, index, cache["self"], constants["self"])
            x = self.after_attention(x, attended)
        attended, _ = self.memory.step(x, index, cache["memory"], constants["memory"])
        x = self.after_memory(x, attended)
        return self.after_feed_forward(x, self.feed_forward(x)), cache
