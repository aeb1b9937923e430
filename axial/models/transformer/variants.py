"""Transformers of the spatial-attention study, for translation, one line each."""

import functools

from axial.models.base import Variant
from axial.models.transformer.network import Transformer, Translator

_translator = functools.partial(Variant.of, Translator, Transformer)


def _transformer(mechanism, window=None, memory="1111", deformable=False):
    """The base Transformer with a mechanism in encoder and decoder. Encoder-decoder attention has the type `memory`."""
    base = functools.partial(_translator, encoder=mechanism, decoder=mechanism, memory=memory, window=window)
    return base(encoder_deformable=deformable, decoder_deformable=deformable)


# A small Transformer, for Multi30k on a laptop.
_nano = functools.partial(_translator, layers=3, channels=128, inner=512, heads=4)

VARIANTS = {
    "transformer_base": _transformer("1111"),
    "transformer_base_0110": _transformer("0110"),
    "transformer_base_0010": _transformer("0010"),
    "transformer_base_memory_1010": _transformer("1111", memory="1010"),
    "transformer_base_dynamic": _transformer("dynamic", window=31),
    "transformer_base_deformable": _transformer("none", deformable=True),
    "transformer_base_1111_deformable": _transformer("1111", deformable=True),
    "transformer_base_0010_deformable": _transformer("0010", deformable=True),
    # Ours, for laptops and tests.
    "transformer_nano": _nano(encoder="1111"),
    "transformer_nano_0110": _nano(encoder="0110"),
    "transformer_nano_0010": _nano(encoder="0010"),
    "transformer_nano_dynamic": _nano(encoder="dynamic", window=15),
    "transformer_nano_deformable": _nano(encoder="none", encoder_deformable=True),
}
