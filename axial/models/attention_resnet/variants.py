"""ResNets with stand-alone local attention, and Panoptic-DeepLab on them, one line each."""

import functools

from axial.models.attention_resnet.network import AttentionResNet
from axial.models.base import Variant
from axial.models.classifier import Classifier
from axial.models.panoptic_deeplab.variants import panoptic

_classifier = functools.partial(Variant.of, Classifier, AttentionResNet)
_ps_attention = functools.partial(_classifier, position_sensitive=True)
_panoptic = functools.partial(panoptic, AttentionResNet)

VARIANTS = {
    # ImageNet classifiers (Tables 1 and 8).
    "attention_resnet_no_bn": _classifier(batch_norm=False),
    "attention_resnet": _classifier(),
    "full_attention_resnet": _classifier(batch_norm=False, stem="attention"),
    "ps_attention_resnet_w050": _ps_attention(width=0.5),
    "ps_attention_resnet_w075": _ps_attention(width=0.75),
    "ps_attention_resnet_w100": _ps_attention(width=1.0),
    "ps_attention_resnet_w125": _ps_attention(width=1.25),
    "ps_attention_resnet_w150": _ps_attention(width=1.5),
    # Further rows of Tables 2, 6 and 9.
    "panoptic_deeplab_attention": _panoptic(),
    "panoptic_deeplab_attention_aspp": _panoptic(aspp=256),
    "panoptic_deeplab_ps_attention": _panoptic(position_sensitive=True),
    "panoptic_deeplab_ps_attention_aspp": _panoptic(position_sensitive=True, aspp=256),
}
