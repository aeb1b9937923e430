"""The attended residual block (Zhu et al., ICCV 2019, Fig. 2a): attention after the 3x3 convolution of a bottleneck.

    1x1 -> 3x3 (regular, deformable or none) -> x + gamma A(x) -> 1x1 -> + shortcut

A is a mechanism: dynamic convolution, or generalised attention, which is named by its attention type, such as '0110'.
gamma is one learned number that starts at zero, so the block starts as a residual block without A. The 3x3 convolution
has the stride.
"""

import dataclasses
import functools

import tensorflow as tf

from axial.errors import InputError, nearest
from axial.io.check import check_choice
from axial.layers.batch_norm import Norm
from axial.layers.configured import Layer, Unfolded
from axial.layers.conv import Conv, subsample
from axial.layers.spatial_attention.deformable_conv import DeformableConv
from axial.layers.spatial_attention.dynamic_conv import DynamicConv
from axial.layers.spatial_attention.generalized_attention import VISION, GeneralizedAttention

SPATIAL = ("regular", "deformable", "none")  # kinds of the 3x3 convolution
NAMED = ("dynamic", "none")  # the mechanisms that are not attention types of generalised attention


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """The options of an attention mechanism.

    Attributes:
        name: an attention type of `GeneralizedAttention` such as '0110'; 'dynamic' for `DynamicConv`; 'none'.
        heads, key_stride, recompute: see `GeneralizedAttention`.
        window: for generalised attention, the odd side of the window, or None for all keys; for dynamic convolution,
            the kernel size, or None for 3.
        groups: see `DynamicConv`.

    Raises:
        InputError: the name is unknown.
    """

    name: str = "none"
    heads: int = 8
    key_stride: int = 1
    window: int | None = None
    groups: int = 16
    recompute: str = "none"

    def __post_init__(self) -> None:
        self.layer()  # so that bad options raise before any other layer is made

    def layer(
        self, axes: int = 2, causal: bool = False, scaled: bool = False, wavelength: float = 1000.0
    ) -> DynamicConv | GeneralizedAttention | None:
        """The attention layer, or None for 'none'. For the arguments see `GeneralizedAttention`."""
        if self.name == "none":
            return None
        if self.name == "dynamic":
            return DynamicConv(self.window or 3, self.groups, axes, causal, name="attention")
        if not str(self.name).isdecimal():
            names = f"{' or '.join(map(repr, NAMED))}{nearest(self.name, NAMED)}"
            raise InputError(f"mechanism = {self.name!r}: expected four bits such as '0010', {names}")
        attend = functools.partial(GeneralizedAttention, causal=causal, scaled=scaled, wavelength=wavelength)
        attend = functools.partial(attend, key_stride=self.key_stride, window=self.window, recompute=self.recompute)
        return attend(self.name, self.heads, axes, name="attention")


class Attended(Unfolded, Layer):
    """x + gamma A(x), where gamma starts at zero.

    Args:
        attention: the layer A.

    Shapes:
        - x: [N, h, w, C] or [N, L, C]
        - output: [N, h, w, C] or [N, L, C]

    Examples:
        >>> from axial.layers import Attended, GeneralizedAttention
        >>> x = tf.ones([2, 9, 7, 16])
        >>> y = Attended(GeneralizedAttention())(x)
    """

    def __init__(self, attention: Layer, **kwargs):
        super().__init__(**kwargs)
        self.attention = attention
        self.supports_masking = attention.supports_masking

    def build(self, shape: tf.TensorShape) -> None:
        self.gamma = self.add_weight("gamma", [], initializer="zeros")
        super().build(shape)

    def call(self, x: tf.Tensor, training: bool = False, mask: tf.Tensor | None = None) -> tf.Tensor:
        """The output. Keras' `mask` of x goes to the attention."""
        masked = {} if mask is None else {"mask": mask}
        return x + tf.cast(self.gamma, x.dtype) * self.attention(x, training=training and self.trainable, **masked)

    @property
    def added_weights(self) -> list[tf.Variable]:
        """The weights that this module adds to a network; see `weights.restore.initialize`."""
        return self.weights


class AttendedMiddle(Layer):
    """The spatial layer of an attended residual block: the 3x3 convolution, then x + gamma A(x).

    Args:
        filters: channels of the output. Without a 3x3 convolution the input must have the same number.
        norm: `BatchNormConfig`, or None for the folded layer.
        strides, dilation: stride and dilation of the 3x3 convolution. With spatial 'none', the stride drops pixels.
        mechanism: `Mechanism`.
        spatial: kind of the 3x3 convolution, one of `SPATIAL`.
        deformable: further arguments of `DeformableConv`.

    Shapes:
        - x: [N, h, w, C]
        - output: [N, ceil(h / strides), ceil(w / strides), filters]

    Examples:
        >>> from axial.layers import AttendedMiddle, Mechanism
        >>> x = tf.ones([2, 9, 7, 16])
        >>> y = AttendedMiddle(16, None, mechanism=Mechanism("0010"))(x)
    """

    def __init__(
        self,
        filters: int,
        norm: Norm,
        strides: int = 1,
        dilation: int = 1,
        *,
        mechanism: Mechanism = Mechanism(),
        spatial: str = "regular",
        deformable: dict | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_choice("spatial", spatial, SPATIAL)
        self.strides, self.spatial = strides, spatial
        if spatial == "regular":
            self.conv = Conv(filters, 3, norm, strides, dilation=dilation, name="conv")
        elif spatial == "deformable":
            self.conv = DeformableConv(filters, 3, norm, strides, dilation=dilation, name="conv", **(deformable or {}))
        attention = mechanism.layer(**VISION)
        self.attended = None if attention is None else Attended(attention, name="attended")

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        training = training and self.trainable
        x = subsample(x, self.strides, self.strides) if self.spatial == "none" else self.conv(x, training=training)
        return x if self.attended is None else self.attended(x, training=training)
