"""Networks of the spatial-attention study (Zhu et al., ICCV 2019), one line each."""

import functools

from axial.models.attended_resnet.ccnet import CCNet
from axial.models.attended_resnet.network import AttendedResNet
from axial.models.base import Variant
from axial.models.classifier import Classifier
from axial.models.panoptic_deeplab.network import PanopticDeepLab
from axial.models.resnet.variants import ONE_EACH


def _attended(mechanism, spatial="regular", model=Classifier, **arguments):
    """A model on an attended ResNet. The default is a classifier, as in the study's pre-training."""
    return Variant.of(model, AttendedResNet, mechanism=mechanism, spatial=spatial, **arguments)


# The study's segmentation backbone, with a deep stem and dilation for output stride 8.
_dilated = functools.partial(_attended, stem="deeplab", output_stride=8)
# The study's segmentation network has the mechanism in the last two stages and in the head.
_ccnet = functools.partial(_dilated, model=CCNet)
_nano = functools.partial(_attended, width=0.375, repeats=ONE_EACH, heads=4, stem="deeplab", output_stride=16)
_ccnet_nano = functools.partial(_nano, model=CCNet, context=96)
# A small panoptic network with a mechanism in its last two stages.
_attended_nano = functools.partial(_nano, model=PanopticDeepLab, decoder_width=0.5)

VARIANTS = {
    # The spatial-attention study (Zhu et al., ICCV 2019): a mechanism in conv4 and conv5 of ResNet-50.
    "attended_resnet_50_1111": _attended("1111"),
    "attended_resnet_50_0110": _attended("0110"),
    "attended_resnet_50_0010": _attended("0010"),
    "attended_resnet_50_dynamic": _attended("dynamic", window=13),
    "attended_resnet_50_deformable": _attended("none", "deformable"),
    "attended_resnet_50_1111_deformable": _attended("1111", "deformable"),
    "attended_resnet_50_0010_deformable": _attended("0010", "deformable"),
    "dilated_resnet_50": _dilated("none"),
    "dilated_resnet_50_1111": _dilated("1111"),
    "dilated_resnet_50_0010_deformable": _dilated("0010", "deformable"),
    # The study's segmentation networks (Fig. 3, Tables 2 and 3). ModelConfig.arguments gives the other rows.
    "ccnet_resnet_50": _ccnet("none"),
    "ccnet_resnet_50_1111": _ccnet("1111"),
    "ccnet_resnet_50_0110": _ccnet("0110"),
    "ccnet_resnet_50_0010": _ccnet("0010"),
    "ccnet_resnet_50_dynamic": _ccnet("dynamic", window=13),
    "ccnet_resnet_50_deformable": _ccnet("none", "deformable"),
    "ccnet_resnet_50_1111_deformable": _ccnet("1111", "deformable"),
    "ccnet_resnet_50_0010_deformable": _ccnet("0010", "deformable"),
    # Ours, for laptops and tests.
    "ccnet_nano": _ccnet_nano("none"),
    "ccnet_nano_1111": _ccnet_nano("1111"),
    "ccnet_nano_0010_deformable": _ccnet_nano("0010", "deformable"),
    "attended_deeplab_nano": _attended_nano("none"),
    "attended_deeplab_nano_1111": _attended_nano("1111"),
    "attended_deeplab_nano_0010": _attended_nano("0010"),
    "attended_deeplab_nano_dynamic": _attended_nano("dynamic", window=13),
    "attended_deeplab_nano_deformable": _attended_nano("none", "deformable"),
    "attended_deeplab_nano_0010_deformable": _attended_nano("0010", "deformable"),
}
