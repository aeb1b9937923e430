"""Panoptic-DeepLab (Cheng et al., CVPR 2020) on convolutional backbones, one line each."""

import functools

from axial.models.base import Variant
from axial.models.classifier import Classifier
from axial.models.panoptic_deeplab.network import PanopticDeepLab
from axial.models.panoptic_deeplab.xception import Xception71
from axial.models.resnet.network import ConvResNet
from axial.models.resnet.variants import ONE_EACH, RESNET_101

panoptic = functools.partial(Variant.of, PanopticDeepLab, stem="deeplab", output_stride=16)
_xception = functools.partial(Variant.of, PanopticDeepLab, Xception71, output_stride=16)

VARIANTS = {
    # Rows of Tables 2, 4, 6, 7 and 9.
    "xception_71": Variant.of(Classifier, Xception71, output_stride=32),
    "panoptic_deeplab_resnet_50": panoptic(ConvResNet),
    "panoptic_deeplab_resnet_50_aspp": panoptic(ConvResNet, aspp=256),
    "panoptic_deeplab_resnet_101": panoptic(ConvResNet, repeats=RESNET_101),
    "panoptic_deeplab_xception_71": _xception(),
    "panoptic_deeplab_xception_71_aspp": _xception(aspp=256),
    "panoptic_deeplab_resnet_nano": panoptic(ConvResNet, width=0.34375, repeats=ONE_EACH, decoder_width=0.5),
}
