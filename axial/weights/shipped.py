"""Models that axial ships, by name: a folder each, as axial-export --format=safetensors writes it.

Nothing here needs TensorFlow, so that commands know a wrong name or folder before they import it.
"""

import os

from axial.builders import model_names
from axial.errors import check_installed, nearest
from axial.io import gfile, schemas
from axial.io.read import read_rows
from axial.statements import experiments_dir

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "shipped")
SHIPPED = "axial"  # their source in experiments/zoo.csv
ACCEPTED = "a run of axial-train, an export of axial-export, a checkpoint or a safetensors file"


def shipped_names():
    """Names of the shipped models."""
    return sorted(entry.name for entry in os.scandir(FOLDER) if entry.is_dir())


def shipped_folder(what):
    """The folder of the shipped model of this name; any other name or path as it is.

    A folder of the user's that has a shipped model's name is './NAME'.
    """
    return os.path.join(FOLDER, what) if what in shipped_names() else what


def unknown(name):
    """The message on a name that no shipped model has, and nothing on disk. A registered model may have it."""
    shipped, models = shipped_names(), model_names()
    ships = f"axial ships {', '.join(shipped)}"
    if name not in models:
        return f"{name}: no model or file has this name{nearest(name, [*shipped, *models])}; {ships}"
    rows = [row for _, row in read_rows(os.path.join(experiments_dir(), "zoo.csv"), schemas.ZooRow)]
    public = [
        f"axial-convert weights --source={row.source} --input={os.path.basename(row.file)} --output=WEIGHTS "
        f"--model={name}, with {row.file}"
        for row in rows
        if row.model == name and row.source != SHIPPED
    ]
    converted = f"; public ones are converted by: {'; or '.join(public)}" if public else ""
    return (
        f"{name}: no weights of this model are here, and {ships}{converted}; axial.models.build_model({name!r}, "
        "num_classes=N) makes it with random weights"
    )


def no_checkpoint(path):
    """The message on a path where no checkpoint is."""
    if path in shipped_names():
        return f"{path}: a model that axial ships, which has no checkpoints; --model={path} takes it"
    return f"{path}: no such checkpoint{nearest(path, shipped_names())}"


def may_be_model(folder):
    """Whether a folder has a file that a run, an export, a checkpoint or a safetensors file could have."""
    names = [name for name in gfile.listdir(folder) if not name.startswith(".")]
    known = "assets.extra", "best", "checkpoint", "saved_model.pb", "spec.json"
    ends = ".index", ".safetensors", ".tflite", ".onnx"
    return any(name.rstrip("/") in known or name.endswith(ends) for name in names)


def check_hub(path):
    """Raises InputError unless the client that reads an hf:// path is installed."""
    check_installed(f"{path}: needs", "hub", "huggingface_hub")
