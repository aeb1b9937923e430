"""ResNets (He et al., CVPR 2016), one line each."""

import functools

from axial.models.base import Variant
from axial.models.classifier import Classifier
from axial.models.resnet.network import ConvResNet

RESNET_101 = (3, 4, 23, 3)
ONE_EACH = (1, 1, 1, 1)

_classifier = functools.partial(Variant.of, Classifier)

VARIANTS = {
    # ImageNet classifiers (Tables 1, 8 and 10).
    "resnet_50": _classifier(ConvResNet),
    "resnet_101": _classifier(ConvResNet, repeats=RESNET_101),
    "resnet_152": _classifier(ConvResNet, repeats=(3, 8, 36, 3)),
    "resnet_50_deeplab_stem": _classifier(ConvResNet, stem="deeplab"),
    "resnet_101_deeplab_stem": _classifier(ConvResNet, stem="deeplab", repeats=RESNET_101),
    "resnet_nano": _classifier(ConvResNet, width=0.359375, repeats=ONE_EACH),
}
