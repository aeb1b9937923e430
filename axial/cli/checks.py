"""What commands look at before they import TensorFlow, which takes seconds: gin files, models, runs and outputs.

Each of these functions raises InputError. A path of a bucket is left for later, as TensorFlow reads it.
"""

from axial import recipes
from axial.cli import app
from axial.data.files import find_manifest
from axial.io import gfile
from axial.weights.source import no_checkpoint, resolve, run_file, shipped_folder

SOURCES, TARGETS = ("csrhddlam", "deeplab2", "keras_applications"), ("csrhddlam",)  # of `weights.convert`


def check_run(model_dir, bindings=()):
    """A run, or the name of a shipped model, and gin bindings over it."""
    gfile.check_plain(model_dir)
    if not gfile.is_remote(model_dir):
        recipes.read([run_file(shipped_folder(app.as_path(model_dir)))], bindings)


def check_model(what, bindings=()):
    """The `Source` of what `axial.load` takes, and gin bindings over its recipe if it has one."""
    source = resolve(what)
    if source.kind == "run" and not gfile.is_remote(source.path):
        gfile.check_plain(source.path)
        recipes.read([run_file(source.folder)], bindings)
    return source


def check_checkpoint(path):
    """A checkpoint by its prefix, a safetensors file, or a folder of one; None where no flag names one."""
    if path and not gfile.is_remote(path):
        resolve(path, no_checkpoint)


def check_splits(data_dir, splits):
    """Converted splits of a folder. None is looked for where a flag gives no folder."""
    if data_dir and not gfile.is_remote(data_dir):
        for split in splits or ():
            find_manifest(data_dir, split)
