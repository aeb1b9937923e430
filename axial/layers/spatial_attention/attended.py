"""The attended residual block (Zhu et al., ICCV 2019, Fig. 2a): attention after the 3x3 convolution of a bottleneck.

    1x1 -> 3x3 (regular, deformable or none) -> x + gamma A(x) -> 1x1 -> + shortcut

A is a mechanism: generalised attention, named by the four bits of its setting, or dynamic convolution. gamma is one
number and starts at zero, so that a block starts as the residual block without A. The stride is that of the 3x3.
"""

import dataclasses
import re

import tensorflow as tf

from axial.errors import InputError, nearest
from axial.io.check import check_choice
from axial.layers.batch_norm import Norm
from axial.layers.configured import Layer, Unfolded
from axial.layers.conv import Conv, subsample
from axial.layers.spatial_attention.deformable_conv import DeformableConv
from axial.layers.spatial_attention.dynamic_conv import DynamicConv
from axial.layers.spatial_attention.generalized_attention import VISION, GeneralizedAttention

SPATIAL = ("regular", "deformable", "none")  # the 3x3 convolution


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """What attends, and how far.

    Attributes:
        name: four bits, the setting of `GeneralizedAttention`; 'dynamic' for `DynamicConv`; 'none'.
        heads: of generalised attention.
        key_stride: of generalised attention.
        window: odd; of generalised attention, or None. It is the kernel of dynamic convolution, 3 if None.
        groups: of dynamic convolution.
        recompute: of generalised attention.

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
        if not (self.name in ("none", "dynamic") or re.fullmatch(r"\d+", str(self.name))):
            raise InputError(
                f"mechanism = {self.name!r}: expected four bits such as '0010', 'dynamic' or 'none'"
                f"{nearest(self.name, ('none', 'dynamic'))}"
            )
        self.layer()  # refuses what the mechanism refuses, before any other layer is made

    def layer(
        self, axes: int = 2, causal: bool = False, scaled: bool = False, wavelength: float = 1000.0
    ) -> DynamicConv | GeneralizedAttention | None:
        """The layer that attends, or None. For the arguments see `GeneralizedAttention`."""
        if self.name == "none":
            return None
        if self.name == "dynamic":
            return DynamicConv(self.window or 3, self.groups, axes, causal, name="attention")
        return GeneralizedAttention(
            self.name,
            self.heads,
            axes,
            key_stride=self.key_stride,
            window=self.window,
            causal=causal,
            scaled=scaled,
            wavelength=wavelength,
            recompute=self.recompute,
            name="attention",
        )


class Attended(Unfolded, Layer):
    """x + gamma A(x), with gamma zero at the start.

    Args:
        attention: the layer A.

    Shapes:
        x: [N, h, w, C] or [N, L, C]
        output: [N, h, w, C] or [N, L, C]

    Example:
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
        """The output; Keras' `mask` of x goes to the attention."""
        masked = {} if mask is None else {"mask": mask}
        return x + tf.cast(self.gamma, x.dtype) * self.attention(x, training=training and self.trainable, **masked)

    @property
    def added_weights(self) -> list[tf.Variable]:
        """The weights that a network without this module does not have; see `weights.restore.initialize`."""
        return self.weights


class AttendedMiddle(Layer):
    """The middle of an attended residual block: the 3x3 convolution, then x + gamma A(x).

    Args:
        filters: channels of the output, and of the input where there is no 3x3 convolution.
        norm: `BatchNormConfig`, or None for the folded layer.
        strides, dilation: of the 3x3 convolution. Without one, the stride drops pixels.
        mechanism: `Mechanism`.
        spatial: the 3x3 convolution, of `SPATIAL`.
        deformable: further arguments of `DeformableConv`.

    Shapes:
        x: [N, h, w, C]
        output: [N, ceil(h / strides), ceil(w / strides), filters]

    Example:
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
