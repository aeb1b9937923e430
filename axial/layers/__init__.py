"""The public layers. Import them from here: `from axial.layers import AxialAttention`.

Every layer is a tf_keras layer (`import tf_keras as keras`). The import of the first layer imports TensorFlow and all
layers, so that tf_keras can find them when it loads a model. Letters of the shapes: N images or sentences, h x w
pixels, L or M tokens, C channels. A word in a shape, such as `filters`, is an argument of the constructor. An example:

    >>> import tensorflow as tf
    >>> import tf_keras as keras
    >>> from axial.layers import AxialAttention
    >>> x = keras.Input([9, 7, 16])
    >>> y = AxialAttention(16, 32, "height", heads=4)(x)
    >>> model = keras.Model(x, y)
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(tf.ones([2, 9, 7, 16]), tf.ones([2, *y.shape[1:]]), verbose=0)
"""

import importlib
import typing

from axial.errors import check_docstrings

if typing.TYPE_CHECKING:  # for type checkers: the names that `__getattr__` imports
    from axial.layers.attention.layer import AxialAttention as AxialAttention
    from axial.layers.attention.layer import LocalAttention as LocalAttention
    from axial.layers.batch_norm import BatchNorm as BatchNorm
    from axial.layers.batch_norm import BatchNormConfig as BatchNormConfig
    from axial.layers.blocks import AxialPair as AxialPair
    from axial.layers.blocks import BasicBlock as BasicBlock
    from axial.layers.blocks import Bottleneck as Bottleneck
    from axial.layers.blocks import StridedLocalAttention as StridedLocalAttention
    from axial.layers.conv import Conv as Conv
    from axial.layers.conv import SeparableConv as SeparableConv
    from axial.layers.spatial_attention.attended import Attended as Attended
    from axial.layers.spatial_attention.attended import AttendedMiddle as AttendedMiddle
    from axial.layers.spatial_attention.attended import Mechanism as Mechanism
    from axial.layers.spatial_attention.deformable_conv import DeformableConv as DeformableConv
    from axial.layers.spatial_attention.deformable_conv import DeformableConv1D as DeformableConv1D
    from axial.layers.spatial_attention.dynamic_conv import DynamicConv as DynamicConv
    from axial.layers.spatial_attention.generalized_attention import GeneralizedAttention as GeneralizedAttention
    from axial.layers.spatial_attention.transformer import DecoderLayer as DecoderLayer
    from axial.layers.spatial_attention.transformer import EncoderLayer as EncoderLayer

_MODULES = {
    "spatial_attention.attended": ("Attended", "AttendedMiddle", "Mechanism"),
    "attention.layer": ("AxialAttention", "LocalAttention"),
    "batch_norm": ("BatchNorm", "BatchNormConfig"),
    "blocks": ("AxialPair", "BasicBlock", "Bottleneck", "StridedLocalAttention"),
    "conv": ("Conv", "SeparableConv"),
    "spatial_attention.deformable_conv": ("DeformableConv", "DeformableConv1D"),
    "spatial_attention.dynamic_conv": ("DynamicConv",),
    "spatial_attention.generalized_attention": ("GeneralizedAttention",),
    "spatial_attention.transformer": ("DecoderLayer", "EncoderLayer"),
}
__all__ = sorted(name for names in _MODULES.values() for name in names)


def __getattr__(name: str) -> typing.Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_docstrings()
    for module, names in _MODULES.items():
        imported = importlib.import_module(f"{__name__}.{module}")
        globals().update({each: getattr(imported, each) for each in names})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
