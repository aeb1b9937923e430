"""Every model by name. A variant is one line: a head, a backbone, and their arguments."""

import dataclasses
import functools
import typing

from axial.layers import options
from axial.models.attended_resnet import AttendedResNet
from axial.models.attention_resnet import AttentionResNet
from axial.models.axial_decoder import AxialDecoderDeepLab
from axial.models.axial_resnet import AxialResNet
from axial.models.ccnet import CCNet
from axial.models.classifier import Classifier
from axial.models.faster_rcnn import FasterRCNN
from axial.models.panoptic_deeplab import PanopticDeepLab
from axial.models.resnet import ConvResNet
from axial.models.transformer import Transformer, Translator
from axial.models.xception import Xception71


@dataclasses.dataclass(frozen=True)
class Variant:
    """A registered model.

    Attributes:
        head: class of the model, a `Network`, which takes a backbone and the number of classes.
        backbone: class of the backbone.
        arguments: flat dict of the options of both. An option that both have goes to both.
    """

    head: typing.Callable
    backbone: typing.Callable
    arguments: dict

    @property
    def classes(self):
        """Number of classes with which the paper counts the model, as its head says."""
        return self.head.classes

    @property
    def task(self):
        """Name of the task that the model is for, as its head says."""
        return self.head.task

    def parameters(self):
        """Names of the arguments that the head or the backbone takes."""
        return sorted({**options.flatten(self.head.defaults), **options.flatten(self.backbone.defaults)})

    def backbone_arguments(self, changes):
        """dict of all arguments of the backbone. `changes` replace those of the variant."""
        return options.flatten(options.replace(self.backbone.defaults, self.arguments | changes))

    def all_arguments(self, changes):
        """dict of all arguments of head and backbone. `changes` replace those of the variant."""
        head = options.flatten(options.replace(self.head.defaults, self.arguments | changes))
        return {**self.backbone_arguments(changes), **head}

    def build(self, num_classes, norm, changes):
        """The model, not built yet. `changes` replace arguments of the variant."""
        arguments = self.arguments | changes
        backbone = self.backbone(options.replace(self.backbone.defaults, arguments), norm)
        return self.head(backbone, num_classes, norm, options.replace(self.head.defaults, arguments))


def _variant(head, backbone, **arguments):
    return Variant(head, backbone, arguments)


def _axial_swidernet(layers):
    """Axial-SWideRNet-(1, 1, layers): Wide-ResNet-41 with so many times its blocks."""
    repeats = tuple(int(count * layers) for count in (3, 6, 3, 3))
    return _deeplab2(stem="wide", repeats=repeats, conv_block="basic", attention_width=2)


def _attended(mechanism, spatial="regular", head=Classifier, **arguments):
    """A model with an attended ResNet, by default a classifier: the pre-training of the spatial-attention study."""
    return Variant(head, AttendedResNet, dict(mechanism=mechanism, spatial=spatial) | arguments)


def _transformer(mechanism, window=None, **arguments):
    """The base Transformer with a mechanism in encoder and decoder; encoder-decoder attention has all four terms."""
    return Variant(Translator, Transformer, dict(encoder=mechanism, decoder=mechanism, window=window) | arguments)


def _transformer_nano(mechanism, **arguments):
    """A small Transformer with a mechanism in its encoder, for Multi30k on a laptop."""
    return Variant(Translator, Transformer, dict(_NANO, encoder=mechanism) | arguments)


_CSRHDDLAM = dict(average_pool=True, table_photo=224)
_RESNET_101 = (3, 4, 23, 3)
_ONE_EACH = (1, 1, 1, 1)
_NANO = dict(layers=3, channels=128, inner=512, heads=4)
_OF_DEEPLAB = dict(stem="deeplab", output_stride=16)

# Kinds of models. Arguments of a variant replace those of its kind.
_classifier = functools.partial(_variant, Classifier)
# Axial-ResNet with a conv stem. It attends to the whole axis.
_conv_stem = functools.partial(_classifier, AxialResNet, stem="imagenet", output_stride=32, span=None)
_full_axial = functools.partial(_classifier, AxialResNet, stem="axial", output_stride=32, span=15)
_ps_attention = functools.partial(_classifier, AttentionResNet, position_sensitive=True)
_axial_deeplab = functools.partial(_variant, PanopticDeepLab, AxialResNet, output_stride=16, span=65)
_axial_decoder = functools.partial(_variant, AxialDecoderDeepLab, AxialResNet, output_stride=16, span=65)
_panoptic = functools.partial(_variant, PanopticDeepLab, **_OF_DEEPLAB)
_xception = functools.partial(_variant, PanopticDeepLab, Xception71, output_stride=16)
# A model of google-research/deeplab2's zoo: it attends from stride 16 on and has no max-pool and no ASPP.
_deeplab2 = functools.partial(
    _axial_deeplab, projection=256, inner_norm=True, pool=False, span=None, attention_stride=16
)
# The study's backbone for segmentation: a deep stem, and dilation down to output stride 8.
_dilated = functools.partial(_attended, stem="deeplab", output_stride=8)
# The study's segmentation network: the mechanism in the last two stages, and once more in the head.
_ccnet = functools.partial(_dilated, head=CCNet)
_ccnet_nano = functools.partial(_ccnet, width=0.375, repeats=_ONE_EACH, heads=4, context=96, output_stride=16)
_deformable_transformer = functools.partial(_transformer, encoder_deformable=True, decoder_deformable=True)
# A small segmentation network with a mechanism of the study in its last two stages.
_attended_nano = functools.partial(
    _attended, head=PanopticDeepLab, width=0.375, repeats=_ONE_EACH, heads=4, decoder_width=0.5, **_OF_DEEPLAB
)
# Faster R-CNN by the study's protocol: the stem and the first stage are frozen.
_PROTOCOL = dict(output_stride=32, stem="imagenet", frozen_stages=1)
_detector = functools.partial(_variant, FasterRCNN, **_PROTOCOL)
_attended_detector = functools.partial(_attended, head=FasterRCNN, **_PROTOCOL)
# A small detector that learns from random weights.
_SMALL = dict(width=0.375, repeats=_ONE_EACH, pyramid_width=64, head_width=256, sampled=128)
_SMALL |= dict(pre_nms=(500, 300), proposals=(300, 100), frozen_stages=-1)
_detector_nano = functools.partial(_detector, **_SMALL)

# Arguments of a backbone that change no weight.
FREE = ("output_stride", "span", "whole_up_to_span", "drop_path", "recompute", "backend")
# Backbones that are another one with modules in it that start as the identity.
PLAIN = {AttendedResNet: ConvResNet}


VARIANTS = {
    # ImageNet classifiers (Tables 1, 8 and 10).
    "resnet_50": _classifier(ConvResNet),
    "resnet_101": _classifier(ConvResNet, repeats=_RESNET_101),
    "resnet_152": _classifier(ConvResNet, repeats=(3, 8, 36, 3)),
    "xception_71": _classifier(Xception71, output_stride=32),
    "attention_resnet_no_bn": _classifier(AttentionResNet, batch_norm=False),
    "attention_resnet": _classifier(AttentionResNet),
    "full_attention_resnet": _classifier(AttentionResNet, batch_norm=False, stem="attention"),
    "ps_attention_resnet_w050": _ps_attention(width=0.5),
    "ps_attention_resnet_w075": _ps_attention(width=0.75),
    "ps_attention_resnet_w100": _ps_attention(width=1.0),
    "ps_attention_resnet_w125": _ps_attention(width=1.25),
    "ps_attention_resnet_w150": _ps_attention(width=1.5),
    "axial_resnet_w0375": _conv_stem(width=0.375),
    "axial_resnet_s": _conv_stem(width=0.5),
    "axial_resnet_m": _conv_stem(width=0.75),
    "axial_resnet_l": _conv_stem(width=1.0),
    "axial_resnet_xl": _conv_stem(width=2.0),
    # csrhddlam/axial-deeplab's published network: ResNet-26 with axial attention.
    "axial_resnet_26_s": _conv_stem(width=0.5, repeats=(1, 2, 4, 1), stem_width=0.5, **_CSRHDDLAM),
    # With the stem of the segmentation models, which start from their weights. Xception-71 has one stem only.
    "axial_resnet_s_deeplab_stem": _conv_stem(width=0.5, stem="deeplab"),
    "axial_resnet_m_deeplab_stem": _conv_stem(width=0.75, stem="deeplab"),
    "axial_resnet_l_deeplab_stem": _conv_stem(width=1.0, stem="deeplab"),
    "axial_resnet_xl_deeplab_stem": _conv_stem(width=2.0, stem="deeplab"),
    "resnet_50_deeplab_stem": _classifier(ConvResNet, stem="deeplab"),
    "resnet_101_deeplab_stem": _classifier(ConvResNet, stem="deeplab", repeats=_RESNET_101),
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
    # Axial-DeepLab-S with each part of position-sensitivity left out.
    "axial_deeplab_s_no_position": _axial_deeplab(width=0.5, terms=("content",), value_position=False),
    "axial_deeplab_s_q": _axial_deeplab(width=0.5, terms=("content", "query"), value_position=False),
    "axial_deeplab_s_k": _axial_deeplab(width=0.5, terms=("content", "key"), value_position=False),
    "axial_deeplab_s_v": _axial_deeplab(width=0.5, terms=("content",)),
    "axial_deeplab_s_qk": _axial_deeplab(width=0.5, value_position=False),
    "axial_deeplab_s_qv": _axial_deeplab(width=0.5, terms=("content", "query")),
    "axial_deeplab_s_kv": _axial_deeplab(width=0.5, terms=("content", "key")),
    # The other rows of Tables 2, 4, 6, 7 and 9.
    "panoptic_deeplab_resnet_50": _panoptic(ConvResNet),
    "panoptic_deeplab_resnet_50_aspp": _panoptic(ConvResNet, aspp=256),
    "panoptic_deeplab_resnet_101": _panoptic(ConvResNet, repeats=_RESNET_101),
    "panoptic_deeplab_attention": _panoptic(AttentionResNet),
    "panoptic_deeplab_attention_aspp": _panoptic(AttentionResNet, aspp=256),
    "panoptic_deeplab_ps_attention": _panoptic(AttentionResNet, position_sensitive=True),
    "panoptic_deeplab_ps_attention_aspp": _panoptic(AttentionResNet, position_sensitive=True, aspp=256),
    "panoptic_deeplab_xception_71": _xception(),
    "panoptic_deeplab_xception_71_aspp": _xception(aspp=256),
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
    # The study's segmentation networks (Fig. 3, Tables 2 and 3); other rows by ModelConfig.arguments.
    "ccnet_resnet_50": _ccnet("none"),
    "ccnet_resnet_50_1111": _ccnet("1111"),
    "ccnet_resnet_50_0110": _ccnet("0110"),
    "ccnet_resnet_50_0010": _ccnet("0010"),
    "ccnet_resnet_50_dynamic": _ccnet("dynamic", window=13),
    "ccnet_resnet_50_deformable": _ccnet("none", "deformable"),
    "ccnet_resnet_50_1111_deformable": _ccnet("1111", "deformable"),
    "ccnet_resnet_50_0010_deformable": _ccnet("0010", "deformable"),
    # The study's detectors (Fig. 3, Tables 2 and 3), as Mask R-CNN too, and Axial-ResNet, which neither paper has as a
    # detector.
    "faster_rcnn_resnet_50": _attended_detector("none"),
    "faster_rcnn_attended_resnet_50_1111": _attended_detector("1111"),
    "faster_rcnn_attended_resnet_50_0110": _attended_detector("0110"),
    "faster_rcnn_attended_resnet_50_0010": _attended_detector("0010"),
    "faster_rcnn_attended_resnet_50_dynamic": _attended_detector("dynamic", window=13),
    "faster_rcnn_attended_resnet_50_deformable": _attended_detector("none", "deformable"),
    "faster_rcnn_attended_resnet_50_1111_deformable": _attended_detector("1111", "deformable"),
    "faster_rcnn_attended_resnet_50_0010_deformable": _attended_detector("0010", "deformable"),
    "mask_rcnn_attended_resnet_50_0010_deformable": _attended_detector("0010", "deformable", masks=True),
    "mask_rcnn_resnet_50": _attended_detector("none", masks=True),
    "faster_rcnn_axial_resnet_s": _detector(AxialResNet, width=0.5, span=65),
    # Ours, for laptops and tests.
    "faster_rcnn_resnet_nano": _detector_nano(AttendedResNet),
    "faster_rcnn_attended_nano_0010": _detector_nano(AttendedResNet, mechanism="0010", heads=4),
    "faster_rcnn_axial_resnet_nano": _detector_nano(AxialResNet, width=0.25, heads=4, span=65),
    "mask_rcnn_resnet_nano": _detector_nano(AttendedResNet, masks=True),
    # Its Transformers, for translation.
    "transformer_base": _transformer("1111"),
    "transformer_base_0110": _transformer("0110"),
    "transformer_base_0010": _transformer("0010"),
    "transformer_base_memory_1010": _transformer("1111", memory="1010"),
    "transformer_base_dynamic": _transformer("dynamic", window=31),
    "transformer_base_deformable": _deformable_transformer("none"),
    "transformer_base_1111_deformable": _deformable_transformer("1111"),
    "transformer_base_0010_deformable": _deformable_transformer("0010"),
    # Ours, for laptops and tests.
    "transformer_nano": _transformer_nano("1111"),
    "transformer_nano_0110": _transformer_nano("0110"),
    "transformer_nano_0010": _transformer_nano("0010"),
    "transformer_nano_dynamic": _transformer_nano("dynamic", window=15),
    "transformer_nano_deformable": _transformer_nano("none", encoder_deformable=True),
    "axial_deeplab_w025": _axial_deeplab(width=0.25),
    "axial_resnet_nano": _conv_stem(width=0.25, repeats=_ONE_EACH, heads=4),
    "resnet_nano": _classifier(ConvResNet, width=0.359375, repeats=_ONE_EACH),
    "axial_resnet_nano_deeplab_stem": _conv_stem(width=0.25, repeats=_ONE_EACH, heads=4, stem="deeplab"),
    "axial_deeplab_nano": _axial_deeplab(width=0.25, repeats=_ONE_EACH, heads=4, decoder_width=0.5),
    "ccnet_nano": _ccnet_nano("none"),
    "ccnet_nano_1111": _ccnet_nano("1111"),
    "ccnet_nano_0010_deformable": _ccnet_nano("0010", "deformable"),
    "attended_deeplab_nano": _attended_nano("none"),
    "attended_deeplab_nano_1111": _attended_nano("1111"),
    "attended_deeplab_nano_0010": _attended_nano("0010"),
    "attended_deeplab_nano_dynamic": _attended_nano("dynamic", window=13),
    "attended_deeplab_nano_deformable": _attended_nano("none", "deformable"),
    "attended_deeplab_nano_0010_deformable": _attended_nano("0010", "deformable"),
    "panoptic_deeplab_resnet_nano": _panoptic(ConvResNet, width=0.34375, repeats=_ONE_EACH, decoder_width=0.5),
}
