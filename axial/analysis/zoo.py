"""The zoo: public checkpoints that axial-convert reads, their contents, and the commands that score them.

experiments/zoo.csv has a row for each checkpoint, with published values and axial's counts. Models that axial ships
also have rows, with the source 'axial' and no file to convert.
"""

import os
import typing

import msgspec

from axial.errors import InputError
from axial.io.read import read_rows
from axial.io.schemas import Strict, Text
from axial.models.registry import find_variant
from axial.weights.convert import SOURCES
from axial.weights.source import SHIPPED

COLUMNS = "checkpoint model holds data parameters multiply-adds published ours file licence".split()


class ZooRow(Strict):
    """A row of experiments/zoo.csv. All values are text. `experiments/paper/counts.py` counts the last two columns.

    Attributes:
        holds: part of the model in the file: a classifier, a whole panoptic model, or only its backbone.
        params: number of trainable parameters of this part.
        macs: multiply-adds of this part for a photo of the row's size.
    """

    checkpoint: Text
    model: Text
    source: Text
    holds: typing.Literal["classifier", "backbone", "panoptic"]
    data: Text
    photo: typing.Annotated[str, msgspec.Meta(pattern=r"^\d{1,5}x\d{1,5}$")]
    published: str
    published_at: typing.Annotated[str, msgspec.Meta(pattern="^https?://")]
    file: typing.Annotated[str, msgspec.Meta(pattern="^(https?://|axial/shipped/)")]
    licence: Text
    ours: str
    ours_on: str
    sha256: typing.Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]
    recipe: Text
    params: typing.Annotated[str, msgspec.Meta(pattern=r"^\d*$")] = ""
    macs: typing.Annotated[str, msgspec.Meta(pattern=r"^\d*$")] = ""


def read_zoo(path):
    """Reads a list of `ZooRow`s from a CSV.

    Raises:
        InputError: a column is missing or unknown, a value is malformed, or a model or source is unknown.
    """
    rows = []
    for where, row in read_rows(path, ZooRow):
        find_variant(row.model, where)
        if row.source not in (*SOURCES, SHIPPED):
            raise InputError(f"{where}source {row.source!r}: expected one of {', '.join([*SOURCES, SHIPPED])}")
        rows.append(row)
    return rows


def commands(row):
    """Commands that convert a checkpoint and evaluate it. For a backbone, a training comes before the evaluation."""
    if row.source == SHIPPED:
        name = os.path.basename(os.path.dirname(row.file))
        score = f"axial-evaluate --gin_file={row.recipe} --model={name} --data_dir=DATA --split=test"
        return [f"axial-predict --model={name} --output_dir=OUT PHOTO", score]
    # A model has the same weights with ReLU and with GELU, so the file does not show its activation.
    model = f" --model={row.model}" if "activation" in find_variant(row.model).arguments else ""
    file = os.path.basename(row.file)
    convert = f"axial-convert weights --source={row.source} --input={file} --output=WEIGHTS{model}"
    if row.holds != "backbone":
        return [convert, f"axial-evaluate --gin_file={row.recipe} --model=WEIGHTS --data_dir=DATA --split=val"]
    files = f"--gin_file={row.recipe} --gin_file=WEIGHTS/model.gin --gin_binding=\"INIT = 'WEIGHTS'\""
    train = f"axial-train {files} --strategy=tpu --data_dir=DATA --model_dir=RUN"
    return [convert, train, "axial-evaluate --model_dir=RUN --data_dir=DATA --split=val"]


def cells(row):
    """Strings of a row, in the order of `COLUMNS`."""
    return (
        row.checkpoint,
        row.model,
        row.holds,
        row.data,
        f"{int(row.params) / 1e6:.3f} M" if row.params else "",
        f"{int(row.macs) / 1e9:.3f} B at {row.photo}" if row.macs else "",
        row.published or "none",
        f"{row.ours} on {row.ours_on}" if row.ours else "not run",
        f"{row.file}{f', SHA-256 {row.sha256}' if row.sha256 else ''}",
        row.licence,
    )
