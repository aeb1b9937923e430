"""Transformers of the spatial-attention study, for translation: a line each."""

import functools

from axial.models.base import Variant
from axial.models.transformer.network import Transformer, Translator


def _transformer(mechanism, window=None, **arguments):
    """The base Transformer with a mechanism in encoder and decoder; encoder-decoder attention has all four terms."""
    return Variant.of(Translator, Transformer, encoder=mechanism, decoder=mechanism, window=window, **arguments)


def _nano(mechanism, **arguments):
    """A small Transformer with a mechanism in its encoder, for Multi30k on a laptop."""
    size = {"layers": 3, "channels": 128, "inner": 512, "heads": 4}
    return Variant.of(Translator, Transformer, encoder=mechanism, **size, **arguments)


_deformable = functools.partial(_transformer, encoder_deformable=True, decoder_deformable=True)

VARIANTS = {
    "transformer_base": _transformer("1111"),
    "transformer_base_0110": _transformer("0110"),
    "transformer_base_0010": _transformer("0010"),
    "transformer_base_memory_1010": _transformer("1111", memory="1010"),
    "transformer_base_dynamic": _transformer("dynamic", window=31),
    "transformer_base_deformable": _deformable("none"),
    "transformer_base_1111_deformable": _deformable("1111"),
    "transformer_base_0010_deformable": _deformable("0010"),
    # Ours, for laptops and tests.
    "transformer_nano": _nano("1111"),
    "transformer_nano_0110": _nano("0110"),
    "transformer_nano_0010": _nano("0010"),
    "transformer_nano_dynamic": _nano("dynamic", window=15),
    "transformer_nano_deformable": _nano("none", encoder_deformable=True),
}
