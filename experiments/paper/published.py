"""The rows of the paper's tables: the published figures, the model of each row, and the command that trains it.

All figures of published.csv are copied from the paper (Axial-DeepLab, arXiv:2003.07853). All scores are the authors'.
"""

import csv
import dataclasses
import os

from axial.io.paths import experiments_dir
from axial.io.show import say
from axial.io.write import write_block
from axial.models.registry import plain_classifier

CITYSCAPES, COCO, MAPILLARY = (1025, 2049), (1025, 1025), (2177, 2177)
SCALES = {COCO: (0.5, 0.75, 1, 1.25, 1.5)}  # of multi-scale rows; the recipes name their sources
SCALES[MAPILLARY] = SCALES[CITYSCAPES] = (*SCALES[COCO], 1.75, 2)
IMAGENET = (224, 224)
DATA = {CITYSCAPES: "cityscapes", COCO: "coco", MAPILLARY: "mapillary", IMAGENET: "imagenet"}
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


def nearest_leaf(data, model):
    """The gin file of a data set whose name is the most of a model's, without '.gin'; '' without any."""
    words = model.split("_")
    names = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((name for name in names if os.path.exists(f"{experiments_dir()}/{data}/{name}.gin")), "")


def classifier_flags(model, arguments):
    """Tuple of the flags of axial-train that train a classifier, with further arguments of its model, on ImageNet."""
    changes = (f"--gin_binding=ModelConfig.arguments = {arguments}",) if arguments else ()
    if nearest_leaf("imagenet", model) == model:
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
        label: the paper's name of the row, with its flags.
        model: name in the registry; None where only the published figures are shown.
        params, macs: published parameters in millions and multiply-adds in billions; None where the paper prints none.
        scores: dict of published scores, by the names of `SCORES`.
        image: (height, width) of the input.
        multi_scale: whether inference averages over scales and mirror images.
        after: data set that the model was trained on before this one, '' for none.
        arguments: tuple of pairs (name, value), further arguments of the model.
        inference_stride: output stride of inference, where it is another than in training. Sec. 4.4: the "trick of
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
        """Arguments of `counts.count` for this row, hashable."""
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
        leaf = nearest_leaf(data, self.model)
        if leaf == self.model:
            after = f"_{self.after}" if self.after else ""
            return (f"--gin_file={data}/{leaf}{after}.gin", init)
        return (f"--gin_file={data}/{leaf or 'panoptic'}.gin", f"--gin_binding=MODEL = {self.model!r}", init)

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


def _row(line):
    """The `Row` of a line of published.csv, a dict."""
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
    """List of dicts, the lines of a CSV beside this file."""
    with open(os.path.join(os.path.dirname(__file__), name), newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def by_commands(rows):
    """dict from tuples of commands to the labels of the rows that they train, each once."""
    found = {}
    for row in rows:
        if commands := row.commands():
            found.setdefault(commands, {})[row.label] = None
    return found


def publish(page, agreement, commands, markdown, path):
    """Says how far our counts agree with the published ones and what trains the rows, and writes the page `path`.

    Args:
        page: name of the block of the page.
        agreement: lines.
        commands: see `by_commands`.
        markdown: text of the block.
    """
    say(*agreement)
    for own, labels in commands.items():
        say(f"{'; '.join(labels)}:", *(f"    {text}" for text in own))
    if path:
        write_block(path, page, markdown)


ROWS = list(map(_row, read_lines("published.csv")))
