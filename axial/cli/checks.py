"""What commands look at before they import TensorFlow, which takes seconds: gin files, models, runs and outputs.

Each of these functions raises InputError. A path of a bucket is left for later, as TensorFlow reads it.
"""

from absl import flags

from axial import statements
from axial.cli import app
from axial.data.files import find_manifest
from axial.io import gfile
from axial.io.check import is_remote
from axial.io.write import around_block
from axial.weights.source import no_checkpoint, resolve, shipped_folder

FLAGS = flags.FLAGS
SOURCES, TARGETS = ("csrhddlam", "deeplab2", "keras_applications"), ("csrhddlam",)  # of `weights.convert`


def check_recipe(needs_data=False, whole=True):
    """The recipe of --gin_file and --gin_binding.

    Args:
        needs_data: whether it has data of its own, or --data_dir is given.
        whole: False if weights add bindings to it.
    """
    read = statements.read(FLAGS.gin_file, FLAGS.gin_binding, whole)
    if needs_data and not read.value(f"{read.task()}.data_dir"):
        app.flag("data_dir")


def check_run(model_dir, bindings=()):
    """A run, or the name of a shipped model, and gin bindings over it."""
    gfile.check_plain(model_dir)
    if not is_remote(model_dir):
        statements.read([statements.run_file(shipped_folder(app.as_path(model_dir)))], bindings)


def check_model(what, bindings=()):
    """The `Source` of what `axial.load` takes, and gin bindings over its recipe if it has one."""
    source = resolve(what)
    if source.kind == "run" and not is_remote(source.path):
        gfile.check_plain(source.path)
        statements.read([statements.run_file(source.folder)], bindings)
    return source


def check_checkpoint(path):
    """A checkpoint by its prefix, a safetensors file, or a folder of one; None where no flag names one."""
    if path and not is_remote(path):
        resolve(path, no_checkpoint)


def check_splits(data_dir, splits):
    """Converted splits of a folder. None is looked for where a flag gives no folder."""
    if data_dir and not is_remote(data_dir):
        for split in splits or ():
            find_manifest(data_dir, split)


def check_page(name):
    """--markdown is a new file, or has a block of that name."""
    if FLAGS.markdown:
        around_block(FLAGS.markdown, name)
