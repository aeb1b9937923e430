"""The base Transformer with mechanisms of the spatial-attention study as its three attentions.

This is the Transformer of Vaswani et al., NeurIPS 2017, as Zhu et al., ICCV 2019, Sec. 4.1 use it. Sources, targets and
the last linear layer share one embedding, which is scaled by sqrt(C) where tokens are embedded. By default only the
mechanisms encode positions.
"""

import dataclasses
import functools
import typing

import numpy as np
import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.layers import random
from axial.layers.configured import Layer, Unfolded
from axial.layers.precision import wide, widen
from axial.layers.spatial_attention.attended import Mechanism
from axial.layers.spatial_attention.transformer import DecoderLayer, EncoderLayer
from axial.models.base import Network, NetworkOptions
from axial.models.outputs import LOGITS


@dataclasses.dataclass(frozen=True)
class TransformerOptions:
    """Options of `Transformer`.

    Attributes:
        layers: number of layers of the encoder, and of the decoder.
        channels: number C of channels of the embeddings and of each layer's output.
        inner: channels inside the feed-forward layers.
        heads: number of heads of generalised attention.
        encoder, decoder: names of the self-attentions' `Mechanism`s.
        memory: attention type of the encoder-decoder attention.
        encoder_deformable, decoder_deformable: whether a deformable convolution precedes the self-attention.
        window: size in tokens of dynamic convolution's kernel or of generalised self-attention's window; odd, or None.
        dropout: dropout rate of each residual branch.
    """

    layers: int = 6
    channels: int = 512
    inner: int = 2048
    heads: int = 8
    encoder: str = "1111"
    decoder: str = "1111"
    memory: str = "1111"
    encoder_deformable: bool = False
    decoder_deformable: bool = False
    window: int | None = None
    dropout: float = 0.1


class Transformer(Layer):
    """The layers of encoder and decoder, between the embedding and the last linear layer.

    Args:
        options: `TransformerOptions`.
        norm: unused, because a Transformer has no batch norm.

    Raises:
        InputError: a mechanism is invalid, or C is not a multiple of 16 and of the number of heads.
    """

    defaults = TransformerOptions()

    def __init__(self, options=defaults, norm=None, name="backbone"):
        super().__init__(name=name)
        channels, heads = options.channels, options.heads
        if channels % heads or channels % 16:
            raise InputError(f"channels = {channels}: expected a multiple of 16 and of the heads, {heads}")
        if not (memory := options.memory).isdecimal():
            raise InputError(f"memory = {memory!r}: expected four bits; only attention sees the encoder's output")
        self.channels = channels
        encoder = Mechanism(options.encoder, heads, window=options.window)
        decoder = Mechanism(options.decoder, heads, window=options.window)
        encode = functools.partial(EncoderLayer, channels, options.inner, encoder, options.encoder_deformable)
        decode = functools.partial(DecoderLayer, channels, options.inner, decoder, options.decoder_deformable)
        decode = functools.partial(decode, memory=Mechanism(memory, heads))
        layers = range(1, 1 + options.layers)
        self.encoder = [encode(options.dropout, name=f"encoder_{i}") for i in layers]
        self.decoder = [decode(options.dropout, name=f"decoder_{i}") for i in layers]

    def encode(self, x, mask, training=False):
        """Embedded source [B, S, C] and a mask of its real tokens, bool [B, S] -> [B, S, C]."""
        training = training and self.trainable
        for layer in self.encoder:
            x = layer(x, key_mask=mask, training=training)
        return x

    def call(self, x, memory, mask, training=False):
        """Embedded, shifted target [B, T, C] and the encoder's output [B, S, C] -> the decoder's output [B, T, C]."""
        training = training and self.trainable
        for layer in self.decoder:
            x = layer(x, memory, memory_mask=mask, training=training)
        return x

    # === Decoding, one token at a time ===

    def new_cache(self, memory, mask, length):
        """The cache of `step` for `length` tokens: nested dicts of tensors [B, ...]."""
        return {layer.name: layer.new_cache(memory, length, mask) for layer in self.decoder}

    def constants(self, length, memory_length):
        """Inputs of `step` that depend only on the weights."""
        return {layer.name: layer.constants(length, memory_length) for layer in self.decoder}

    def step(self, x, index, cache, constants):
        """(output, new cache) for the token x [B, 1, C] at position `index`."""
        cache = dict(cache)
        for layer in self.decoder:
            x, cache[layer.name] = layer.step(x, index, cache[layer.name], constants[layer.name])
        return x, cache


@dataclasses.dataclass(frozen=True)
class TranslatorOptions(NetworkOptions):
    """Options of `Translator`.

    Attributes:
        positions: 'sinusoid' adds the absolute positional encodings of Vaswani et al. to the embeddings. The study uses
            relative positions. The study does not say whether attention types without a relative term have absolute
            positions; with 'none' they have no positions.
        dropout: dropout rate of the embeddings.
    """

    positions: typing.Literal["none", "sinusoid"] = "none"
    dropout: float = 0.1


class Translator(Unfolded, Network):
    """Embedding, encoder, decoder, and a linear layer that shares the embedding's weights.

    Args:
        backbone: `Transformer`.
        num_classes: size of the vocabulary. Token 0 is padding and the decoder's first input.
        options: `TranslatorOptions`.

    Shapes: dict of 'source' int32 [B, S] and 'target' int32 [B, T] -> dict 'logits' float32 [B, T, num_classes]. The
        logits of a target token depend on the source and the target tokens before it.
    """

    task = title = hub = "translation"
    classes = 37000  # of WMT14 English-German
    input_row = ("source, target", "int32", "[N, length]", "tokens of the vocabulary, from 0 to C - 1; 0 is padding")
    output_stride = 1  # any length is valid

    defaults = TranslatorOptions()

    def __init__(self, backbone, num_classes, norm=None, options=defaults, name="translator"):
        super().__init__(backbone, num_classes, norm, options, name=name)
        random.check_rate("dropout", options.dropout)
        channels = backbone.channels
        # Keras autocasts weights only inside `call`. Without autocast, `translate` uses the same float32 weights.
        normal = keras.initializers.RandomNormal(stddev=channels**-0.5)
        size = [num_classes, channels]
        self.embedding = self.add_weight("embedding", size, initializer=normal, experimental_autocast=False)

    @staticmethod
    def signature(size, batch=1):
        """`tf.TensorSpec`s of a source and a target of `size[0]` tokens."""
        tokens = tf.TensorSpec([batch, size[0]], tf.int32)
        return {"source": tokens, "target": tokens}

    def call(self, inputs, training=False):
        training = training and self.trainable
        memory, mask = self.encode(inputs["source"], training)
        before = tf.pad(inputs["target"][:, :-1], [[0, 0], [1, 0]])
        x = self.backbone(self._embed(before, training=training), memory, mask, training=training)
        return {LOGITS: self._logits(x)}

    def encode(self, source, training=False):
        """int32 [B, S] -> the encoder's output [B, S, C], and a mask of the real tokens, bool [B, S]."""
        mask = tf.not_equal(source, 0)
        return self.backbone.encode(self._embed(source, training=training), mask, training), mask

    def _embed(self, ids, index=None, training=False):
        """Embeds token ids: [B, L] -> [B, L, C]. `index` is a single token's position; None for positions from 0."""
        x = tf.cast(tf.gather(self.embedding, ids), self.compute_dtype) * self.backbone.channels**0.5
        if self.options.positions == "sinusoid":
            positions = tf.range(ids.shape[1]) if index is None else index[None]
            x += tf.cast(sinusoids(positions, self.backbone.channels, wide(x.dtype)), x.dtype)
        return random.dropout(x, self.options.dropout) if training and self.options.dropout else x

    def _logits(self, x):
        x = widen(x)
        return tf.matmul(x, tf.cast(self.embedding, x.dtype), transpose_b=True)

    def folding_units(self):
        """list of the model itself, because the embedding is a weight of the model and of no sublayer."""
        return [self]

    # === Translation ===

    def translate(self, source, length, *, end, beams=4, alpha=0.6):
        """Translates sentences by beam search.

        Args:
            source: int32 [B, S], a static shape.
            length: largest number of tokens of a translation.
            end: the token that ends a sentence.
            beams: beam size, the number of unfinished translations that the search keeps.
            alpha: exponent of the length penalty ((5 + length) / 6)^alpha, which divides log probabilities (Wu et al.,
                2016, Eq. 14).

        Returns:
            int32 [B, length], the tokens, which are valid up to `end`, and float32 [B], their scores.
        """
        memory, mask = self.encode(source)
        cache = self.backbone.new_cache(memory, mask, length)
        constants = self.backbone.constants(length, source.shape[1])

        dtypes = tf.nest.map_structure(lambda x: x.dtype, cache)

        def step(ids, index, cache):  # the beam search needs float32 scores, and a cache of one dtype
            cache = tf.nest.map_structure(tf.cast, cache, dtypes)
            x, cache = self.backbone.step(self._embed(ids, index), index, cache, constants)
            logits = tf.cast(self._logits(x)[:, 0], tf.float32)
            return logits + tf.one_hot(0, self.num_classes, -1e6, 0.0), _float32(cache)  # padding is never predicted

        from official.nlp.modeling.ops.beam_search import sequence_beam_search

        start = tf.zeros([source.shape[0]], tf.int32)
        search = functools.partial(sequence_beam_search, max_decode_length=length, eos_id=end, padded_decode=True)
        ids, scores = search(step, start, _float32(cache), self.num_classes, beam_size=beams, alpha=alpha)
        return ids[:, 0, 1:], scores[:, 0]


def sinusoids(positions, channels, dtype=tf.float32):
    """Positional encodings of Vaswani et al., Sec. 3.5, all sines before all cosines: [L] -> [L, channels]."""
    rates = 10000.0 ** (-2 * np.arange(channels // 2) / channels)
    angles = tf.cast(positions, dtype)[:, None] * tf.constant(rates, dtype)
    return tf.concat([tf.sin(angles), tf.cos(angles)], 1)


def _float32(cache):
    return tf.nest.map_structure(lambda x: tf.cast(x, tf.float32), cache)
