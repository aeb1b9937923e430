"""Counts the GFLOPs of the spatial-attention study's Tables 2 and 3 and Fig. 3, beside the published ones (minutes).

%s --markdown=experiments/RESULTS.md --figure=experiments/study.png

study_published.csv has what Zhu et al., ICCV 2019, print in Tables 2 and 3, and experiments/study.csv the scores of our
own runs. One FLOP is one multiply-add. Windows are the kernel sizes of Table 3.

GFLOPs are counted from the traced operations of `study_reference`, at the sizes of the paper's systems. The rules that
reproduce what the published numbers grow by:

- Batch norms, activations, softmax, bilinear sampling and the convolution that predicts offsets do not count.
- A relative position is projected once for each difference, from a code with as many channels as the features.
- E2 takes no product beside E1, because q meets k + R. Without E1 its rows and columns are apart.
- Setting 0010 pools one vector a head, and projects it at every position.
- A window has n x n keys for every query, those outside the map too.

Of detection and segmentation only what a mechanism adds to the plain network is compared: our plain networks do not
have the published totals. Translation is the whole network without its vocabulary, and that is compared.
"""

import dataclasses
import functools
import sys

import tensorflow as tf

import study_reference as reference
from axial.analysis.counts import trace
from axial.analysis.multiply_adds import count_multiply_adds, total
from axial.cli import app, flags
from axial.cli.flags import Flags
from axial.io import show
from axial.io.write import around_block, write_whole
from axial.layers.conv import Conv
from axial.layers.spatial_attention.attended import Mechanism
from axial.layers.spatial_attention.attention_terms import SETTINGS
from axial.layers.spatial_attention.deformable_conv import DeformableConv, DeformableConv1D
from axial.layers.spatial_attention.generalized_attention import TEXT, VISION
from axial.models.registry import find_variant
from counts import counted
from published import command, read_lines, start_command
from tables import publish

TASKS = ("detection", "segmentation", "nmt")
MEMORY = "nmt encoder-decoder"  # of Fig. 3 alone: encoder-decoder attention changes, self-attention stays 1111
SCORES = {"detection": "box mAP", "segmentation": "mIoU", "nmt": "BLEU"}
HEADS, GROUPS = 8, 16
PLAIN = "none", None, False  # setting, window, deformable of a network without a mechanism
TOKENS, CHANNELS, INNER, LAYERS = 50, 512, 2048, 6  # of source and of target; the base Transformer
# Maps that attend: (height, width), channels, how many modules, how many of these have a 3x3. The photo of detection
# has 800x1333 pixels, the crop of segmentation 768x768 at output stride 8; segmentation has one module more after the
# network, without a 3x3. A sentence is a map of one column.
MAPS = {
    "detection": [((50, 84), 256, 6, 6), ((25, 42), 512, 3, 3)],
    "segmentation": [((96, 96), 256, 6, 6), ((96, 96), 512, 4, 3)],
    "nmt": [((TOKENS, 1), CHANNELS, 2 * LAYERS, 2 * LAYERS)],
    MEMORY: [((TOKENS, 1), CHANNELS, LAYERS, 0)],
}
# Of each task: the recipe, its model without a mechanism, and the size of its input in the counts.
RECIPES = {
    "detection": ("coco/faster_rcnn.gin", "faster_rcnn_resnet_50", (800, 1344)),
    "segmentation": ("cityscapes/ccnet.gin", "ccnet_resnet_50", (768, 768)),
    "nmt": ("wmt14/transformer_base.gin", "transformer_base", None),
}
RECIPES[MEMORY] = RECIPES["nmt"]


def _published(table):
    """{(setting, window, deformable): ((score, GFLOPs) of each of `TASKS`)} of a table of study_published.csv."""
    return {
        (line["setting"], int(line["window"] or 0) or None, line["deformable"] == "yes"): tuple(
            (float(line[f"{task}_score"]), float(line[f"{task}_gflops"])) for task in TASKS
        )
        for line in read_lines("study_published.csv")
        if line["table"] == table
    }


TABLE_2, TABLE_3 = map(_published, "23")


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration of a task.

    Attributes:
        table: '2' or '3', or 'Fig. 3' for the overhead of the attention alone.
        task: of `TASKS`; for Fig. 3 also `MEMORY`.
        setting: four bits, 'dynamic' or 'none'.
        window: side of the window or of the dynamic kernel, or None.
        deformable: whether there are deformable convolutions.
        added: GFLOPs that the mechanism adds to the plain network, by the rules above; None for the plain network.
        added_shipped: the same with the operations of our layers in place of the reference, everything counted.
        gflops: of our whole network in inference, by the rules above; None for Fig. 3.
        gflops_published, score_published: of the whole network; None where the paper prints none.
        commands: what trains the row, one after the other.
        scores_ours: our own scores, and on what data; '' without any.
    """

    table: str
    task: str
    setting: str
    window: int | None
    deformable: bool
    added: float | None
    added_shipped: float | None
    gflops: float | None = None
    gflops_published: float | None = None
    score_published: float | None = None
    commands: tuple = ()
    scores_ours: str = ""

    @property
    def label(self):
        """The configuration as the paper writes it."""
        text = "w/o" if self.setting == "none" else self.setting
        text += f" (n_k = {self.window})" if self.window else ""
        return text + " + deformable" * self.deformable

    @property
    def added_published(self):
        """GFLOPs by which the published network exceeds the published plain one, or None."""
        if None in (self.added, self.gflops_published):
            return None
        return self.gflops_published - TABLE_2[PLAIN][TASKS.index(self.task)][1]

    @property
    def difference(self):
        """Ours minus the published GFLOPs that are added, or None."""
        return None if self.added_published is None else self.added - self.added_published

    @property
    def difference_whole(self):
        """Ours minus the published GFLOPs of the whole network, or None."""
        return None if self.gflops_published is None else self.gflops - self.gflops_published

    @property
    def agrees(self):
        """Whether what is added is within 0.1 of the published; of translation, if the whole has the printed digit.

        None where nothing is compared: the paper prints nothing, or nothing is added.
        """
        if self.task == "nmt" and self.gflops_published is not None:
            return f"{self.gflops:.1f}" == f"{self.gflops_published:.1f}"
        return None if self.difference is None else abs(self.difference) <= 0.1


def rows(progress=lambda done, of, name: None):
    """Every `Row`, table after table.

    Args:
        progress: called before each row with how many are done, how many there are, and the row's setting.
    """
    tables = {"2": TABLE_2, "3": TABLE_3}
    keys = [(table, task, *own) for table, published in tables.items() for own in published for task in TASKS]
    keys += [("Fig. 3", task, setting, None, False) for task in (*TASKS, MEMORY) for setting in SETTINGS]
    result, scores = [], read_scores()
    for table, task, *own in keys:
        progress(len(result), len(keys), own[0])
        plain = tuple(own) == PLAIN
        added = None if plain else added_gflops(task, *own, shipped=False)
        added_shipped = None if plain else added_gflops(task, *own, shipped=True)
        score, published = tables[table][tuple(own)][TASKS.index(task)] if table in tables else (None, None)
        row = Row(
            table,
            task,
            *own,
            added,
            added_shipped,
            gflops=network_gflops(task, *own) if table in tables else None,
            gflops_published=published,
            score_published=score,
            commands=row_commands(task, *own),
            scores_ours=own_scores(scores.get((task, *own), ())),
        )
        result.append(row)
    return result


# === Systems ===


def arguments(task, setting, window=None, deformable=False):
    """dict of the arguments that make the recipe's model that of a row."""
    if task == MEMORY:
        return {"memory": setting}
    found = {} if window is None else {"window": window}
    if task == "nmt":
        sides = ("encoder", "decoder")
        return found | dict.fromkeys(sides, setting) | {f"{side}_deformable": True for side in sides if deformable}
    found |= {} if setting == "none" else {"mechanism": setting}
    return found | ({"spatial": "deformable"} if deformable else {})


def row_commands(task, *row):
    """Tuple of the commands that train a row: of photos that of its ImageNet classifier first; see `arguments`.

    Detection and segmentation start from a plain ResNet-50 (Sec. 4.1), whatever the mechanism.
    """
    recipe, model, size = RECIPES[task]
    changes, flags, start = arguments(task, *row), [f"--gin_file={recipe}"], ()
    if changes:
        flags.append(f"--gin_binding=ModelConfig.arguments = {changes}")
    if size:
        flags.append("--gin_binding=INIT = 'CHECKPOINT'")
        start = (start_command(model),)
    return (*start, command(flags))


def read_scores():
    """{(task, setting, window, deformable): list of lines} of experiments/study.csv, the scores of our runs."""
    found = {}
    for line in read_lines("../study.csv"):
        window = int(line["window"]) if line["window"] else None
        key = line["task"], line["setting"], window, line["deformable"] == "yes"
        found.setdefault(key, []).append(line)
    return found


def own_scores(rows):
    """'72.1, 71.9 on CamVid by ccnet_nano' of the scores of a configuration."""
    found = {}
    for row in rows:
        found.setdefault(f"{row['data']} by {row['model']}", []).append(row["score"])
    return "; ".join(f"{', '.join(scores)} on {place}" for place, scores in found.items())


# === Networks ===


@functools.cache
def plain_gflops(task):
    """GFLOPs in inference of the whole network without a mechanism. The photo of detection is padded to 800x1344."""
    if task == "nmt":
        return LAYERS * (2 * _feed_forward() + module("1111", (TOKENS, 1), CHANNELS)) / 1e9
    _, name, size = RECIPES[task]
    _, graph, _ = trace(name, find_variant(name).classes, *size)
    return total(p for p in count_multiply_adds(graph) if "auxiliary_head" not in p.name) / 1e9


def network_gflops(task, setting, window, deformable):
    """GFLOPs of our whole network of a task."""
    return plain_gflops(task) + added_gflops(task, setting, window, deformable, shipped=False)


def added_gflops(task, setting, window, deformable, *, shipped):
    """GFLOPs that a mechanism adds to a task's network; `shipped` counts our layers in place of the reference."""
    added = 0
    for size, channels, modules, convolutions in MAPS[task]:
        if setting != "none":
            added += modules * module(setting, size, channels, window=window, shipped=shipped)
        if deformable:
            added += convolutions * _deformed(size, channels, shipped)
    return added / 1e9


@functools.cache
def _deformed(size, channels, shipped):
    """What a deformable convolution adds: to a 3x3 by the rules nothing, and in a Transformer a whole module."""
    if size[1] > 1:
        plain, moved = (traced(make(channels, 3, None), [1, *size, channels]) for make in (Conv, DeformableConv))
        return moved - plain if shipped else 0
    if shipped:
        return traced(DeformableConv1D(channels, 3), [1, size[0], channels])

    def unit(x, w):
        return tf.einsum("lkc,kcf->lf", x, w["kernel"])  # the three samples of every token

    return traced(unit, [size[0], 3, channels], {"kernel": [3, channels, channels]})


# === Modules ===


@functools.cache
def module(setting, size, channels, *, window=None, shipped=False):
    """Multiply-adds of one module of attention or dynamic convolution on a map of one image.

    Args:
        setting: four bits or 'dynamic'.
        size: (height, width); a sequence has width 1.
        channels: of the map.
        window: side of the window or of the kernel.
        shipped: whether our layer is counted, in place of the reference.
    """
    axes = 1 if size[1] == 1 else 2
    if shipped:
        options = TEXT if axes == 1 else VISION
        layer = Mechanism(setting, HEADS, window=window, groups=GROUPS).layer(**options)
        return traced(layer, [1, *size[:axes], channels])
    if setting == "dynamic":
        shapes = reference.dynamic_shapes(channels, kernel=window, groups=GROUPS, axes=axes)
        run = functools.partial(reference.dynamic_conv, kernel=window, groups=GROUPS)
    else:
        shapes = reference.weight_shapes(setting, channels, HEADS, axes, codes=channels)
        run = functools.partial(reference.generalized_attention, setting=setting, heads=HEADS, window=window)
    return traced(run, [*size, channels], shapes)


@functools.cache
def _feed_forward():
    def run(x, w):
        return tf.matmul(tf.nn.relu(tf.matmul(x, w["first"])), w["second"])

    return traced(run, [TOKENS, CHANNELS], {"first": [CHANNELS, INNER], "second": [INNER, CHANNELS]})


def traced(function, shape, weights=None):
    """Multiply-adds of function(x), or of function(x, weights) with weights of given shapes. Nothing runs."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, shape)
        call = tf.autograph.experimental.do_not_convert(function)
        if weights is None:
            call(x)
        else:
            call(x, {name: tf.compat.v1.placeholder(tf.float32, size) for name, size in weights.items()})
    return total(count_multiply_adds(graph))


# === Results ===

COLUMNS = ("table", "task", "setting", "GFLOPs added", "added, published", "difference", "added, as shipped")
COLUMNS += ("whole network", "whole, published", "difference", "published score", "our score")


def cells(row):
    """A row of a printed table as text."""
    digits = ".3f" if row.table == "Fig. 3" else ".2f"
    numbers = (
        *((row.added, digits), (row.added_published, ".1f"), (row.difference, "+.2f"), (row.added_shipped, digits)),
        *((row.gflops, ".2f"), (row.gflops_published, ".1f"), (row.difference_whole, "+.2f")),
    )
    texts = ("" if value is None else format(value, form) for value, form in numbers)
    score = "" if row.score_published is None else f"{row.score_published} {SCORES[row.task]}"
    return row.table, row.task, row.label, *texts, score, row.scores_ours


def agreement(results):
    """Lines that say how many rows agree with the published GFLOPs, which do not, and what our plain networks have."""
    lines = []
    for task in TASKS:
        own = [row for row in results if row.task == task and row.agrees is not None]
        whole = task == "nmt"
        apart = [(row.label, row.difference_whole if whole else row.difference) for row in own if not row.agrees]
        missed = ", ".join(f"{label} ({difference:+.2f})" for label, difference in apart)
        rule = "whole networks have the printed digit" if whole else "add what is published, within 0.1"
        lines.append(f"{task}: {len(own) - len(apart)} of {len(own)} {rule}{f'; not {missed}' if missed else ''}")
    lines += [
        f"{row.task}: our network without a mechanism has {row.gflops:.2f} GFLOPs, the published one "
        f"{row.gflops_published}: totals are not compared"
        for row in results
        if row.task != "nmt" and row.added is None
    ]
    return lines


def commands(results):
    """dict from tuples of commands to the tasks and labels of the rows that they train."""
    found = {}
    for row in results:
        found.setdefault(row.commands, {})[f"{row.task} {row.label}"] = None
    return found


def markdown(results):
    """The rows as lines of Markdown."""
    notes = [f"- {show.markdown(line)}" for line in agreement(results)]
    return "\n".join(["", *show.markdown_table(COLUMNS, map(cells, results)), "", *notes, ""])


def write_figure(path, results):
    """Draws published accuracy over counted GFLOPs, one plot a task, as in the paper's Fig. 3.

    The legend tells the mechanisms apart, so that a label is a setting or the side of a window or kernel.
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
        own = [row for row in results if row.task == task and row.score_published is not None]
        for kind, (marker, belongs) in kinds.items():
            members = [row for row in own if belongs(row)]
            axes.plot([r.gflops for r in members], [r.score_published for r in members], marker, label=show.drawn(kind))
            places = {}  # rows of one score and about the same GFLOPs share a label
            for row in members:
                name = "w/o" if row.setting == "none" else str(row.window or row.setting)
                places.setdefault((float(f"{row.gflops:.2g}"), row.score_published), []).append((row.gflops, name))
            for (_, score), found in places.items():
                names = ", ".join(name for _, name in found)
                axes.annotate(show.drawn(f" {names}"), (found[0][0], score), fontsize=6, rotation=20)
        lowest, second, *_, highest = sorted(row.score_published for row in own)
        if second - lowest > 2 * (highest - second):  # one row far below would leave the others no room
            axes.set_ylim(second - 0.1, highest + 0.1)
        axes.set(xlabel="GFLOPs, counted", ylabel=show.drawn(f"{SCORES[task]}, published"), title=show.drawn(task))
        axes.grid(alpha=0.3)
        axes.margins(x=0.25)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(kinds))
    write_whole(path, lambda partial: figure.savefig(partial, dpi=100))


class Study(Flags):
    markdown = flags.MARKDOWN
    figure = flags.FIGURE


def _main(given):
    if given.markdown:
        around_block(given.markdown, "study")
    show.say("counting the settings of the spatial-attention study: a minute", error=True)
    results = counted(rows)
    show.print_table(COLUMNS, map(cells, results))
    publish("study", sys.modules[__name__], results, given.markdown)
    if given.figure:
        write_figure(given.figure, results)


if __name__ == "__main__":
    app.run({"": (Study, _main)})
