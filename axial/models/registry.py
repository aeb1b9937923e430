"""Every model by name; a variant is one line."""

from axial.errors import InputError, nearest
from axial.layers.batch_norm import BatchNormConfig
from axial.models.axial_resnet import axial_resnet
from axial.models.panoptic_deeplab import PanopticDeepLab


def axial_deeplab(
    num_classes,
    norm,
    width=1.0,
    output_stride=16,
    span=65,
    decoder_width=1.0,
    projection=None,
    inner_norm=False,
    **backbone,
):
    """Axial-DeepLab: `axial_resnet` with the DeepLab stem under `PanopticDeepLab`."""
    resnet = axial_resnet(width, output_stride=output_stride, span=span, norm=norm, **backbone)
    return PanopticDeepLab(
        resnet,
        num_classes,
        norm,
        output_stride,
        decoder_width,
        projection,
        inner_norm,
        name="axial_deeplab",
    )


VARIANTS = {
    # Axial-DeepLab of the paper (Sec. 3.2, Tables 2 to 9).
    "axial_deeplab_s": (axial_deeplab, dict(width=0.5)),
    "axial_deeplab_m": (axial_deeplab, dict(width=0.75)),
    "axial_deeplab_l": (axial_deeplab, dict(width=1.0)),
    "axial_deeplab_xl": (axial_deeplab, dict(width=2.0)),
    "axial_deeplab_s_os32": (axial_deeplab, dict(width=0.5, output_stride=32)),
    "axial_deeplab_m_os32": (axial_deeplab, dict(width=0.75, output_stride=32)),
    "axial_deeplab_l_os32": (axial_deeplab, dict(width=1.0, output_stride=32)),
    "axial_deeplab_xl_os32": (axial_deeplab, dict(width=2.0, output_stride=32)),
    # Ours, for laptops and tests.
    "axial_deeplab_w025": (axial_deeplab, dict(width=0.25)),
    "axial_deeplab_nano": (
        axial_deeplab,
        dict(width=0.25, repeats=(1, 1, 1, 1), heads=4, decoder_width=0.5),
    ),
}


def build_model(name, num_classes, norm=BatchNormConfig(), **changes):
    """A registered model, weights not yet made.

    Args:
        name: of `VARIANTS`.
        num_classes: from the `DatasetSpec`.
        norm: `BatchNormConfig`, or None for the folded model.
        **changes: arguments of the variant's builder that differ.

    Raises:
        InputError: an unknown name, with the nearest; an argument the builder refuses.

    Example:
        >>> model = build_model("axial_deeplab_nano", num_classes=19)
        >>> model(tf.zeros([1, 65, 65, 3]))["semantic_logits"].shape
        TensorShape([1, 17, 17, 19])
    """
    if name not in VARIANTS:
        raise InputError(f"no model is called {name!r}{nearest(name, VARIANTS)}: {', '.join(VARIANTS)}")
    builder, arguments = VARIANTS[name]
    try:
        return builder(num_classes, norm, **{**arguments, **changes})
    except (TypeError, ValueError) as error:
        raise InputError(f"model {name!r}: {error}") from None
