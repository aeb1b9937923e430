"""The zoo: public checkpoints that axial-convert reads, with what they hold, and the commands that score them.

experiments/zoo.csv has what others publish, a row a checkpoint. Parameters, multiply-adds and commands are computed.
Models that axial ships have rows too, of the source 'axial' and without a file to convert.
"""

import dataclasses
import os

import msgspec

from axial.analysis.counts import trace
from axial.analysis.multiply_adds import count_multiply_adds, total
from axial.errors import InputError
from axial.io import schemas, show
from axial.io.paths import inside
from axial.io.read import read_rows
from axial.models.registry import find_variant
from axial.weights.convert import OWN_ARGUMENTS
from axial.weights.interchange import read_safetensors
from axial.weights.source import SHIPPED, SHIPPED_DIR


@dataclasses.dataclass(frozen=True)
class Entry:
    """A checkpoint of the zoo.

    Attributes:
        row: `schemas.ZooRow`. 'holds' says which part of the model the file has: a 'classifier', a whole 'panoptic'
            model, or the 'backbone' of one.
        params: trainable numbers of this part.
        macs: multiply-adds of this part for a photo of the row's size.
    """

    row: schemas.ZooRow
    params: int | None = None
    macs: int | None = None

    @property
    def convert(self):
        """The command that converts the file."""
        row = self.row
        # ReLU and GELU have the same weights, so a file does not tell them apart.
        model = [f"--model={row.model}"] if "activation" in find_variant(row.model).arguments else []
        file = f"--input={os.path.basename(row.file)}"
        return " ".join(["axial-convert weights", f"--source={row.source}", file, "--output=WEIGHTS", *model])

    @property
    def commands(self):
        """The commands that convert the file and evaluate it. A backbone alone is trained before."""
        row = self.row
        data = "--data_dir=DATA"
        if row.source == SHIPPED:
            name = os.path.basename(os.path.dirname(row.file))
            score = f"axial-evaluate --gin_file={row.recipe} --model={name} {data} --split=test"
            return [f"axial-predict --model={name} --output_dir=OUT PHOTO", score]
        if row.holds != "backbone":
            return [self.convert, f"axial-evaluate --gin_file={row.recipe} --model=WEIGHTS {data} --split=val"]
        start = "--gin_binding=\"INIT = 'WEIGHTS'\""
        files = f"--gin_file={row.recipe} --gin_file=WEIGHTS/model.gin"
        return [
            self.convert,
            f"axial-train {files} {start} --strategy=tpu {data} --model_dir=RUN",
            f"axial-evaluate --model_dir=RUN {data} --split=val",
        ]

    def to_json(self):
        return {**msgspec.structs.asdict(self.row), "params": self.params, "macs": self.macs, "commands": self.commands}


def read_zoo(path):
    """The `Entry`s of a CSV, without counts.

    Raises:
        InputError: a missing or unknown column, a value out of form, or an unknown model or source.
    """
    entries = []
    for where, row in read_rows(path, schemas.ZooRow):
        find_variant(row.model, where)
        if row.source not in (*OWN_ARGUMENTS, SHIPPED):
            raise InputError(f"{where}source {row.source!r}: expected one of {', '.join([*OWN_ARGUMENTS, SHIPPED])}")
        entries.append(Entry(row))
    return entries


def counted(entries, progress=lambda done, of, name: None):
    """The entries with parameters and multiply-adds, of models traced without values."""
    done, found = [], {}
    for entry in entries:
        row = entry.row
        key = row.model, row.holds, row.photo
        if key not in found:
            found[key] = _count(row)
        done.append(dataclasses.replace(entry, params=found[key][0], macs=found[key][1]))
        progress(len(done), len(entries), row.checkpoint)
    return done


def _count(row):
    height, width = map(int, row.photo.split("x"))
    classes, arguments = find_variant(row.model).classes, OWN_ARGUMENTS.get(row.source, {})
    if row.source == SHIPPED:
        file = inside(os.path.dirname(os.path.dirname(SHIPPED_DIR)), row.file, f"file of {row.checkpoint}")
        classes = read_safetensors(file)[0].num_classes
    model, graph, _ = trace(row.model, classes, height, width, changes=arguments)
    products, part = count_multiply_adds(graph), model
    if row.holds == "backbone":
        products, part = [p for p in products if "/backbone/" in f"/{p.name}"], model.backbone
    return sum(w.shape.num_elements() for w in part.trainable_weights), total(products)


COLUMNS = "checkpoint model holds data parameters multiply-adds published ours file licence".split()


def cells(entry):
    """The strings of an entry, in the order of `COLUMNS`."""
    row = entry.row
    return (
        row.checkpoint,
        row.model,
        row.holds,
        row.data,
        "" if entry.params is None else f"{entry.params / 1e6:.3f} M",
        "" if entry.macs is None else f"{entry.macs / 1e9:.3f} B at {row.photo}",
        row.published or "none",
        f"{row.ours} on {row.ours_on}" if row.ours else "not run",
        f"{row.file}{f', SHA-256 {row.sha256}' if row.sha256 else ''}",
        row.licence,
    )


def markdown(entries):
    """The zoo as a table, and below it the commands of each checkpoint."""
    rows = []
    for entry in entries:
        values = dict(zip(COLUMNS, cells(entry)))
        values["model"] = show.code(values["model"])
        values["published"] = show.link(values["published"], entry.row.published_at)
        name, told = os.path.basename(entry.row.file), values["file"].removeprefix(entry.row.file)
        address = f"../{entry.row.file}" if entry.row.source == SHIPPED else entry.row.file  # from experiments/
        values["file"] = show.Markdown(show.link(name, address) + show.markdown(told))
        rows.append(values.values())
    lines = show.markdown_table(COLUMNS, rows)
    for entry in entries:
        lines += ["", f"{show.markdown(f'{entry.row.checkpoint}, {entry.row.data}')}:", ""]
        for command in entry.commands:
            lines += show.broken(command)
    return "\n".join(lines)
