"""Counts the GFLOPs of the spatial-attention study's Tables 2 and 3 and Fig. 3, beside the published ones (minutes).

%s --markdown=experiments/results/study.md --figure=experiments/study.png

study_published.csv has the figures of Tables 2 and 3 of Zhu et al., ICCV 2019. experiments/study.csv has the scores of
our own runs. One FLOP is one multiply-add. A window is the kernel size (n_k) in Table 3.

`module` computes GFLOPs from the paper's equations, at the feature map sizes of the paper's networks. The column "as
shipped" counts the traced operations of our layers. These rules reproduce the published differences between networks:

- Batch norms, activations, softmax, bilinear sampling and the convolution that predicts offsets do not count.
- Each relative offset is projected once, from an encoding with as many channels as the features.
- Term E2 adds no product if E1 is on, because the query is multiplied by key + position. Without E1, the positions of
  rows and columns have separate products with the query.
- Attention type 0010 pools the values to one vector for each head, and projects this vector at every position.
- A window has n x n keys for every query, including keys outside the map.

For detection and segmentation, only the GFLOPs that a mechanism adds to the plain network are compared, because the
totals of our plain networks differ from the published totals. For translation, the GFLOPs of the whole network without
its embeddings and logits are compared.
"""

import dataclasses
import functools
import math

import tensorflow as tf

from axial.analysis.counts import trace
from axial.analysis.multiply_adds import count_multiply_adds, total
from axial.cli import app, flags
from axial.cli.flags import Flags
from axial.io import show
from axial.io.write import write_whole
from axial.layers.conv import Conv
from axial.layers.spatial_attention.attended import Mechanism
from axial.layers.spatial_attention.attention_terms import SETTINGS, Terms
from axial.layers.spatial_attention.deformable_conv import DeformableConv, DeformableConv1D
from axial.layers.spatial_attention.generalized_attention import TEXT, VISION
from axial.models.registry import find_variant
from pages import MARKDOWN, write_block
from published import by_commands, command, publish, read_lines, start_command

TASKS = ("detection", "segmentation", "nmt")
FIGURE_3 = "Fig. 3"
MEMORY = "nmt encoder-decoder"  # task of Fig. 3 that varies encoder-decoder attention; self-attention is 1111
SCORES = {"detection": "box mAP", "segmentation": "mIoU", "nmt": "BLEU"}
HEADS, GROUPS = 8, 16
PLAIN = "none", None, False  # key (setting, window, deformable) of a network without a mechanism
TOKENS, CHANNELS, INNER, LAYERS = 50, 512, 2048, 6  # the base Transformer; source and target have 50 tokens each
# Feature maps with attention, for each task: (height, width), channels, number of attention modules, number of spatial
# layers that may be deformable. Detection has photos of 800x1333 pixels. Segmentation has crops of 768x768 at output
# stride 8, and one more attention module after the backbone. A sentence is a map with one column.
MAPS = {
    "detection": [((50, 84), 256, 6, 6), ((25, 42), 512, 3, 3)],
    "segmentation": [((96, 96), 256, 6, 6), ((96, 96), 512, 4, 3)],
    "nmt": [((TOKENS, 1), CHANNELS, 2 * LAYERS, 2 * LAYERS)],
    MEMORY: [((TOKENS, 1), CHANNELS, LAYERS, 0)],
}
# For each task: the recipe, its model without a mechanism, and the input size of the counts.
RECIPES = {
    "detection": ("coco/faster_rcnn.gin", "faster_rcnn_resnet_50", (800, 1344)),
    "segmentation": ("cityscapes/ccnet.gin", "ccnet_resnet_50", (768, 768)),
    "nmt": ("wmt14/transformer_base.gin", "transformer_base", None),
}
RECIPES[MEMORY] = RECIPES["nmt"]


def _key(line):
    """Key (setting, window, deformable) of a line of a CSV file."""
    return line["setting"], int(line["window"] or 0) or None, line["deformable"] == "yes"


PUBLISHED = {_key(line): line for line in read_lines("study_published.csv")}
OURS = read_lines("../study.csv")


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration of a task's network.

    Attributes:
        table: '2' or '3', or `FIGURE_3`, whose rows have only the GFLOPs that attention adds.
        task: one of `TASKS`; for Fig. 3 also `MEMORY`.
        setting: attention type (four bits), 'dynamic' or 'none'.
        window: side of the window or of the dynamic kernel, or None.
        deformable: whether the network has deformable convolutions.
    """

    table: str
    task: str
    setting: str
    window: int | None
    deformable: bool

    @property
    def key(self):
        """Key of the configuration: (setting, window, deformable)."""
        return self.setting, self.window, self.deformable

    @property
    def label(self):
        """The task, and the configuration as the paper writes it."""
        return f"{self.task} {self.configuration}"

    @property
    def configuration(self):
        """The configuration as the paper writes it."""
        text = "w/o" if self.setting == "none" else self.setting
        text += f" (n_k = {self.window})" if self.window else ""
        return text + " + deformable" * self.deformable

    def published(self, what):
        """Returns the published 'score' or 'gflops' of the whole network; None for Fig. 3."""
        return None if self.table == FIGURE_3 else float(PUBLISHED[self.key][f"{self.task}_{what}"])

    def added(self, shipped=False):
        """Returns the GFLOPs that the mechanism adds to the plain network, by `added_gflops`; None for `PLAIN`."""
        return None if self.key == PLAIN else added_gflops(self.task, *self.key, shipped=shipped)

    @property
    def gflops(self):
        """GFLOPs of our whole network in inference, by the rules above; None for Fig. 3."""
        return None if self.table == FIGURE_3 else plain_gflops(self.task) + (self.added() or 0)

    @property
    def added_published(self):
        """Published GFLOPs of the network minus the plain network's; None for the plain network and for Fig. 3."""
        if self.key == PLAIN or self.table == FIGURE_3:
            return None
        return self.published("gflops") - float(PUBLISHED[PLAIN][f"{self.task}_gflops"])

    @property
    def difference(self):
        """Our added GFLOPs minus the published added GFLOPs; None if `added_published` is None."""
        return None if self.added_published is None else self.added() - self.added_published

    @property
    def difference_whole(self):
        """Our GFLOPs of the whole network minus the published GFLOPs; None for Fig. 3."""
        return None if self.table == FIGURE_3 else self.gflops - self.published("gflops")

    @property
    def agrees(self):
        """Whether the added GFLOPs are within 0.1 of the published ones; for translation, whether the totals agree.

        None without a published figure, and for the plain networks of detection and segmentation.
        """
        if self.task == "nmt" and self.table != FIGURE_3:
            return f"{self.gflops:.1f}" == f"{self.published('gflops'):.1f}"
        return None if self.difference is None else abs(self.difference) <= 0.1

    @property
    def scores_ours(self):
        """Scores of our own runs, like '72.1, 71.9 on CamVid by ccnet_nano'; '' if there are none."""
        scores = {}
        for line in OURS:
            if (line["task"], _key(line)) == (self.task, self.key):
                scores.setdefault(f"{line['data']} by {line['model']}", []).append(line["score"])
        return "; ".join(f"{', '.join(values)} on {run}" for run, values in scores.items())

    def arguments(self):
        """Returns the dict of model arguments that turn the recipe's model into the row's model."""
        if self.task == MEMORY:
            return {"memory": self.setting}
        arguments = {} if self.window is None else {"window": self.window}
        if self.task == "nmt":
            sides = ("encoder", "decoder")
            arguments |= dict.fromkeys(sides, self.setting)
            return arguments | {f"{side}_deformable": True for side in sides if self.deformable}
        arguments |= {} if self.setting == "none" else {"mechanism": self.setting}
        return arguments | ({"spatial": "deformable"} if self.deformable else {})

    def commands(self):
        """Returns the tuple of the commands that train the row's network.

        For every mechanism, detection and segmentation first train a plain ResNet-50 on ImageNet (Sec. 4.1).
        """
        recipe, model, size = RECIPES[self.task]
        changes, flags, start = self.arguments(), [f"--gin_file={recipe}"], ()
        if changes:
            flags.append(f"--gin_binding=ModelConfig.arguments = {changes}")
        if size:
            flags.append("--gin_binding=INIT = 'CHECKPOINT'")
            start = (start_command(model),)
        return (*start, command(flags))


ROWS = [Row(line["table"], task, *key) for key, line in PUBLISHED.items() for task in TASKS]
ROWS += [Row(FIGURE_3, task, setting, None, False) for task in (*TASKS, MEMORY) for setting in SETTINGS]


# === Networks ===


@functools.cache
def plain_gflops(task):
    """Returns the GFLOPs of inference with a task's plain network. The canvas of detection has 800x1344 pixels."""
    if task == "nmt":
        feed_forward = 2 * TOKENS * CHANNELS * INNER
        return LAYERS * (2 * feed_forward + module("1111", (TOKENS, 1), CHANNELS)) / 1e9
    _, name, size = RECIPES[task]
    _, graph, _ = trace(name, find_variant(name).classes, *size)
    return total(p for p in count_multiply_adds(graph) if "auxiliary_head" not in p.name) / 1e9


def added_gflops(task, setting, window, deformable, *, shipped):
    """Returns the GFLOPs that a mechanism adds to a task's plain network.

    Args:
        task, setting, window, deformable: see `Row`.
        shipped: whether to count the traced operations of our layers instead of the paper's equations.
    """
    added = 0
    for size, channels, modules, convolutions in MAPS[task]:
        if setting != "none":
            added += modules * (shipped_module if shipped else module)(setting, size, channels, window)
        if deformable:
            added += convolutions * _deformed(size, channels, shipped)
    return added / 1e9


@functools.cache
def _deformed(size, channels, shipped):
    """Returns the multiply-adds that a deformable convolution adds to a network.

    In a Transformer, the convolution is an additional layer. Elsewhere it replaces a 3x3 convolution, which adds 0 by
    the equations.
    """
    if size[1] == 1:  # a sequence: the kernel has three taps
        return traced(DeformableConv1D(channels, 3), [1, size[0], channels]) if shipped else 3 * size[0] * channels**2
    if not shipped:
        return 0
    plain, moved = (traced(make(channels, 3, None), [1, *size, channels]) for make in (Conv, DeformableConv))
    return moved - plain


# === Modules ===


def module(setting, size, channels, window=None):
    """Returns the multiply-adds of attention (Eq. 8) or dynamic convolution (Eq. 5 to 7) on a feature map.

    The rules of the count are in this file's docstring.

    Args:
        setting: attention type (four bits) or 'dynamic'.
        size: (height, width) of the map; a sequence has width 1.
        channels: channels of the map.
        window: side of the window or of the dynamic kernel.
    """
    sides = size if size[1] > 1 else size[:1]
    keys_along = [window or side for side in sides]
    pixels, keys, square = math.prod(size), math.prod(keys_along), channels**2
    if setting == "dynamic":  # projections of value and gate, kernels of the groups, weighted sums, output projection
        return pixels * (2 * square + keys * channels * GROUPS + keys * channels + square)
    terms, differences = Terms.of(setting), sum(window or 2 * side - 1 for side in sides)
    maps_of_keys = pixels if window else 1  # each window has different keys
    count = pixels * square * (2 + terms.needs_query + (terms.query_key or terms.key))  # values and output always count
    count += differences * square if terms.needs_position else 0
    if terms.query_key:
        count += pixels * keys * channels
    elif terms.query_position:
        count += pixels * sum(keys_along) * channels
    count += maps_of_keys * keys * channels if terms.key else 0
    count += differences * channels if terms.position else 0
    return count + (maps_of_keys if terms.key_only else pixels) * keys * channels  # weighted sums of the values


@functools.cache
def shipped_module(setting, size, channels, window):
    """Returns the multiply-adds of our traced layer. Args: see `module`."""
    axes = 1 if size[1] == 1 else 2
    layer = Mechanism(setting, HEADS, window=window, groups=GROUPS).layer(**(TEXT if axes == 1 else VISION))
    return traced(layer, [1, *size[:axes], channels])


def traced(layer, shape):
    """Returns the multiply-adds of layer(x) for an x with this shape. The layer is traced and does not run."""
    with tf.Graph().as_default() as graph:
        tf.autograph.experimental.do_not_convert(layer)(tf.compat.v1.placeholder(tf.float32, shape))
    return total(count_multiply_adds(graph))


# === Results ===

COLUMNS = ("table", "task", "setting", "GFLOPs added", "added, published", "difference", "added, as shipped")
COLUMNS += ("whole network", "whole, published", "difference", "published score", "our score")


def cells(row):
    """Returns the strings of a row, in the order of `COLUMNS`."""
    digits = ".3f" if row.table == FIGURE_3 else ".2f"
    numbers = (
        *((row.added(), digits), (row.added_published, ".1f"), (row.difference, "+.2f"), (row.added(True), digits)),
        *((row.gflops, ".2f"), (row.published("gflops"), ".1f"), (row.difference_whole, "+.2f")),
    )
    texts = ("" if value is None else format(value, form) for value, form in numbers)
    score = "" if row.table == FIGURE_3 else f"{row.published('score')} {SCORES[row.task]}"
    return row.table, row.task, row.configuration, *texts, score, row.scores_ours


def agreement():
    """Returns lines that name the rows that differ from the published GFLOPs, and the totals of our plain networks."""
    lines = []
    for task in TASKS:
        pairs = [row for row in ROWS if row.task == task and row.agrees is not None]
        whole = task == "nmt"
        apart = [
            (row.configuration, row.difference_whole if whole else row.difference) for row in pairs if not row.agrees
        ]
        missed = ", ".join(f"{label} ({difference:+.2f})" for label, difference in apart)
        rule = "whole networks have the printed digit" if whole else "add what is published, within 0.1"
        lines.append(f"{task}: {len(pairs) - len(apart)} of {len(pairs)} {rule}{f'; not {missed}' if missed else ''}")
    lines += [
        f"{row.task}: our network without a mechanism has {row.gflops:.2f} GFLOPs, the published one "
        f"{row.published('gflops')}: totals are not compared"
        for row in ROWS
        if row.task != "nmt" and row.key == PLAIN
    ]
    return lines


def markdown(rows):
    """Returns a Markdown table of the rows' cells, followed by the lines of `agreement`."""
    notes = [f"- {show.markdown(line)}" for line in agreement()]
    return "\n".join(["", *show.markdown_table(COLUMNS, rows), "", *notes, ""])


def write_figure(path):
    """Draws published accuracy over counted GFLOPs, with one plot for each task, as in the paper's Fig. 3.

    Markers distinguish the mechanisms. Labels give the attention type, or the side of the window or kernel.
    """
    from matplotlib.figure import Figure

    kinds = {
        "w/o": ("*", lambda row: row.setting == "none" and not row.deformable),
        "Transformer attention": ("o", lambda row: row.setting in SETTINGS and not (row.window or row.deformable)),
        "0100 in a window": ("s", lambda row: row.setting in SETTINGS and row.window),
        "dynamic convolution": ("^", lambda row: row.setting == "dynamic"),
        "with deformable convolution": ("D", lambda row: row.deformable),
    }
    figure = Figure(figsize=(18, 7.5), layout="constrained")
    for task, axes in zip(TASKS, figure.subplots(1, len(TASKS))):
        rows = [row for row in ROWS if row.task == task and row.table != FIGURE_3]
        for kind, (marker, belongs) in kinds.items():
            members = [row for row in rows if belongs(row)]
            axes.plot(
                [r.gflops for r in members], [r.published("score") for r in members], marker, label=show.drawn(kind)
            )
            labels = {}  # rows with the same score and about the same GFLOPs share a label
            for row in members:
                name = "w/o" if row.setting == "none" else str(row.window or row.setting)
                labels.setdefault((float(f"{row.gflops:.2g}"), row.published("score")), []).append((row.gflops, name))
            for (_, score), points in labels.items():
                names = ", ".join(name for _, name in points)
                axes.annotate(show.drawn(f" {names}"), (points[0][0], score), fontsize=6, rotation=20)
        lowest, second, *_, highest = sorted(row.published("score") for row in rows)
        if second - lowest > 2 * (highest - second):  # an outlier far below would squeeze the other rows together
            axes.set_ylim(second - 0.1, highest + 0.1)
        axes.set(xlabel="GFLOPs, counted", ylabel=show.drawn(f"{SCORES[task]}, published"), title=show.drawn(task))
        axes.grid(alpha=0.3)
        axes.margins(x=0.25)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(kinds))
    write_whole(path, lambda partial: figure.savefig(partial, dpi=100))


class Study(Flags):
    markdown = MARKDOWN
    figure = flags.FIGURE


def _main(given):
    if given.markdown:
        write_block(given.markdown, "study")
    show.say("counting the settings of the spatial-attention study: a minute", error=True)
    results = list(map(cells, show.progress(ROWS, unit="row")))
    show.print_table(COLUMNS, results)
    publish("study", agreement(), by_commands(ROWS), markdown(results), given.markdown)
    if given.figure:
        write_figure(given.figure)


if __name__ == "__main__":
    app.run({"": (Study, _main)})
