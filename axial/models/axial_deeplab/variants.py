"""Axial-ResNet and Axial-DeepLab (Wang et al., ECCV 2020), one line each."""

import functools

from axial.models.axial_deeplab.axial_decoder import AxialDecoderDeepLab
from axial.models.axial_deeplab.axial_resnet import AxialResNet
from axial.models.base import Variant
from axial.models.classifier import Classifier
from axial.models.panoptic_deeplab.network import PanopticDeepLab
from axial.models.resnet.variants import ONE_EACH

_classifier = functools.partial(Variant.of, Classifier, AxialResNet)
# Axial-ResNet with a conv stem. A query attends to the whole axis.
_conv_stem = functools.partial(_classifier, stem="imagenet", output_stride=32, span=None)
_full_axial = functools.partial(_classifier, stem="axial", output_stride=32, span=15)
_axial_deeplab = functools.partial(Variant.of, PanopticDeepLab, AxialResNet, output_stride=16, span=65)
_axial_decoder = functools.partial(Variant.of, AxialDecoderDeepLab, AxialResNet, output_stride=16, span=65)
# A model of google-research/deeplab2's zoo. It has attention from stride 16 on, and has neither max-pool nor ASPP.
_deeplab2 = functools.partial(
    _axial_deeplab, projection=256, inner_norm=True, pool=False, span=None, attention_stride=16
)
# The last block alone attends, as in DeepLab2's zoo. The width gives the parameters of the network without `_last`.
_last = dict(width=0.28125, heads=6, attention_stride=16, repeats=ONE_EACH)
_csrhddlam = functools.partial(_conv_stem, average_pool=True, table_photo=224)


def _axial_swidernet(layers):
    """Axial-SWideRNet-(1, 1, layers): Wide-ResNet-41 with `layers` times as many blocks."""
    repeats = tuple(int(count * layers) for count in (3, 6, 3, 3))
    return _deeplab2(stem="wide", repeats=repeats, conv_block="basic", attention_width=2)


VARIANTS = {
    # ImageNet classifiers (Tables 1, 8 and 10).
    "axial_resnet_w0375": _conv_stem(width=0.375),
    "axial_resnet_s": _conv_stem(width=0.5),
    "axial_resnet_m": _conv_stem(width=0.75),
    "axial_resnet_l": _conv_stem(width=1.0),
    "axial_resnet_xl": _conv_stem(width=2.0),
    # csrhddlam/axial-deeplab's published network: ResNet-26 with axial attention.
    "axial_resnet_26_s": _csrhddlam(width=0.5, repeats=(1, 2, 4, 1), stem_width=0.5),
    # The segmentation models start from these classifiers, which have the same stem. Xception-71 has only one stem.
    "axial_resnet_s_deeplab_stem": _conv_stem(width=0.5, stem="deeplab"),
    "axial_resnet_m_deeplab_stem": _conv_stem(width=0.75, stem="deeplab"),
    "axial_resnet_l_deeplab_stem": _conv_stem(width=1.0, stem="deeplab"),
    "axial_resnet_xl_deeplab_stem": _conv_stem(width=2.0, stem="deeplab"),
    "full_axial_resnet_s": _full_axial(width=0.5),
    "full_axial_resnet_m": _full_axial(width=0.75),
    "full_axial_resnet_l": _full_axial(width=1.0),
    # Axial-DeepLab (Tables 2 to 9).
    "axial_deeplab_s": _axial_deeplab(width=0.5),
    "axial_deeplab_m": _axial_deeplab(width=0.75),
    "axial_deeplab_l": _axial_deeplab(width=1.0),
    "axial_deeplab_xl": _axial_deeplab(width=2.0),
    "axial_deeplab_s_os32": _axial_deeplab(width=0.5, output_stride=32),
    "axial_deeplab_m_os32": _axial_deeplab(width=0.75, output_stride=32),
    "axial_deeplab_l_os32": _axial_deeplab(width=1.0, output_stride=32),
    "axial_deeplab_xl_os32": _axial_deeplab(width=2.0, output_stride=32),
    "axial_deeplab_l_span5": _axial_deeplab(width=1.0, span=5),
    "axial_deeplab_l_span9": _axial_deeplab(width=1.0, span=9),
    "axial_deeplab_l_span17": _axial_deeplab(width=1.0, span=17),
    "axial_deeplab_l_span33": _axial_deeplab(width=1.0, span=33),
    "axial_deeplab_s_axial_decoder": _axial_decoder(width=0.5),
    "axial_deeplab_l_axial_decoder": _axial_decoder(width=1.0),
    "axial_deeplab_l_os32_axial_decoder": _axial_decoder(width=1.0, output_stride=32),
    # google-research/deeplab2's zoo: MaX-DeepLab's backbone (Wang et al., CVPR 2021) and Axial-SWideRNets.
    "max_s_backbone": _deeplab2(stem="deeplab"),
    "max_s_backbone_gelu": _deeplab2(stem="deeplab", activation="gelu"),
    "axial_swidernet_1_1_1": _axial_swidernet(1),
    "axial_swidernet_1_1_3": _axial_swidernet(3),
    "axial_swidernet_1_1_4_5": _axial_swidernet(4.5),
    # Axial-DeepLab-S without some terms of position-sensitivity; the letters name the remaining terms.
    "axial_deeplab_s_no_position": _axial_deeplab(width=0.5, terms=("content",), value_position=False),
    "axial_deeplab_s_q": _axial_deeplab(width=0.5, terms=("content", "query"), value_position=False),
    "axial_deeplab_s_k": _axial_deeplab(width=0.5, terms=("content", "key"), value_position=False),
    "axial_deeplab_s_v": _axial_deeplab(width=0.5, terms=("content",)),
    "axial_deeplab_s_qk": _axial_deeplab(width=0.5, value_position=False),
    "axial_deeplab_s_qv": _axial_deeplab(width=0.5, terms=("content", "query")),
    "axial_deeplab_s_kv": _axial_deeplab(width=0.5, terms=("content", "key")),
    # Ours, for laptops and tests.
    "axial_deeplab_w025": _axial_deeplab(width=0.25),
    "axial_resnet_nano": _conv_stem(width=0.25, repeats=ONE_EACH, heads=4),
    "axial_resnet_nano_deeplab_stem": _conv_stem(width=0.25, repeats=ONE_EACH, heads=4, stem="deeplab"),
    "axial_deeplab_nano": _axial_deeplab(width=0.25, repeats=ONE_EACH, heads=4, decoder_width=0.5),
    "axial_resnet_nano_stride16": _conv_stem(**_last),
    "axial_resnet_nano_stride16_deeplab_stem": _conv_stem(**_last, stem="deeplab"),
    "axial_deeplab_nano_stride16": _axial_deeplab(**_last, decoder_width=0.5),
}
