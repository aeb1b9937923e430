"""The public layers. Import them from here: `from axial.layers import AxialAttention`.

Every layer is a tf_keras layer (`import tf_keras as keras`). The import of this package imports TensorFlow and all
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

from axial.errors import check_docstrings

check_docstrings()  # before TensorFlow is imported

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

__all__ = sorted(name for name, value in vars().items() if isinstance(value, type))
