"""Faster R-CNN and Mask R-CNN by the protocol of the spatial-attention study, one line each."""

import functools

from axial.models.attended_resnet.network import AttendedResNet
from axial.models.axial_deeplab.axial_resnet import AxialResNet
from axial.models.base import Variant
from axial.models.faster_rcnn.network import FasterRCNN
from axial.models.resnet.variants import ONE_EACH

# The stem and the first stage are frozen.
_detector = functools.partial(Variant.of, FasterRCNN, output_stride=32, stem="imagenet", frozen_stages=1)
_attended = functools.partial(_detector, AttendedResNet)
# A small detector that learns from random weights.
_few_boxes = functools.partial(_detector, sampled=128, pre_nms=(500, 300), proposals=(300, 100), frozen_stages=-1)
_nano = functools.partial(_few_boxes, width=0.375, repeats=ONE_EACH, pyramid_width=64, head_width=256)

VARIANTS = {
    # The study's detectors (Fig. 3, Tables 2 and 3), two of which are Mask R-CNNs, and a detector on Axial-ResNet,
    # which is in neither paper.
    "faster_rcnn_resnet_50": _attended(mechanism="none"),
    "faster_rcnn_attended_resnet_50_1111": _attended(mechanism="1111"),
    "faster_rcnn_attended_resnet_50_0110": _attended(mechanism="0110"),
    "faster_rcnn_attended_resnet_50_0010": _attended(mechanism="0010"),
    "faster_rcnn_attended_resnet_50_dynamic": _attended(mechanism="dynamic", window=13),
    "faster_rcnn_attended_resnet_50_deformable": _attended(mechanism="none", spatial="deformable"),
    "faster_rcnn_attended_resnet_50_1111_deformable": _attended(mechanism="1111", spatial="deformable"),
    "faster_rcnn_attended_resnet_50_0010_deformable": _attended(mechanism="0010", spatial="deformable"),
    "mask_rcnn_attended_resnet_50_0010_deformable": _attended(mechanism="0010", spatial="deformable", masks=True),
    "mask_rcnn_resnet_50": _attended(mechanism="none", masks=True),
    "faster_rcnn_axial_resnet_s": _detector(AxialResNet, width=0.5),
    # Ours, for laptops and tests.
    "faster_rcnn_resnet_nano": _nano(AttendedResNet),
    "faster_rcnn_attended_nano_0010": _nano(AttendedResNet, mechanism="0010", heads=4),
    "faster_rcnn_axial_resnet_nano": _nano(AxialResNet, width=0.25, heads=4),
    "mask_rcnn_resnet_nano": _nano(AttendedResNet, masks=True),
}
