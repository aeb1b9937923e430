"""Finds and loads checkpoints, with clear messages for those that do not fit."""

import contextlib
import os

import tensorflow as tf

from axial.errors import InputError
from axial.io.read import first_line

# What TensorFlow raises for a damaged checkpoint, or for one of another model.
UNREADABLE = (tf.errors.OpError, AssertionError, ValueError, IndexError, RuntimeError)


def find_checkpoint(path):
    """The prefix of the checkpoint at `path`, which is this prefix or a folder.

    Of a folder it is the best checkpoint, or the latest if there is no best one.

    Raises:
        InputError: there is no checkpoint.
    """
    if tf.io.gfile.isdir(path):
        for folder in (os.path.join(path, "best"), path):
            latest = latest_checkpoint(folder)
            if latest and tf.io.gfile.exists(latest + ".index"):
                return latest
        raise InputError(f"{path}: no checkpoint here")
    if tf.io.gfile.exists(path + ".index"):
        return path
    raise InputError(f"{path}: no such checkpoint")


def latest_checkpoint(folder):
    """Prefix of the latest checkpoint of a folder, or None. Raises InputError if its list of checkpoints is damaged."""
    try:
        return tf.train.latest_checkpoint(folder)
    except Exception as error:  # protobuf's text parser and TensorFlow's file reader have errors of their own
        raise InputError(f"{os.path.join(folder, 'checkpoint')}: cannot be read ({first_line(error)})") from None


def remove_unfinished(folder):
    """Removes the temporary folder of a checkpoint that a killed process was writing. No later save removes it."""
    for path in tf.io.gfile.glob(os.path.join(folder, "ckpt-*_temp")):
        tf.io.gfile.rmtree(path)


def restore_model(model, prefix):
    """Loads a built model's weights from a checkpoint of the trainer: their moving averages, if it has any.

    Raises:
        InputError: a damaged checkpoint, or one of another model. The message names the first weight that does not fit.
    """
    check_fits(model, prefix)
    with refuse_what_cannot_be_restored(prefix):
        status = tf.train.Checkpoint(model=model).restore(prefix)
        status.assert_existing_objects_matched().expect_partial()
        reader = tf.train.load_checkpoint(prefix)
        averages = "averages/{}/.ATTRIBUTES/VARIABLE_VALUE"
        if reader.has_tensor(averages.format(0)):
            for i, variable in enumerate(model.trainable_variables):
                variable.assign(reader.get_tensor(averages.format(i)))


@contextlib.contextmanager
def refuse_what_cannot_be_restored(prefix):
    """Turns what TensorFlow raises for a damaged checkpoint, or one of another model, into an InputError."""
    try:
        yield
    except UNREADABLE as error:
        if not prefix or isinstance(error, InputError):
            raise
        raise InputError(f"{prefix}: cannot be restored ({first_line(error)})") from None


def check_fits(model, prefix):
    """Raises InputError unless the checkpoint holds every weight of the built model, in the same shape."""
    try:
        stored = {
            name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE"): tuple(shape)
            for name, shape in tf.train.list_variables(prefix)
        }
    except UNREADABLE as error:
        raise InputError(f"{prefix}: not a whole checkpoint ({first_line(error)})") from None
    for path, weight in object_paths(model, "model").items():
        if path not in stored:
            raise InputError(f"{prefix}: of another model, it has no weight {path!r}")
        if stored[path] != tuple(weight.shape):
            raise InputError(
                f"{prefix}: of another model or another number of classes, its {path!r} has shape "
                f"{list(stored[path])} where {list(weight.shape)} is wanted"
            )


def initialize(model, path):
    """Loads every weight that a checkpoint has under the same name and in the same shape.

    The other weights keep their initial values. So a classifier gives its backbone, and a model of other classes gives
    everything but its last layer.

    Args:
        model: a built model.
        path: prefix of a checkpoint, or a folder; see `find_checkpoint`.

    Returns:
        A line that says how many weights were loaded.

    Raises:
        InputError: no checkpoint; none of its weights fits.
    """
    prefix = find_checkpoint(path)
    weights, taken = object_paths(model, "model"), 0
    with refuse_what_cannot_be_restored(prefix):
        reader = tf.train.load_checkpoint(prefix)
        shapes = reader.get_variable_to_shape_map()
        for name, weight in weights.items():
            key = f"{name}/.ATTRIBUTES/VARIABLE_VALUE"
            if shapes.get(key) == weight.shape.as_list():
                weight.assign(reader.get_tensor(key))
                taken += 1
    if not taken:
        raise InputError(f"{prefix}: no weight of it fits the model; is it of axial-train?")
    return f"init_checkpoint: {taken} of {len(weights)} weights from {prefix}"


def object_paths(model, root):
    """Dict from checkpoint keys to the weights of a built model."""
    paths, weights = {}, {id(w): w for w in model.weights}
    queue, seen = [(root, model)], {id(model)}
    while queue:  # breadth first, like TensorFlow: this decides the name of an object with two paths
        path, node = queue.pop(0)
        if id(node) in weights:
            paths[path] = node
        for name, child in node._trackable_children().items():
            if id(child) not in seen:
                seen.add(id(child))
                queue.append((f"{path}/{name}", child))
    return paths
