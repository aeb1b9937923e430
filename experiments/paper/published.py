"""Rows of the paper's tables: the published figures, the model of each row, and the commands that train the model.

All figures in published.csv are copied from the paper (Axial-DeepLab, arXiv:2003.07853). The authors measured all
scores.
"""

import csv
import dataclasses
import os

from axial.errors import InputError
from axial.io.paths import experiments_dir
from axial.io.show import say
from axial.models.classifier import Classifier
from axial.models.registry import FREE, PLAIN, VARIANTS, find_variant
from pages import write_block

CITYSCAPES, COCO, MAPILLARY = (1025, 2049), (1025, 1025), (2177, 2177)
SCALES = {COCO: (0.5, 0.75, 1, 1.25, 1.5)}  # scales of multi-scale inference; the recipes cite their sources
SCALES[MAPILLARY] = SCALES[CITYSCAPES] = (*SCALES[COCO], 1.75, 2)
IMAGENET = (224, 224)
DATA = {CITYSCAPES: "cityscapes", COCO: "coco", MAPILLARY: "mapillary", IMAGENET: "imagenet"}
# The paper trains classifiers on 128 TPU cores. With this flag, the micro-batches on 8 cores have the size of a core's
# batch in the paper.
ON_8_CORES = "--gin_binding=TrainingConfig.accumulate = 16"
FIGURE = "Fig. 3"  # the paper only plots the accuracies of these rows, and has no table of them
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
# Titles of the scores, in the order of the columns. The paper quotes 'ms_quoted', in milliseconds, from its reference
# [7], which measures different code on a different GPU.
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
    """Returns the axial-train command line with these flags, each '--NAME=VALUE'."""
    quoted = [f'--gin_binding="{flag.partition("=")[2]}"' if "binding" in flag else flag for flag in flags]
    return " ".join(["axial-train", *quoted, f"--data_dir={data} --model_dir={run} --strategy=tpu"])


def nearest_leaf(data, model):
    """Returns the name of the data set's gin file, without '.gin', that is the longest prefix of `model`, or ''."""
    words = model.split("_")
    names = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((name for name in names if os.path.exists(f"{experiments_dir()}/{data}/{name}.gin")), "")


def classifier_flags(model, arguments):
    """Returns the tuple of axial-train's flags that train the classifier `model`, with `arguments`, on ImageNet."""
    changes = (f"--gin_binding=ModelConfig.arguments = {arguments}",) if arguments else ()
    if nearest_leaf("imagenet", model) == model:
        return (f"--gin_file=imagenet/{model}.gin", *changes)
    return ("--gin_file=imagenet/classification.gin", f"--gin_binding=MODEL = {model!r}", *changes)


def plain_classifier(name):
    """Returns (name, further arguments) of the ImageNet classifier whose weights a model's backbone starts from.

    The classifier has the model's backbone without the modules that start as the identity. Its weights have the same
    shapes; span and output stride may differ. Among several classifiers, the one with the fewest further arguments is
    returned.

    Example:
        >>> plain_classifier("faster_rcnn_attended_resnet_50_0010_deformable")
        ('resnet_50', {})
        >>> plain_classifier("panoptic_deeplab_ps_attention")
        ('ps_attention_resnet_w100', {'stem': 'deeplab'})

    Raises:
        InputError: no model has this name, or no classifier has the model's backbone.
    """
    variant = find_variant(name)
    backbone, target = PLAIN.get(variant.backbone, variant.backbone), variant.backbone_arguments({})
    changes = {}
    for other, classifier in VARIANTS.items():
        if classifier.task == Classifier.task and classifier.backbone is backbone:
            given = classifier.backbone_arguments({})
            changes[other] = {k: target[k] for k, value in given.items() if k not in FREE and target[k] != value}
    if not changes:
        raise InputError(f"model {name!r}: no classifier has its backbone")
    return min(changes.items(), key=lambda item: len(item[1]))


def start_command(model):
    """Returns the command that trains CHECKPOINT, the ImageNet classifier that initialises a model's backbone."""
    return command(classifier_flags(*plain_classifier(model)), "IMAGENET_DATA", "CHECKPOINT")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of one table.

    Attributes:
        table: number of the table, or `FIGURE`.
        label: the paper's name of the row, with its options.
        model: name of the model in the registry; None if only the published figures are shown.
        params, macs: published parameters in millions and multiply-adds in billions, each None if not published.
        scores: dict from names in `SCORES` to published scores.
        image: (height, width) of the input.
        multi_scale: whether inference averages over scales and mirror images.
        after: data set of the earlier training that initialises the weights; '' for none.
        arguments: tuple of pairs (name, value) of additional arguments of the model.
        inference_stride: output stride of inference, None if it equals the training's. Sec. 4.4 names the "trick of
            output stride 8 during inference on test set".
    """

    table: int | str
    label: str
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
        """The arguments of `counts.count` for this row, as a hashable tuple."""
        stride = (("output_stride", self.inference_stride),) if self.inference_stride else ()
        return self.model, self.canvas, None, self.arguments + stride

    @property
    def canvas(self):
        """The input size (height, width) at which multiply-adds are counted.

        On ImageNet it is the image's size. For segmentation, the paper counts the multiply-adds of a Cityscapes image,
        and scales them by the number of pixels for other data sets and scales. The paper's counts match feature maps of
        256 x 512, 128 x 256 and 64 x 128. For Xception-71 they match maps with one more pixel along each axis.
        """
        if self.image == IMAGENET:
            return IMAGENET
        return CITYSCAPES if "xception" in self.model else (1024, 2048)

    @property
    def factor(self):
        """Pixels of all scaled and mirrored copies of the input / pixels of a Cityscapes image; 1 on ImageNet."""
        if self.image == IMAGENET:
            return 1.0
        images = [self.image]
        if self.multi_scale:
            images = 2 * [tuple(int((side - 1) * scale) + 1 for side in self.image) for scale in SCALES[self.image]]
        return sum(h * w for h, w in images) / (CITYSCAPES[0] * CITYSCAPES[1])

    @property
    def flags(self):
        """The tuple of axial-train's flags that train the row's model, or None if the row has no model or no training.

        Segmentation starts from ImageNet weights (Sec. 4), or from Mapillary Vistas weights, which start from ImageNet.
        """
        if self.model is None or self.table == 8:  # Table 8 measures the runtime
            return None
        data = DATA[self.image]
        if data == "imagenet":
            return classifier_flags(self.model, dict(self.arguments))
        init = f"--gin_binding=INIT = '{'MAPILLARY_RUN' if self.after else 'CHECKPOINT'}'"
        leaf = nearest_leaf(data, self.model)
        if leaf == self.model:
            after = f"_{self.after}" if self.after else ""
            return (f"--gin_file={data}/{leaf}{after}.gin", init)
        return (f"--gin_file={data}/{leaf or 'panoptic'}.gin", f"--gin_binding=MODEL = {self.model!r}", init)

    def commands(self, data="DATA", run="RUN"):
        """Returns the tuple of the commands that train and score the row's model, or () if `flags` is None.

        Each command makes the run that the next command starts from. Inference at another output stride has its own
        command.
        """
        if self.flags is None:
            return ()
        chain = [command(self.flags, data, run)]
        if self.after:
            before = dataclasses.replace(self, image=MAPILLARY, after="", inference_stride=None)
            chain = [*before.commands("MAPILLARY_DATA", "MAPILLARY_RUN"), *chain]
        elif self.image != IMAGENET:
            chain = [start_command(self.model), *chain]
        if self.inference_stride:
            stride = f"ModelConfig.arguments = {{'output_stride': {self.inference_stride}}}"
            chain += [f'axial-evaluate --model_dir={run} --split=test --submission_dir=FILES --gin_binding="{stride}"']
        return tuple(chain)


def _row(line):
    """Returns the `Row` of a line of published.csv. `line` is a dict from column to text."""
    numbers = {name: float(line[name]) for name in ("params", "macs", "width", *SCORES) if line[name]}
    return Row(
        table=int(line["table"]) if line["table"].isdigit() else line["table"],
        label=line["row"],
        model=line["model"] or None,
        params=numbers.get("params"),
        macs=numbers.get("macs"),
        scores={name: numbers[name] for name in SCORES if name in numbers},
        image=next(image for image, data in DATA.items() if data == line["image"]),
        multi_scale=line["multi_scale"] == "yes",
        after=line["after"],
        arguments=(("width", numbers["width"]),) if line["width"] else (),
        inference_stride=int(line["inference_stride"]) if line["inference_stride"] else None,
    )


def read_lines(name):
    """Returns the lines of a CSV file in this folder, as a list of dicts."""
    with open(os.path.join(os.path.dirname(__file__), name), newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def by_commands(rows):
    """Returns a dict from each tuple of commands to the labels of the rows that the commands train."""
    labels = {}
    for row in rows:
        if commands := row.commands():
            labels.setdefault(commands, {})[row.label] = None
    return labels


def publish(page, agreement, commands, markdown, path):
    """Prints the agreement with the published counts and the commands of the rows, and writes a block of a page.

    Args:
        page: name of the block in the page.
        agreement: list of lines of text.
        commands: see `by_commands`.
        markdown: text of the block.
        path: path of the page; None to write no page.
    """
    say(*agreement)
    for sequence, labels in commands.items():
        say(f"{'; '.join(labels)}:", *(f"    {text}" for text in sequence))
    if path:
        write_block(path, page, markdown)


ROWS = list(map(_row, read_lines("published.csv")))
