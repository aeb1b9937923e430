"""ResNet with spatial attention in its last stages (Zhu et al., ICCV 2019)."""

import dataclasses
import functools
import typing

from axial.layers.batch_norm import BatchNormConfig
from axial.layers.spatial_attention.attended import SPATIAL, AttendedMiddle, Mechanism
from axial.layers.spatial_attention.deformable_conv import FORMS, MODULATIONS
from axial.models.resnet.network import ResNet, ResNetOptions, base_filters

FIRST = 3  # the first stage with attention; the paper has it in conv4 and conv5 of ResNet-50


@dataclasses.dataclass(frozen=True)
class AttendedResNetOptions(ResNetOptions):
    """Options of `AttendedResNet`.

    Attributes:
        mechanism: `Mechanism` of the last two stages.
        spatial: kind of the 3x3 convolutions of these stages, one of `SPATIAL`.
        modulation, form: see `DeformableConv`.
        stride_first: see `Bottleneck`. The weights of tf_keras.applications need True.
    """

    mechanism: Mechanism = Mechanism()
    spatial: typing.Literal[SPATIAL] = "regular"
    modulation: typing.Literal[tuple(MODULATIONS)] = "none"
    form: typing.Literal[tuple(FORMS)] = "gather"
    stride_first: bool = False


class AttendedResNet(ResNet):
    """ResNet whose last two stages have attended residual blocks.

    Output stride 8 dilates conv4 by 2 and conv5 by 4, as in CCNet (Huang et al., ICCV 2019). The stem 'deeplab' is
    the deep stem of the paper's segmentation network.

    Args:
        options: `AttendedResNetOptions`.
        norm: `BatchNormConfig`, or None for the folded network.

    Raises:
        InputError: the number of heads does not divide the channels at this width.
    """

    defaults = AttendedResNetOptions()
    least_stride = 8

    def __init__(self, options=defaults, norm=BatchNormConfig(), name="backbone"):
        super().__init__(options, norm, base_filters(options.width, options.mechanism.heads), name=name)

    def make_block(self, spec):
        options, stage = self.options, (spec.filters // self.filters).bit_length()  # 1 to 4
        mechanism, spatial = (options.mechanism, options.spatial) if stage >= FIRST else (Mechanism(), "regular")
        deformable = dict(modulation=options.modulation, form=options.form)
        attended = functools.partial(AttendedMiddle, mechanism=mechanism, spatial=spatial, deformable=deformable)
        strides = 1 if options.stride_first else spec.strides
        middle = attended(spec.filters, self.norm, strides, spec.dilation, name="middle")
        return self.bottleneck(spec, middle, stride_first=options.stride_first)
