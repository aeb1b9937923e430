"""The spatial-attention study's systems as they are here: the model and the command of each row, and our own scores."""

import functools

from axial.analysis.counts import trace
from axial.analysis.multiply_adds import count_multiply_adds, total
from axial.io import schemas
from axial.io.read import read_rows
from axial.models.registry import find_variant
from axial.paper.published import command, start_command
from axial.paper.study_published import MEMORY

# Of each task: the recipe, its model without a mechanism, and the size of its input in the counts.
RECIPES = {
    "detection": ("coco/faster_rcnn.gin", "faster_rcnn_resnet_50", (800, 1344)),
    "segmentation": ("cityscapes/ccnet.gin", "ccnet_resnet_50", (768, 768)),
    "nmt": ("wmt14/transformer_base.gin", "transformer_base", None),
}
RECIPES[MEMORY] = RECIPES["nmt"]


def arguments(task, setting, window=None, deformable=False):
    """dict of the arguments that make the recipe's model that of a row."""
    if task == MEMORY:
        return {"memory": setting}
    found = {} if window is None else {"window": window}
    if task == "nmt":
        found |= {"encoder": setting, "decoder": setting}
        return found | ({"encoder_deformable": True, "decoder_deformable": True} if deformable else {})
    found |= {} if setting == "none" else {"mechanism": setting}
    return found | ({"spatial": "deformable"} if deformable else {})


def commands(task, *row):
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


@functools.cache
def plain_gflops(task):
    """GFLOPs in inference of the whole network without a mechanism. The photo of detection is padded to 800x1344."""
    _, name, size = RECIPES[task]
    _, graph, _ = trace(name, find_variant(name).classes, *size)
    return total(p for p in count_multiply_adds(graph) if "auxiliary_head" not in p.name) / 1e9


def read_scores(path):
    """{(task, setting, window, deformable): list of `schemas.StudyScore`} of a CSV with a row for each run.

    Raises:
        InputError: a missing or unknown column, or a value out of form.
    """
    found = {}
    for where, row in read_rows(path, schemas.StudyScore):
        find_variant(row.model, where)
        window = int(row.window) if row.window else None
        found.setdefault((row.task, row.setting, window, row.deformable == "yes"), []).append(row)
    return found


def own_scores(rows):
    """'72.1, 71.9 on CamVid by ccnet_nano' of the scores of a configuration."""
    places = dict.fromkeys((row.data, row.model) for row in rows)
    scores = {place: ", ".join(row.score for row in rows if (row.data, row.model) == place) for place in places}
    return "; ".join(f"{scores[data, model]} on {data} by {model}" for data, model in places)
