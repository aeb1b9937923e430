"""The zoo: public checkpoints that axial-convert reads, their contents, and the commands that score them.

experiments/zoo.csv has a row for each checkpoint, with published values and axial's counts. Models that axial ships
also have rows, with the source 'axial' and no file to convert. This module imports no TensorFlow.
"""

import os
import shlex
import typing

import msgspec

from axial.io.paths import experiments_dir
from axial.io.read import read_rows
from axial.io.schemas import Strict, Text
from axial.models.names import check_model_name

COLUMNS = "name checkpoint model holds data parameters multiply-adds published ours file licence".split()
SHIPPED = "axial"  # the value of the column `source` for shipped models


class ZooRow(Strict):
    """A row of experiments/zoo.csv. All values are text. `experiments/paper/counts.py` counts the last two columns.

    Attributes:
        name: the name for `axial.load`, --model and INIT: a shipped model, or the model and its data as in timm.
        source: the code that wrote the checkpoint, which axial-convert weights takes as --source.
        holds: part of the model in the file: a classifier, a whole panoptic model, or only its backbone.
        hub: OWNER/REPOSITORY@REVISION of the converted weights on Hugging Face's hub; '' if they are not there.
        sha256: SHA-256 of the safetensors file on the hub, or of the shipped file.
        params: number of trainable parameters of this part.
        macs: multiply-adds of this part for a photo of the row's size.
    """

    name: typing.Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_.]+$")]
    checkpoint: Text
    model: Text
    source: typing.Literal["csrhddlam", "deeplab2", "keras_applications", "axial"]
    holds: typing.Literal["classifier", "backbone", "panoptic"]
    data: Text
    photo: typing.Annotated[str, msgspec.Meta(pattern=r"^\d{1,5}x\d{1,5}$")]
    published: str
    published_at: typing.Annotated[str, msgspec.Meta(pattern="^https?://")]
    file: typing.Annotated[str, msgspec.Meta(pattern="^(https?://|axial/shipped/)")]
    licence: Text
    ours: str
    ours_on: str
    hub: typing.Annotated[str, msgspec.Meta(pattern=r"^([\w.-]+/[\w.-]+@[\w.-]+)?$")]
    sha256: typing.Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]
    recipe: Text
    params: typing.Annotated[str, msgspec.Meta(pattern=r"^\d*$")] = ""
    macs: typing.Annotated[str, msgspec.Meta(pattern=r"^\d*$")] = ""


def read_zoo(path: str | None = None) -> list[ZooRow]:
    """The rows of a CSV, by default of experiments/zoo.csv.

    Raises:
        InputError: a column is missing or unknown, a value is malformed, or a model is unknown.
    """
    rows = []
    for where, row in read_rows(path or os.path.join(experiments_dir(), "zoo.csv"), ZooRow):
        check_model_name(row.model, where=where)
        rows.append(row)
    return rows


def conversion(row: ZooRow, output: str = "WEIGHTS") -> str:
    """The command that converts the downloaded file of a row."""
    file = shlex.quote(os.path.basename(row.file))
    # A model has the same weights with ReLU and with GELU, so the file alone does not name the model.
    return f"axial-convert weights --source={row.source} --input={file} --output={output} --model={row.model}"


def commands(row: ZooRow) -> list[str]:
    """Commands that convert a checkpoint and evaluate it. For a backbone, a training comes before the evaluation."""
    if row.source == SHIPPED:
        score = f"axial-evaluate --gin_file={row.recipe} --model={row.name} --data_dir=DATA --split=test"
        return [f"axial-predict --model={row.name} --output_dir=OUT PHOTO", score]
    if row.holds != "backbone":
        score = f"axial-evaluate --gin_file={row.recipe} --model=WEIGHTS --data_dir=DATA --split=val"
        return [conversion(row), score]
    files = f"--gin_file={row.recipe} --gin_file=WEIGHTS/model.gin --gin_binding=\"INIT = 'WEIGHTS'\""
    train = f"axial-train {files} --strategy=tpu --data_dir=DATA --model_dir=RUN"
    return [conversion(row), train, "axial-evaluate --model_dir=RUN --data_dir=DATA --split=val"]


def cells(row: ZooRow) -> tuple[str, ...]:
    """Strings of a row, in the order of `COLUMNS`."""
    return (
        row.name,
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
