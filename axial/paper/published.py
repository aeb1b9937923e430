"""The rows of the paper's tables: the published figures, the model of each row, and the command that trains it.

All figures are copied from the paper (Axial-DeepLab, arXiv:2003.07853). All scores are the authors'.
"""

import dataclasses

from axial.models.registry import plain_classifier

CITYSCAPES, COCO, MAPILLARY = (1025, 2049), (1025, 1025), (2177, 2177)
SCALES = {COCO: (0.5, 0.75, 1, 1.25, 1.5)}  # of multi-scale rows; the recipes name their sources
SCALES[MAPILLARY] = SCALES[CITYSCAPES] = (*SCALES[COCO], 1.75, 2)
IMAGENET = (224, 224)
DATA = {CITYSCAPES: "cityscapes", COCO: "coco", MAPILLARY: "mapillary", IMAGENET: "imagenet"}
LEAVES = {  # models of a data set that have a gin file of their own
    "coco": ("axial_deeplab_s", "axial_deeplab_m", "axial_deeplab_l", "axial_deeplab_xl"),
    "cityscapes": ("axial_deeplab_s", "axial_deeplab_m", "axial_deeplab_l", "axial_deeplab_xl"),
    "mapillary": ("axial_deeplab_l", "axial_deeplab_xl"),
    "imagenet": (
        *("axial_resnet_s", "axial_resnet_m", "axial_resnet_l"),
        *("full_axial_resnet_s", "full_axial_resnet_m", "full_axial_resnet_l"),
        *(f"axial_resnet_{size}_deeplab_stem" for size in ("s", "m", "l", "xl")),
        *(f"resnet_{layers}_deeplab_stem" for layers in (50, 101)),
    ),
}
# The paper trains classifiers on 128 TPU cores. With this flag each of 8 cores computes as many photos at a time.
ON_8_CORES = "--gin_binding=TrainingConfig.accumulate = 16"
FIGURE = "Fig. 3"  # its rows are those of no table: the paper draws their accuracies and prints none
TITLES = {
    1: "ImageNet val",
    2: "COCO val",
    3: "COCO test-dev",
    4: "Mapillary Vistas val",
    5: "Cityscapes val and test",
    6: "ablation of attention, Cityscapes val",
    7: "ablation of the span, Cityscapes val",
    8: "runtime of one 224 x 224 image on a V100",
    9: "ablation of output stride and decoder, Cityscapes val",
    10: "scaling, ImageNet val",
    FIGURE: "networks over widths, ImageNet val; Tables 1 and 10 have the others",
}
# Titles of the scores, in the order of the columns. 'ms_quoted' are milliseconds that the paper quotes from its
# reference [7], measured on another GPU with other code.
SCORES = {
    "top1": "Top-1",
    "pq": "PQ",
    "pq_things": "PQ things",
    "pq_stuff": "PQ stuff",
    "ap": "AP",
    "miou": "mIoU",
    "ms": "ms",
    "ms_quoted": "ms, quoted from [7]",
}


def command(flags, data="DATA", run="RUN"):
    """The command of axial-train with some flags, 'NAME=VALUE' each."""
    quoted = [f'--gin_binding="{flag.partition("=")[2]}"' if "binding" in flag else flag for flag in flags]
    return " ".join(["axial-train", *quoted, f"--data_dir={data} --model_dir={run} --strategy=tpu"])


def classifier_flags(model, arguments):
    """Tuple of the flags of axial-train that train a classifier, with further arguments of its model, on ImageNet."""
    changes = (f"--gin_binding=ModelConfig.arguments = {arguments}",) if arguments else ()
    if model in LEAVES["imagenet"]:
        return (f"--gin_file=imagenet/{model}.gin", *changes)
    return ("--gin_file=imagenet/classification.gin", f"--gin_binding=MODEL = {model!r}", *changes)


def start_command(model):
    """The command that makes the CHECKPOINT on ImageNet which a model's backbone starts from."""
    return command(classifier_flags(*plain_classifier(model)), "IMAGENET_DATA", "CHECKPOINT")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of one table.

    Attributes:
        table: its number, or `FIGURE`.
        row: the paper's name of the row, with its flags.
        model: name in the registry; None where only the published figures are shown.
        params, macs: published parameters in millions and multiply-adds in billions; None where the paper prints none.
        scores: dict of published scores, by the names of `SCORES`.
        image: (height, width) of the input.
        multi_scale: whether inference averages over scales and mirror images.
        after: data set that the model was trained on before this one, '' for none.
        arguments: tuple of pairs (name, value), further arguments of the model.
        inference_stride: output stride of inference, where it is another than in training.
    """

    table: int | str
    row: str
    model: str | None
    params: float | None
    macs: float | None
    scores: dict
    image: tuple
    multi_scale: bool = False
    after: str = ""
    arguments: tuple = ()
    inference_stride: int | None = None

    @property
    def traced(self):
        """Arguments of `tables.count` for this row, hashable."""
        stride = (("output_stride", self.inference_stride),) if self.inference_stride else ()
        return self.model, self.canvas, None, self.arguments + stride

    @property
    def canvas(self):
        """The size at which the model is traced.

        On ImageNet it is the image's size. The published multiply-adds of segmentation are those of the Cityscapes
        image, times the ratio of pixels for other data sets and scales. They match maps of 256 x 512, 128 x 256 and
        64 x 128. For Xception-71 they match maps with one more pixel along each axis.
        """
        if self.image == IMAGENET:
            return IMAGENET
        return CITYSCAPES if "xception" in self.model else (1024, 2048)

    @property
    def factor(self):
        """Pixels of all images of a prediction, divided by those of the Cityscapes image; 1 on ImageNet."""
        if self.image == IMAGENET:
            return 1.0
        images = [self.image]
        if self.multi_scale:
            images = 2 * [tuple(int((side - 1) * scale) + 1 for side in self.image) for scale in SCALES[self.image]]
        return sum(h * w for h, w in images) / (CITYSCAPES[0] * CITYSCAPES[1])

    @property
    def flags(self):
        """Tuple of the flags of axial-train that train the row's model; None without a model or a training.

        Segmentation starts from ImageNet (Sec. 4), or from Mapillary Vistas, which starts from ImageNet.
        """
        if self.model is None or self.table == 8:  # Table 8 measures the runtime
            return None
        data = DATA[self.image]
        if data == "imagenet":
            return classifier_flags(self.model, dict(self.arguments))
        init = f"--gin_binding=INIT = '{'MAPILLARY_RUN' if self.after else 'CHECKPOINT'}'"
        if self.model in LEAVES[data]:
            after = f"_{self.after}" if self.after else ""
            return (f"--gin_file={data}/{self.model}{after}.gin", init)
        recipe = next((size for size in LEAVES[data] if self.model.startswith(f"{size}_")), "panoptic")
        return (f"--gin_file={data}/{recipe}.gin", f"--gin_binding=MODEL = {self.model!r}", init)

    def commands(self, data="DATA", run="RUN"):
        """Tuple of the commands that train and score the row's model; () where `flags` is None.

        Each command makes the run that the next one names. Inference at another output stride is a command too.
        """
        if self.flags is None:
            return ()
        found = [command(self.flags, data, run)]
        if self.after:
            before = dataclasses.replace(self, image=MAPILLARY, after="", inference_stride=None)
            found = [*before.commands("MAPILLARY_DATA", "MAPILLARY_RUN"), *found]
        elif self.image != IMAGENET:
            found = [start_command(self.model), *found]
        if self.inference_stride:
            stride = f"ModelConfig.arguments = {{'output_stride': {self.inference_stride}}}"
            found += [f'axial-evaluate --model_dir={run} --split=test --submission_dir=FILES --gin_binding="{stride}"']
        return tuple(found)


def _table(number, image, names, *rows):
    """Rows of a table.

    Args:
        names: names of the scores.
        *rows: (row, model, params, macs, scores, options of `Row`).
    """
    made = []
    for name, model, params, macs, scores, *options in rows:
        found = {key: value for key, value in zip(names, scores) if value is not None}
        options = options[0] if options else {}
        made.append(Row(number, name, model, params=params, macs=macs, scores=found, image=image, **options))
    return made


_MS = {"multi_scale": True}
_MV = {"after": "mapillary"}
_MV_MS = {**_MV, **_MS}
_OS8 = {"inference_stride": 8}  # Sec. 4.4: the "trick of output stride 8 during inference on test set"
_XCEPTION = "panoptic_deeplab_xception_71_aspp"
_PQ = ("pq", "pq_things", "pq_stuff")
_CITY = ("pq", "ap", "miou")

ROWS = [
    *_table(
        1,
        IMAGENET,
        ("top1",),
        ("ResNet-50", "resnet_50", 25.6, 4.1, [76.9]),
        ("Conv-Stem + Attention", "attention_resnet_no_bn", 18.0, 3.5, [77.4]),
        ("Conv-Stem + Attention, BN", "attention_resnet", 18.0, 3.5, [77.7]),
        ("Conv-Stem + PS-Attention", "ps_attention_resnet_w100", 18.0, 3.7, [78.1]),
        ("Conv-Stem + Axial-Attention", "axial_resnet_s", 12.4, 2.8, [77.5]),
        ("LR-Net-50", None, 23.3, 4.3, [77.3]),
        ("Full Attention", "full_attention_resnet", 18.0, 3.6, [77.6]),
        ("Full Axial-Attention", "full_axial_resnet_s", 12.5, 3.3, [78.1]),
    ),
    *_table(
        2,
        COCO,
        _PQ,
        ("DeeperLab, Xception-71", None, None, None, [33.8]),
        ("SSAP, ResNet-101, MS", None, None, None, [36.5]),
        ("Panoptic-DeepLab, Xception-71", _XCEPTION, 46.7, 274.0, [39.7, 43.9, 33.2]),
        ("Panoptic-DeepLab, Xception-71, MS", _XCEPTION, 46.7, 3081.4, [41.2, 44.9, 35.7], _MS),
        ("Axial-DeepLab-S", "axial_deeplab_s", 12.1, 110.4, [41.8, 46.1, 35.2]),
        ("Axial-DeepLab-M", "axial_deeplab_m", 25.9, 209.9, [42.9, 47.6, 35.8]),
        ("Axial-DeepLab-L", "axial_deeplab_l", 44.9, 343.9, [43.4, 48.5, 35.6]),
        ("Axial-DeepLab-L, MS", "axial_deeplab_l", 44.9, 3867.7, [43.9, 48.6, 36.8], _MS),
    ),
    *_table(
        3,
        COCO,
        _PQ,
        ("TASCNet, ResNet-50", None, None, None, [40.7, 47.0, 31.0]),
        ("Panoptic-FPN, ResNet-101", None, None, None, [40.9, 48.3, 29.7]),
        ("AdaptIS, ResNeXt-101, MS", None, None, None, [42.8, 53.2, 36.7]),
        ("AUNet, ResNeXt-152", None, None, None, [46.5, 55.8, 32.5]),
        ("UPSNet, DCN-101, MS", None, None, None, [46.6, 53.2, 36.7]),
        ("Li et al., DCN-101", None, None, None, [47.2, 53.5, 37.7]),
        ("SpatialFlow, DCN-101, MS", None, None, None, [47.3, 53.5, 37.9]),
        ("SOGNet, DCN-101, MS", None, None, None, [47.8]),
        ("DeeperLab, Xception-71", None, None, None, [34.3, 37.5, 29.6]),
        ("SSAP, ResNet-101, MS", None, None, None, [36.9, 40.1, 32.0]),
        ("Panoptic-DeepLab, Xception-71, MS", _XCEPTION, None, None, [41.4, 45.1, 35.9], _MS),
        ("Axial-DeepLab-S", "axial_deeplab_s", None, None, [42.2, 46.5, 35.7]),
        ("Axial-DeepLab-M", "axial_deeplab_m", None, None, [43.2, 48.1, 35.9]),
        ("Axial-DeepLab-L", "axial_deeplab_l", None, None, [43.6, 48.9, 35.6]),
        ("Axial-DeepLab-L, MS", "axial_deeplab_l", None, None, [44.2, 49.2, 36.8], _MS),
    ),
    *_table(
        4,
        MAPILLARY,
        (*_PQ, "ap", "miou"),
        ("TASCNet", None, None, None, [32.6, 31.1, 34.4, 18.5]),
        ("TASCNet, MS", None, None, None, [34.3, 34.8, 33.6, 20.4]),
        ("AdaptIS", None, None, None, [35.9, 31.5, 41.9]),
        ("Seamless", None, None, None, [37.7, 33.8, 42.9, 16.4, 50.4]),
        ("DeeperLab", None, None, None, [32.0, None, None, None, 55.3]),
        ("Panoptic-DeepLab, Xception-71", _XCEPTION, 46.7, 1240.0, [37.7, 30.4, 47.4, 14.9, 55.4]),
        ("Panoptic-DeepLab, Xception-71, MS", _XCEPTION, 46.7, 31350.0, [40.3, 33.5, 49.3, 17.2, 56.8], _MS),
        ("Panoptic-DeepLab, HRNet-W48, MS", None, 71.7, 58470.0, [39.3, None, None, 17.2, 55.4]),
        ("Panoptic-DeepLab, Auto-XL++, MS", None, 72.2, 60550.0, [40.3, None, None, 16.9, 57.6]),
        ("Axial-DeepLab-L", "axial_deeplab_l", 44.9, 1550.0, [40.1, 32.7, 49.8, 16.7, 57.6]),
        ("Axial-DeepLab-L, MS", "axial_deeplab_l", 44.9, 39350.0, [41.1, 33.4, 51.3, 17.2, 58.4], _MS),
    ),
    *_table(
        5,
        CITYSCAPES,
        _CITY,
        ("val: AdaptIS, MS", None, None, None, [62.0, 36.3, 79.2]),
        ("val: SSAP, MS", None, None, None, [61.1, 37.3]),
        ("val: Panoptic-DeepLab", _XCEPTION, None, None, [63.0, 35.3, 80.5]),
        ("val: Panoptic-DeepLab, MS", _XCEPTION, None, None, [64.1, 38.5, 81.5], _MS),
        ("val: Axial-DeepLab-L", "axial_deeplab_l", None, None, [63.9, 35.8, 81.0]),
        ("val: Axial-DeepLab-L, MS", "axial_deeplab_l", None, None, [64.7, 37.9, 81.5], _MS),
        ("val: Axial-DeepLab-XL", "axial_deeplab_xl", None, None, [64.4, 36.7, 80.6]),
        ("val: Axial-DeepLab-XL, MS", "axial_deeplab_xl", None, None, [65.1, 39.0, 81.1], _MS),
        ("val: SpatialFlow, COCO, MS", None, None, None, [62.5]),
        ("val: Seamless, MV", None, None, None, [65.0, None, 80.7]),
        ("val: Panoptic-DeepLab, MV", _XCEPTION, None, None, [65.3, 38.8, 82.5], _MV),
        ("val: Panoptic-DeepLab, MV, MS", _XCEPTION, None, None, [67.0, 42.5, 83.1], _MV_MS),
        ("val: Axial-DeepLab-L, MV", "axial_deeplab_l", None, None, [66.5, 40.2, 83.2], _MV),
        ("val: Axial-DeepLab-L, MV, MS", "axial_deeplab_l", None, None, [67.7, 42.9, 83.8], _MV_MS),
        ("val: Axial-DeepLab-XL, MV", "axial_deeplab_xl", None, None, [67.8, 41.9, 84.2], _MV),
        ("val: Axial-DeepLab-XL, MV, MS", "axial_deeplab_xl", None, None, [68.5, 44.2, 84.6], _MV_MS),
        ("test: GFF-Net", None, None, None, [None, None, 82.3]),
        ("test: Zhu et al., C, V, MV", None, None, None, [None, None, 83.5]),
        ("test: AdaptIS", None, None, None, [None, 32.5]),
        ("test: UPSNet, COCO", None, None, None, [None, 33.0]),
        ("test: PANet, COCO", None, None, None, [None, 36.4]),
        ("test: PolyTransform, COCO", None, None, None, [None, 40.1]),
        ("test: SSAP", None, None, None, [58.9, 32.7]),
        ("test: Li et al.", None, None, None, [61.0]),
        ("test: Panoptic-DeepLab, OS 8", _XCEPTION, None, None, [62.3, 34.6, 79.4], _OS8),
        ("test: TASCNet, COCO", None, None, None, [60.7]),
        ("test: Seamless, MV", None, None, None, [62.6]),
        ("test: Li et al., COCO", None, None, None, [63.3]),
        ("test: Panoptic-DeepLab, MV, OS 8", _XCEPTION, None, None, [65.5, 39.0, 84.2], {**_MV, **_OS8}),
        ("test: Axial-DeepLab-L", "axial_deeplab_l", None, None, [62.7, 33.3, 79.5]),
        ("test: Axial-DeepLab-XL", "axial_deeplab_xl", None, None, [62.8, 34.0, 79.9]),
        ("test: Axial-DeepLab-L, MV", "axial_deeplab_l", None, None, [65.6, 38.1, 83.1], _MV),
        ("test: Axial-DeepLab-XL, MV", "axial_deeplab_xl", None, None, [66.6, 39.6, 84.1], _MV),
    ),
    *_table(
        6,
        CITYSCAPES,
        _CITY,
        ("ResNet-50", "panoptic_deeplab_resnet_50", 24.8, 374.8, [58.1, 30.0, 73.3]),
        ("ResNet-50, ASPP", "panoptic_deeplab_resnet_50_aspp", 30.0, 390.0, [59.8, 32.6, 77.8]),
        ("Attention", "panoptic_deeplab_attention", 17.3, 317.7, [58.7, 31.9, 75.8]),
        ("Attention, ASPP", "panoptic_deeplab_attention_aspp", 22.5, 332.9, [60.9, 30.0, 78.2]),
        ("PS-Attention", "panoptic_deeplab_ps_attention", 17.3, 326.7, [59.9, 32.2, 76.3]),
        ("PS-Attention, ASPP", "panoptic_deeplab_ps_attention_aspp", 22.5, 341.9, [61.5, 33.1, 79.1]),
        ("Axial-DeepLab-S", "axial_deeplab_s", 12.1, 220.8, [62.6, 34.9, 80.5]),
        ("Axial-DeepLab-M", "axial_deeplab_m", 25.9, 419.6, [63.1, 35.6, 80.3]),
        ("Axial-DeepLab-L", "axial_deeplab_l", 44.9, 687.4, [63.9, 35.8, 81.0]),
        ("Axial-DeepLab-XL", "axial_deeplab_xl", 173.0, 2446.8, [64.4, 36.7, 80.6]),
    ),
    *_table(
        7,
        CITYSCAPES,
        _CITY,
        ("ResNet-101", "panoptic_deeplab_resnet_101", 43.8, 530.0, [59.9, 31.9, 74.6]),
        ("Axial-ResNet-L, span 5", "axial_deeplab_l_span5", 44.9, 617.4, [59.1, 31.3, 74.5]),
        ("Axial-ResNet-L, span 9", "axial_deeplab_l_span9", 44.9, 622.1, [61.2, 31.1, 77.6]),
        ("Axial-ResNet-L, span 17", "axial_deeplab_l_span17", 44.9, 631.5, [62.8, 34.0, 79.5]),
        ("Axial-ResNet-L, span 33", "axial_deeplab_l_span33", 44.9, 650.2, [63.8, 35.9, 80.2]),
        ("Axial-ResNet-L, span 65", "axial_deeplab_l", 44.9, 687.4, [64.2, 36.3, 80.6]),
    ),
    *_table(
        8,
        IMAGENET,
        ("ms", "ms_quoted"),
        ("Axial-ResNet-L", "axial_resnet_l", None, None, [16.54]),
        # The paper does not say what it is.
        ("Stand-Alone-L (our guess: Conv-Stem + Attention)", "attention_resnet_no_bn", None, None, [18.05]),
        ("Xception-71", "xception_71", None, None, [24.85]),
        ("ResNet-101", "resnet_101", None, None, [10.08, 8.9]),
        ("ResNet-152", "resnet_152", None, None, [14.43, 14.31]),
        ("ResNeXt-101 (32x4d)", None, None, None, [None, 17.05]),
        ("SE-ResNet-101", None, None, None, [None, 15.10]),
        ("SE-ResNeXt-101 (32x4d)", None, None, None, [None, 24.96]),
        ("DenseNet-201 (k=32)", None, None, None, [None, 17.15]),
    ),
    *_table(
        9,
        CITYSCAPES,
        _CITY,
        ("Xception-71, ASPP, OS 16", _XCEPTION, 46.7, 547.7, [63.2, 35.0, 80.2]),
        ("Axial-ResNet-L, OS 16", "axial_deeplab_l", 44.9, 687.4, [63.9, 35.8, 81.0]),
        ("Axial-ResNet-L, OS 32", "axial_deeplab_l_os32", 45.2, 525.2, [63.9, 36.3, 80.9]),
        ("Axial-ResNet-L, OS 16, axial-decoder", "axial_deeplab_l_axial_decoder", 45.4, 722.7, [63.7, 36.9, 80.7]),
        ("Axial-ResNet-L, OS 32, axial-decoder", "axial_deeplab_l_os32_axial_decoder", 45.9, 577.8, [64.0, 37.1, 81.0]),
    ),
    *_table(
        10,
        IMAGENET,
        ("top1",),
        ("Conv-Stem + PS-Attention x0.5", "ps_attention_resnet_w050", 5.1, 1.2, [75.5]),
        ("Conv-Stem + PS-Attention x0.75", "ps_attention_resnet_w075", 10.5, 2.3, [77.4]),
        ("Conv-Stem + PS-Attention x1", "ps_attention_resnet_w100", 18.0, 3.7, [78.1]),
        ("Conv-Stem + PS-Attention x1.25", "ps_attention_resnet_w125", 27.5, 5.6, [78.5]),
        ("Conv-Stem + PS-Attention x1.5", "ps_attention_resnet_w150", 39.0, 7.8, [79.0]),
        ("Conv-Stem + Axial-Attention x0.375", "axial_resnet_w0375", 7.4, 1.8, [76.4]),
        ("Conv-Stem + Axial-Attention x0.5", "axial_resnet_s", 12.4, 2.8, [77.5]),
        ("Conv-Stem + Axial-Attention x0.75", "axial_resnet_m", 26.4, 5.7, [78.6]),
        ("Conv-Stem + Axial-Attention x1", "axial_resnet_l", 45.6, 9.6, [79.0]),
        ("Full Axial-Attention x0.5", "full_axial_resnet_s", 12.5, 3.3, [78.1]),
        ("Full Axial-Attention x0.75", "full_axial_resnet_m", 26.5, 6.8, [79.2]),
        ("Full Axial-Attention x1", "full_axial_resnet_l", 45.8, 11.6, [79.3]),
    ),
    *_table(
        FIGURE,
        IMAGENET,
        (),
        *(
            (f"{name} x{width:g}", model, None, None, [], {"arguments": (("width", width),)})
            for name, model in (
                ("ResNet-50", "resnet_50"),
                ("Conv-Stem + Attention", "attention_resnet_no_bn"),
                ("Full Attention", "full_attention_resnet"),
            )
            for width in (0.5, 0.75, 1.25, 1.5)  # those of PS-Attention in Table 10
        ),
    ),
]
