"""Finds the model or weights at a path, on the hub, or under a name of the zoo. All callers use `resolve`.

This module imports TensorFlow only for a path in a bucket, so that commands refuse a wrong path before that import.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable

from axial.errors import InputError, check_installed, nearest
from axial.io import gfile
from axial.io.paths import PACKAGE, inside
from axial.io.read import first_line
from axial.io.write import file_digest
from axial.models.names import model_names
from axial.weights.zoo import ZooRow, conversion, read_zoo

SHIPPED_DIR = os.path.join(PACKAGE, "shipped")
ACCEPTED = "a run of axial-train, an export of axial-export, a checkpoint or a safetensors file"
SUFFIX = ".safetensors"
# Names of the file that holds an export's network.
LITE, ONNX, SAVED_MODEL = "model.tflite", "model.onnx", "saved_model.pb"
CARD, RUN_CARD = "model.json", "card.json"  # cards beside converted weights, and in a run
_HUB = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/(.+))?")
# Files beside weights that describe the weights.
_BESIDE = (CARD, RUN_CARD, "config.gin", "spec.json", "objects.json", "assets.extra/*")
_HUB_FILES = [
    *(*_BESIDE, "checkpoint", "ckpt-*", "best/*", f"*{SUFFIX}"),
    *("saved_model.pb", "fingerprint.pb", "variables/*", "assets/*", "*.tflite", "*.onnx"),
]


@dataclasses.dataclass(frozen=True)
class Source:
    """A model on this machine or in a bucket.

    Attributes:
        kind: 'export' for an export of axial-export; 'run' for weights with a recipe beside them, as in a run of
            axial-train; 'weights' for weights without a recipe.
        path: the requested path; for a shipped or downloaded model, its local path.
        folder: folder of the export, of the recipe (config.gin), or of the weights.
        file: for weights, the safetensors file or the prefix of the checkpoint; None for a folder, in which
            `restore.find_weights` chooses. For an export, the TFLite or ONNX file; None for a SavedModel.
        card: path of the JSON `WeightsCard` beside the weights; None if there is none.
    """

    kind: str
    path: str
    folder: str
    file: str | None = None
    card: str | None = None

    @property
    def extra(self) -> str:
        """The folder of an export that describes its model."""
        return os.path.join(self.folder, "assets.extra")


Location = str | os.PathLike | Source


def unknown(name: str) -> str:
    """The error message for a name that is neither a shipped model, nor in the zoo, nor a file.

    If it is the name of a variant, the message says that axial has no weights of it.
    """
    shipped, models, public = shipped_names(), model_names(), [row.name for row in read_zoo()]
    ships = f"axial ships {', '.join(shipped)}"
    if name not in models:
        return f"{name}: no model or file has this name{nearest(name, [*shipped, *public, *models])}; {ships}"
    builds = f"axial.models.build_model({name!r}, num_classes=N) makes it with random weights"
    return f"{name}: no weights of this model are here, and {ships}; `axial-analyze zoo` lists public ones; {builds}"


def no_checkpoint(path: str) -> str:
    """The error message for a missing path where weights are expected."""
    return f"{path}: no such checkpoint{nearest(path, [*shipped_names(), *(row.name for row in read_zoo())])}"


def without_recipe(where: str) -> str:
    """The error message for weights that cannot predict, because they have no recipe."""
    return (
        f"{where}: these weights have no recipe (config.gin) beside them, which says how photos are scaled; expected a "
        "run, an export, or what axial-export --format=safetensors writes. axial-evaluate --gin_file=RECIPE scores "
        "them, and axial-train starts from them"
    )


def resolve(what: Location, missing: Callable[[str], str] = unknown) -> Source:
    """The `Source` of the name of a shipped model, a path, an hf:// path, or the name of a row of the zoo.

    Args:
        what: any of these, in this order if several fit; or a `Source`, which is returned unchanged.
        missing: function of a path that returns the message if nothing is there.

    Raises:
        InputError: the path does not exist, or is not a model; or weights of the zoo cannot be downloaded, or have
            another SHA-256. This function does not check whether the files are whole.
    """
    if isinstance(what, Source):
        return what
    if not isinstance(what, (str, os.PathLike)):
        given = f"{type(what).__name__} {str(what)[:40]!r}"
        raise InputError(f"{given}: expected the name of a model, or the path of {ACCEPTED}")
    path = os.fspath(what)
    path = download(path) if path.startswith("hf://") else shipped_folder(path)
    try:
        is_checkpoint = gfile.exists(f"{path}.index")
        if not is_checkpoint and not gfile.exists(path):
            row = next((row for row in read_zoo() if row.name == path), None)
            if row is None:
                raise InputError(missing(path))
            path = _from_zoo(row)
    except gfile.file_errors() as error:  # a file system that TensorFlow does not support
        raise InputError(f"{path}: cannot be read ({first_line(error)})") from None
    return _export(path) or _weights(path, is_checkpoint)


def _export(path):
    """The `Source` of an export, from its folder or its network's file; None for anything else."""
    inside_of = os.path.basename(path) in (LITE, ONNX, SAVED_MODEL)
    folder = os.path.dirname(path) or os.curdir if inside_of else path
    files = [os.path.join(folder, name) for name in (LITE, ONNX, SAVED_MODEL)]
    file = next(filter(gfile.exists, files), None)
    if gfile.exists(os.path.join(folder, "assets.extra", "spec.json")):
        return Source("export", path, folder, None if file == files[-1] else file)
    if file:
        raise InputError(f"{folder}: axial-export did not write this folder: it has no assets.extra/spec.json")
    return None


def _weights(path, is_checkpoint):
    """The `Source` of weights, from their own path or their folder, with the recipe and card beside them."""
    if not is_checkpoint and gfile.isdir(path):
        names = [name.rstrip("/") for name in gfile.listdir(path) if not name.startswith(".")]
        files, ends = ("best", "checkpoint", "spec.json"), (".index", SUFFIX)
        if not any(name in files or name.startswith("ckpt-") or name.endswith(ends) for name in names):
            raise InputError(f"{path}: this folder is none of {ACCEPTED}")
        file, folders = None, [path]
    elif is_checkpoint or path.endswith(SUFFIX):
        file, folders = path, [os.path.dirname(path) or os.curdir]
        if is_checkpoint:  # a run's best checkpoint is in a subfolder
            folders.append(os.path.dirname(folders[0]) or os.curdir)
    else:
        raise InputError(f"{path}: this file is none of {ACCEPTED}; axial-convert weights converts other formats")

    recipe = "config.gin", "spec.json"  # files that describe what a run trains
    run = next((one for one in folders if all(gfile.exists(os.path.join(one, name)) for name in recipe)), None)
    cards = [os.path.join(folder, name) for folder in folders for name in (CARD, RUN_CARD)]
    card = next(filter(gfile.exists, cards), None)
    return Source("run" if run else "weights", path, run or folders[0], file=file, card=card)


def run_file(model_dir: str) -> str:
    """Path of a run's config.gin. Raises InputError if there is none."""
    path = os.path.join(model_dir, "config.gin")
    if not gfile.exists(path):
        raise InputError(f"{path}: no such file; a run of axial-train is expected")
    return path


def find_tensors(folder: str) -> str | None:
    """The only safetensors file in a folder, or None. Raises InputError if there are several."""
    files = gfile.glob(os.path.join(folder, ""), f"*{SUFFIX}") if gfile.isdir(folder) else []
    if len(files) > 1:
        raise InputError(f"{folder}: holds {len(files)} {SUFFIX} files; name one of them")
    return files[0] if files else None


# === Shipped models: each is a folder that axial-export --format=safetensors wrote ===


def shipped_names() -> list[str]:
    """Names of the shipped models."""
    return sorted(entry.name for entry in os.scandir(SHIPPED_DIR) if entry.is_dir())


def shipped_folder(what: str) -> str:
    """The folder of the shipped model of this name; any other name or path is returned unchanged.

    A user whose own folder has the name of a shipped model writes './NAME' for that folder.
    """
    return os.path.join(SHIPPED_DIR, what) if what in shipped_names() else what


# === Hugging Face's hub ===


def download(path: str) -> str:
    """Downloads an hf:// path, and the files beside and above it that describe the model. Returns the local path."""
    parts = _HUB.fullmatch(path)
    if not parts:
        raise InputError(f"{path}: expected hf://OWNER/REPO, hf://OWNER/REPO@REVISION or hf://OWNER/REPO/FILE")
    check_installed(f"{path}: needs", "hub", "huggingface_hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.logging import set_verbosity_error

    set_verbosity_error()  # its retries would print lines of their own
    repository, revision, file = parts[1], parts[2], (parts[3] or "").rstrip("/")
    if os.path.basename(file) == SAVED_MODEL:  # an export is a folder
        file = os.path.dirname(file)
    above = [str(folder / name) for folder in pathlib.PurePosixPath(file).parents for name in _BESIDE]
    patterns = [f"{file}*", f"{file}/*", *above] if file else _HUB_FILES
    try:
        folder = snapshot_download(repository, revision=revision, allow_patterns=patterns)
    except Exception as error:  # the hub's client raises errors of many libraries
        raise InputError(f"{path}: cannot be downloaded ({first_line(error)})") from None
    return inside(folder, file, path) if file else folder


def _from_zoo(row: ZooRow) -> str:
    """Downloads the weights of a row of the zoo and checks their SHA-256. Returns the local path of the file.

    An error's message has the two commands that make the weights from the authors' file, in a folder with the name of
    the row.
    """
    by_hand = f"by hand: curl -LO {row.file} && {conversion(row, row.name)}"
    if not row.hub:
        raise InputError(f"{row.name}: these weights are not on the hub; {by_hand}")
    try:
        folder = download(f"hf://{row.hub}")
    except InputError as error:
        raise InputError(f"{row.name}: {error}; {by_hand}") from None
    file = find_tensors(folder)
    if file is None:
        raise InputError(f"{row.name}: hf://{row.hub} has no {SUFFIX} file; {by_hand}")
    if (digest := file_digest(file)[1]) != row.sha256:
        raise InputError(f"{row.name}: {file} has the SHA-256 {digest}, and the zoo expects {row.sha256}; {by_hand}")
    return file
