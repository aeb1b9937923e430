"""ResNet with spatial attention in its last stages (Zhu et al., ICCV 2019)."""

from axial.io.check import check_choice
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.configured import makes_layer
from axial.layers.recompute import RECOMPUTE
from axial.layers.spatial_attention.attended import SPATIAL, AttendedMiddle, Mechanism
from axial.models.resnet import ResNet, base_filters, bottlenecks, make_stem

STAGES = 4


@makes_layer
def attended_resnet(
    width=1.0,
    repeats=(3, 4, 6, 3),
    stem="imagenet",
    output_stride=32,
    mechanism="none",
    spatial="regular",
    heads=8,
    groups=16,
    key_stride=1,
    window=None,
    attended_stages=2,
    spatial_stages=2,
    modulation="none",
    form="gather",
    drop_path=0.0,
    recompute="none",
    stride_first=False,
    pixels="symmetric",
    norm=BatchNormConfig(),
):
    """ResNet whose last stages have attended residual blocks. The paper attends in conv4 and conv5 of ResNet-50.

    Args:
        width: multiplies the channels.
        repeats, output_stride, drop_path, pixels: see `ResNet`. An output stride of 8 dilates conv4 by 2 and conv5 by
            4, as in CCNet (Huang et al., ICCV 2019).
        stem: see `make_stem`; 'deeplab' is the deep stem of the paper's segmentation.
        mechanism, heads, groups, key_stride, window: see `Mechanism`.
        spatial: the 3x3 convolution of the last `spatial_stages` stages, of `SPATIAL`.
        attended_stages: how many of the last stages attend.
        spatial_stages: how many of the last stages have the 3x3 convolution that `spatial` names.
        modulation, form: of deformable convolution.
        recompute: see `Mechanism` and `Bottleneck`.
        stride_first: see `Bottleneck`; for weights of tf_keras.applications.
        norm: `BatchNormConfig`, or None for the folded network.

    Raises:
        InputError: the mechanism refuses its arguments, the heads do not divide the channels, or a name is unknown.
    """
    base = base_filters(width, heads)
    check_choice("recompute", recompute, RECOMPUTE)
    check_choice("spatial", spatial, SPATIAL)
    attending = Mechanism(mechanism, heads, key_stride, window, groups=groups, recompute=recompute)

    def middle(filters, *, strides, dilation, input_stride, dtype):
        del input_stride
        stage = (filters // base).bit_length()  # 1 to 4
        kind = dict(spatial=spatial if stage > STAGES - spatial_stages else "regular")
        kind |= dict(mechanism=attending if stage > STAGES - attended_stages else Mechanism())
        own = dict(deformable=dict(modulation=modulation, form=form), dtype=dtype, name="middle")
        return AttendedMiddle(filters, norm, strides, dilation, **kind, **own)

    frame = dict(repeats=repeats, output_stride=output_stride, drop_path=drop_path, pixels=pixels, name="backbone")
    block = bottlenecks(middle, norm, recompute, stride_first=stride_first)
    return ResNet(make_stem(stem, width, norm), block, filters=base, least_stride=8, **frame)
