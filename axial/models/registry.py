"""Every model by name; a variant is one line."""

from axial.errors import InputError, nearest
from axial.layers.batch_norm import BatchNormConfig
from axial.models.attention_resnet import attention_resnet
from axial.models.axial_decoder import AxialDecoderDeepLab
from axial.models.axial_resnet import axial_resnet
from axial.models.classifier import Classifier
from axial.models.panoptic_deeplab import PanopticDeepLab
from axial.models.resnet import resnet
from axial.models.xception import Xception71


def classifier(num_classes, norm, backbone, **arguments):
    """`Classifier` on the backbone that a function builds from `arguments`."""
    return Classifier(backbone(norm=norm, **arguments), num_classes, name="classifier")


def panoptic_deeplab(
    num_classes,
    norm,
    backbone,
    output_stride=16,
    decoder_width=1.0,
    projection=None,
    inner_norm=False,
    aspp=None,
    **arguments,
):
    """`PanopticDeepLab` on the backbone that a function builds from `arguments`."""
    return PanopticDeepLab(
        backbone(norm=norm, output_stride=output_stride, **arguments),
        num_classes,
        norm,
        output_stride,
        decoder_width,
        projection,
        inner_norm,
        aspp,
        name="panoptic_deeplab",
    )


def axial_deeplab(num_classes, norm, width=1.0, span=65, **arguments):
    """Axial-DeepLab: `axial_resnet` with the DeepLab stem under `PanopticDeepLab`."""
    return panoptic_deeplab(num_classes, norm, axial_resnet, width=width, span=span, **arguments)


def axial_decoder(num_classes, norm, width=1.0, output_stride=16, span=65, heads=8, **arguments):
    """Axial-DeepLab with the axial-decoder."""
    backbone = axial_resnet(width, output_stride=output_stride, span=span, heads=heads, norm=norm, **arguments)
    return AxialDecoderDeepLab(backbone, num_classes, norm, output_stride, width, span, heads, name="axial_deeplab")


# What a variant's line leaves out. A conv-stem classifier attends to the whole axis.
_CONV_STEM = dict(backbone=axial_resnet, stem="imagenet", output_stride=32, span=None)
_FULL_AXIAL = dict(backbone=axial_resnet, stem="axial", output_stride=32, span=15)
_PS_ATTENTION = dict(backbone=attention_resnet, position_sensitive=True)
_RESNET_50 = dict(backbone=resnet, stem="deeplab")
_RESNET_101 = dict(_RESNET_50, repeats=(3, 4, 23, 3))
_ATTENTION = dict(backbone=attention_resnet, stem="deeplab")
_ATTENTION_PS = dict(_ATTENTION, position_sensitive=True)
_XCEPTION = dict(backbone=Xception71, name="backbone")

VARIANTS = {
    # ImageNet classifiers (Tables 1, 8 and 10).
    "resnet_50": (classifier, dict(backbone=resnet)),
    "resnet_101": (classifier, dict(backbone=resnet, repeats=(3, 4, 23, 3))),
    "resnet_152": (classifier, dict(backbone=resnet, repeats=(3, 8, 36, 3))),
    "xception_71": (classifier, dict(_XCEPTION, output_stride=32)),
    "attention_resnet_no_bn": (classifier, dict(backbone=attention_resnet, batch_norm=False)),
    "attention_resnet": (classifier, dict(backbone=attention_resnet)),
    "full_attention_resnet": (
        classifier,
        dict(backbone=attention_resnet, batch_norm=False, stem="attention"),
    ),
    "ps_attention_resnet_w050": (classifier, dict(_PS_ATTENTION, width=0.5)),
    "ps_attention_resnet_w075": (classifier, dict(_PS_ATTENTION, width=0.75)),
    "ps_attention_resnet_w100": (classifier, dict(_PS_ATTENTION, width=1.0)),
    "ps_attention_resnet_w125": (classifier, dict(_PS_ATTENTION, width=1.25)),
    "ps_attention_resnet_w150": (classifier, dict(_PS_ATTENTION, width=1.5)),
    "axial_resnet_w0375": (classifier, dict(_CONV_STEM, width=0.375)),
    "axial_resnet_s": (classifier, dict(_CONV_STEM, width=0.5)),
    "axial_resnet_m": (classifier, dict(_CONV_STEM, width=0.75)),
    "axial_resnet_l": (classifier, dict(_CONV_STEM, width=1.0)),
    "axial_resnet_xl": (classifier, dict(_CONV_STEM, width=2.0)),
    "full_axial_resnet_s": (classifier, dict(_FULL_AXIAL, width=0.5)),
    "full_axial_resnet_m": (classifier, dict(_FULL_AXIAL, width=0.75)),
    "full_axial_resnet_l": (classifier, dict(_FULL_AXIAL, width=1.0)),
    # Axial-DeepLab (Tables 2 to 9).
    "axial_deeplab_s": (axial_deeplab, dict(width=0.5)),
    "axial_deeplab_m": (axial_deeplab, dict(width=0.75)),
    "axial_deeplab_l": (axial_deeplab, dict(width=1.0)),
    "axial_deeplab_xl": (axial_deeplab, dict(width=2.0)),
    "axial_deeplab_s_os32": (axial_deeplab, dict(width=0.5, output_stride=32)),
    "axial_deeplab_m_os32": (axial_deeplab, dict(width=0.75, output_stride=32)),
    "axial_deeplab_l_os32": (axial_deeplab, dict(width=1.0, output_stride=32)),
    "axial_deeplab_xl_os32": (axial_deeplab, dict(width=2.0, output_stride=32)),
    "axial_deeplab_l_span5": (axial_deeplab, dict(width=1.0, span=5)),
    "axial_deeplab_l_span9": (axial_deeplab, dict(width=1.0, span=9)),
    "axial_deeplab_l_span17": (axial_deeplab, dict(width=1.0, span=17)),
    "axial_deeplab_l_span33": (axial_deeplab, dict(width=1.0, span=33)),
    "axial_deeplab_s_axial_decoder": (axial_decoder, dict(width=0.5)),
    "axial_deeplab_l_axial_decoder": (axial_decoder, dict(width=1.0)),
    "axial_deeplab_l_os32_axial_decoder": (axial_decoder, dict(width=1.0, output_stride=32)),
    # Axial-DeepLab-S with each part of position-sensitivity left out.
    "axial_deeplab_s_no_position": (axial_deeplab, dict(width=0.5, terms=("content",), value_position=False)),
    "axial_deeplab_s_q": (axial_deeplab, dict(width=0.5, terms=("content", "query"), value_position=False)),
    "axial_deeplab_s_k": (axial_deeplab, dict(width=0.5, terms=("content", "key"), value_position=False)),
    "axial_deeplab_s_v": (axial_deeplab, dict(width=0.5, terms=("content",))),
    "axial_deeplab_s_qk": (axial_deeplab, dict(width=0.5, value_position=False)),
    "axial_deeplab_s_qv": (axial_deeplab, dict(width=0.5, terms=("content", "query"))),
    "axial_deeplab_s_kv": (axial_deeplab, dict(width=0.5, terms=("content", "key"))),
    # The other rows of Tables 2, 4, 6, 7 and 9.
    "panoptic_deeplab_resnet_50": (panoptic_deeplab, _RESNET_50),
    "panoptic_deeplab_resnet_50_aspp": (panoptic_deeplab, dict(_RESNET_50, aspp=256)),
    "panoptic_deeplab_resnet_101": (panoptic_deeplab, _RESNET_101),
    "panoptic_deeplab_attention": (panoptic_deeplab, _ATTENTION),
    "panoptic_deeplab_attention_aspp": (panoptic_deeplab, dict(_ATTENTION, aspp=256)),
    "panoptic_deeplab_ps_attention": (panoptic_deeplab, _ATTENTION_PS),
    "panoptic_deeplab_ps_attention_aspp": (panoptic_deeplab, dict(_ATTENTION_PS, aspp=256)),
    "panoptic_deeplab_xception_71": (panoptic_deeplab, _XCEPTION),
    "panoptic_deeplab_xception_71_aspp": (panoptic_deeplab, dict(_XCEPTION, aspp=256)),
    # Ours, for laptops and tests.
    "axial_deeplab_w025": (axial_deeplab, dict(width=0.25)),
    "axial_deeplab_nano": (
        axial_deeplab,
        dict(width=0.25, repeats=(1, 1, 1, 1), heads=4, decoder_width=0.5),
    ),
    "panoptic_deeplab_resnet_nano": (
        panoptic_deeplab,
        dict(_RESNET_50, width=0.34375, repeats=(1, 1, 1, 1), decoder_width=0.5),
    ),
}


def find_variant(name):
    """(builder, arguments) of a registered model; InputError with the nearest name."""
    if name not in VARIANTS:
        raise InputError(f"no model is called {name!r}{nearest(name, VARIANTS)}: {', '.join(VARIANTS)}")
    return VARIANTS[name]


def published_classes(name):
    """Classes with which the paper's tables count a model: ImageNet's 1000 or Cityscapes' 19."""
    return 1000 if find_variant(name)[0] is classifier else 19


def build_model(name, num_classes, norm=BatchNormConfig(), **changes):
    """A registered model, weights not yet made.

    Args:
        name: of `VARIANTS`.
        num_classes: from the `DatasetSpec`.
        norm: `BatchNormConfig`, or None for the folded model.
        **changes: arguments of the variant's builder that differ; every published one takes
            `drop_path`, the stochastic depth of segmentation.

    Raises:
        InputError: an unknown name, with the nearest; an argument the builder refuses.

    Example:
        >>> model = build_model("axial_deeplab_nano", num_classes=19)
        >>> model(tf.zeros([1, 65, 65, 3]))["semantic_logits"].shape
        TensorShape([1, 17, 17, 19])
    """
    builder, arguments = find_variant(name)
    try:
        return builder(num_classes, norm, **{**arguments, **changes})
    except (TypeError, ValueError) as error:
        raise InputError(f"model {name!r}: {error}") from None
