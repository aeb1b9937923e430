"""The rows of the paper's Tables 1, 2, 4, 6, 7, 8, 9 and 10: published figures, and the model of each.

Everything here but the models' names is copied from the paper. Scores are the authors', never ours.
"""

import dataclasses

CITYSCAPES, COCO, MAPILLARY = (1025, 2049), (1025, 1025), (2177, 2177)
COCO_SCALES = (0.5, 0.75, 1, 1.25, 1.5)
MAPILLARY_SCALES = (*COCO_SCALES, 1.75, 2)
IMAGENET = (224, 224)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of one table.

    Attributes:
        table: its number.
        row: what the paper calls it, flags included.
        model: of the registry; None where only the published figures are shown.
        params, macs: published, in millions and billions; None where the paper prints none.
        score: published; Top-1, PQ, or milliseconds in Table 8.
        image: (height, width) of the input; None without a model.
        scales: of multi-scale inference, each with its mirror image; () for single-scale.
    """

    table: int
    row: str
    model: str | None = None
    params: float | None = None
    macs: float | None = None
    score: float | None = None
    image: tuple | None = None
    scales: tuple = ()

    @property
    def metric(self):
        return {1: "Top-1", 8: "ms", 10: "Top-1"}.get(self.table, "PQ")

    @property
    def canvas(self):
        """The size at which the model is traced.

        On ImageNet that of the image. The published multiply-adds of segmentation are those of the
        Cityscapes image, times the ratio of pixels for the other data sets and scales. They are of
        maps of 256 x 512, 128 x 256 and 64 x 128, but for Xception-71 of one more on each side.
        """
        if self.image == IMAGENET:
            return IMAGENET
        return CITYSCAPES if "xception" in self.model else (1024, 2048)

    @property
    def factor(self):
        """Pixels of all the images of a prediction over those of the Cityscapes image."""
        if self.image == IMAGENET:
            return 1.0
        images = [self.image]
        if self.scales:

            def side(length, scale):
                return int((length - 1) * scale) + 1

            images = 2 * [(side(self.image[0], s), side(self.image[1], s)) for s in self.scales]
        return sum(h * w for h, w in images) / (CITYSCAPES[0] * CITYSCAPES[1])


def _table(number, image, *rows):
    return [Row(number, *row[:5], image if row[1] else None, *row[5:]) for row in rows]


ROWS = [
    *_table(
        1,
        IMAGENET,
        ("ResNet-50", "resnet_50", 25.6, 4.1, 76.9),
        ("Conv-Stem + Attention", "attention_resnet_no_bn", 18.0, 3.5, 77.4),
        ("Conv-Stem + Attention, BN", "attention_resnet", 18.0, 3.5, 77.7),
        ("Conv-Stem + PS-Attention", "ps_attention_resnet_w100", 18.0, 3.7, 78.1),
        ("Conv-Stem + Axial-Attention", "axial_resnet_s", 12.4, 2.8, 77.5),
        ("LR-Net-50", None, 23.3, 4.3, 77.3),
        ("Full Attention", "full_attention_resnet", 18.0, 3.6, 77.6),
        ("Full Axial-Attention", "full_axial_resnet_s", 12.5, 3.3, 78.1),
    ),
    *_table(
        2,
        COCO,
        ("DeeperLab, Xception-71", None, None, None, 33.8),
        ("SSAP, ResNet-101, MS", None, None, None, 36.5),
        ("Panoptic-DeepLab, Xception-71", "panoptic_deeplab_xception_71_aspp", 46.7, 274.0, 39.7),
        ("Panoptic-DeepLab, Xception-71, MS", "panoptic_deeplab_xception_71_aspp", 46.7, 3081.4, 41.2, COCO_SCALES),
        ("Axial-DeepLab-S", "axial_deeplab_s", 12.1, 110.4, 41.8),
        ("Axial-DeepLab-M", "axial_deeplab_m", 25.9, 209.9, 42.9),
        ("Axial-DeepLab-L", "axial_deeplab_l", 44.9, 343.9, 43.4),
        ("Axial-DeepLab-L, MS", "axial_deeplab_l", 44.9, 3867.7, 43.9, COCO_SCALES),
    ),
    *_table(
        4,
        MAPILLARY,
        ("TASCNet", None, None, None, 32.6),
        ("TASCNet, MS", None, None, None, 34.3),
        ("AdaptIS", None, None, None, 35.9),
        ("Seamless", None, None, None, 37.7),
        ("DeeperLab", None, None, None, 32.0),
        ("Panoptic-DeepLab, Xception-71", "panoptic_deeplab_xception_71_aspp", 46.7, 1240.0, 37.7),
        (
            "Panoptic-DeepLab, Xception-71, MS",
            "panoptic_deeplab_xception_71_aspp",
            46.7,
            31350.0,
            40.3,
            MAPILLARY_SCALES,
        ),
        ("Panoptic-DeepLab, HRNet-W48, MS", None, 71.7, 58470.0, 39.3),
        ("Panoptic-DeepLab, Auto-XL++, MS", None, 72.2, 60550.0, 40.3),
        ("Axial-DeepLab-L", "axial_deeplab_l", 44.9, 1550.0, 40.1),
        ("Axial-DeepLab-L, MS", "axial_deeplab_l", 44.9, 39350.0, 41.1, MAPILLARY_SCALES),
    ),
    *_table(
        6,
        CITYSCAPES,
        ("ResNet-50", "panoptic_deeplab_resnet_50", 24.8, 374.8, 58.1),
        ("ResNet-50, ASPP", "panoptic_deeplab_resnet_50_aspp", 30.0, 390.0, 59.8),
        ("Attention", "panoptic_deeplab_attention", 17.3, 317.7, 58.7),
        ("Attention, ASPP", "panoptic_deeplab_attention_aspp", 22.5, 332.9, 60.9),
        ("PS-Attention", "panoptic_deeplab_ps_attention", 17.3, 326.7, 59.9),
        ("PS-Attention, ASPP", "panoptic_deeplab_ps_attention_aspp", 22.5, 341.9, 61.5),
        ("Axial-DeepLab-S", "axial_deeplab_s", 12.1, 220.8, 62.6),
        ("Axial-DeepLab-M", "axial_deeplab_m", 25.9, 419.6, 63.1),
        ("Axial-DeepLab-L", "axial_deeplab_l", 44.9, 687.4, 63.9),
        ("Axial-DeepLab-XL", "axial_deeplab_xl", 173.0, 2446.8, 64.4),
    ),
    *_table(
        7,
        CITYSCAPES,
        ("ResNet-101", "panoptic_deeplab_resnet_101", 43.8, 530.0, 59.9),
        ("Axial-ResNet-L, span 5", "axial_deeplab_l_span5", 44.9, 617.4, 59.1),
        ("Axial-ResNet-L, span 9", "axial_deeplab_l_span9", 44.9, 622.1, 61.2),
        ("Axial-ResNet-L, span 17", "axial_deeplab_l_span17", 44.9, 631.5, 62.8),
        ("Axial-ResNet-L, span 33", "axial_deeplab_l_span33", 44.9, 650.2, 63.8),
        ("Axial-ResNet-L, span 65", "axial_deeplab_l", 44.9, 687.4, 64.2),
    ),
    *_table(
        8,
        IMAGENET,
        ("Axial-ResNet-L", "axial_resnet_l", None, None, 16.54),
        ("Stand-Alone-L", "attention_resnet_no_bn", None, None, 18.05),
        ("Xception-71", "xception_71", None, None, 24.85),
        ("ResNet-101", "resnet_101", None, None, 10.08),
        ("ResNet-152", "resnet_152", None, None, 14.43),
        ("ResNeXt-101 (32x4d)", None, None, None, 17.05),
        ("SE-ResNet-101", None, None, None, 15.10),
        ("SE-ResNeXt-101 (32x4d)", None, None, None, 24.96),
        ("DenseNet-201 (k=32)", None, None, None, 17.15),
    ),
    *_table(
        9,
        CITYSCAPES,
        ("Xception-71, ASPP, OS 16", "panoptic_deeplab_xception_71_aspp", 46.7, 547.7, 63.2),
        ("Axial-ResNet-L, OS 16", "axial_deeplab_l", 44.9, 687.4, 63.9),
        ("Axial-ResNet-L, OS 32", "axial_deeplab_l_os32", 45.2, 525.2, 63.9),
        ("Axial-ResNet-L, OS 16, axial-decoder", "axial_deeplab_l_axial_decoder", 45.4, 722.7, 63.7),
        ("Axial-ResNet-L, OS 32, axial-decoder", "axial_deeplab_l_os32_axial_decoder", 45.9, 577.8, 64.0),
    ),
    *_table(
        10,
        IMAGENET,
        ("Conv-Stem + PS-Attention x0.5", "ps_attention_resnet_w050", 5.1, 1.2, 75.5),
        ("Conv-Stem + PS-Attention x0.75", "ps_attention_resnet_w075", 10.5, 2.3, 77.4),
        ("Conv-Stem + PS-Attention x1", "ps_attention_resnet_w100", 18.0, 3.7, 78.1),
        ("Conv-Stem + PS-Attention x1.25", "ps_attention_resnet_w125", 27.5, 5.6, 78.5),
        ("Conv-Stem + PS-Attention x1.5", "ps_attention_resnet_w150", 39.0, 7.8, 79.0),
        ("Conv-Stem + Axial-Attention x0.375", "axial_resnet_w0375", 7.4, 1.8, 76.4),
        ("Conv-Stem + Axial-Attention x0.5", "axial_resnet_s", 12.4, 2.8, 77.5),
        ("Conv-Stem + Axial-Attention x0.75", "axial_resnet_m", 26.4, 5.7, 78.6),
        ("Conv-Stem + Axial-Attention x1", "axial_resnet_l", 45.6, 9.6, 79.0),
        ("Full Axial-Attention x0.5", "full_axial_resnet_s", 12.5, 3.3, 78.1),
        ("Full Axial-Attention x0.75", "full_axial_resnet_m", 26.5, 6.8, 79.2),
        ("Full Axial-Attention x1", "full_axial_resnet_l", 45.8, 11.6, 79.3),
    ),
]
