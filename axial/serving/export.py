"""Exports trained models. A SavedModel takes photos of any size."""

import contextlib
import functools
import os

import tensorflow as tf
import tf_keras as keras

from axial.data.decode import decode, orientation, turn
from axial.io.write import folder_digests, new_folder, write_json
from axial.layers import device
from axial.weights.card import PAGE

SPEC = os.path.join("assets.extra", "spec.json")
HASHES = os.path.join("assets.extra", "hashes.json")  # SHA-256 of all other files of an export, except the model card


class Server(tf.Module):
    """The signatures of an export that takes photos.

    'serving_default' takes an encoded photo, string [], and turns it upright by its EXIF tag. It refuses a photo
    that it cannot decode to the same pixels as axial-predict; see `decode`. 'image' takes pixels, uint8 [h, w, 3]. Both
    return the outputs that the task's `served` lists. h x w is the size of the upright photo.

    'classes' has no inputs. It returns class_names [C], colors uint8 [C, 3], things [C], category_ids [C],
    label_divisor, ignore, the canvas (height, width), and kind, the name of the task's `Evaluator`. It also returns
    the entries of the task's `about`.

    Args:
        task: task with `serve`.
        model: the task's folded model.
        compiled: whether XLA compiles the network where the export runs. The task's `Evaluator` must have `one_file`.
    """

    def __init__(self, task, model, *, compiled=False):
        super().__init__()
        self.weights = model.weights  # not the model, as TensorFlow would store a graph of each layer
        self._task = task
        self._serve = functools.partial(task.serve, device.compiled(model) if compiled else model)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, None, 3], tf.uint8, "image")])
    def image(self, image):
        return self._serve(tf.ensure_shape(image, [None, None, 3]))  # for a clear error message

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.string, "encoded")])
    def encoded(self, encoded):
        return self.image(turn(decode(encoded, self._task.spec.levels), orientation(encoded)))

    @tf.function(autograph=False, input_signature=[])
    def classes(self):
        spec = self._task.spec
        return {
            "class_names": tf.constant(spec.class_names),
            "colors": tf.constant(spec.colors),
            "things": tf.constant(spec.things),
            "category_ids": tf.constant(spec.category_ids, tf.int32),
            "label_divisor": tf.constant(spec.label_divisor),
            "ignore": tf.constant(spec.ignore),
            "canvas": tf.constant(self._task.canvas),
            "kind": tf.constant(self._task.evaluator.name),
            **{name: tf.constant(value) for name, value in self._task.about.items()},
        }

    def signatures(self):
        return {"serving_default": self.encoded, "image": self.image, "classes": self.classes}


def write_saved_model(task, folded, folder, compiled=False):
    """Writes the SavedModel of a folded model; see `fold`.

    With `compiled`, the network has the ops for accelerators, and XLA compiles the network at the first call.
    """
    with device.portable() if compiled else contextlib.nullcontext():
        server = Server(task, folded, compiled=True) if compiled else (task.server or Server)(task, folded)
        tf.saved_model.save(server, folder, server.signatures())


def export(task, model, path, *, write=write_saved_model, extra=None, check=None):
    """Writes an export of a trained model. The folder appears only when it is complete and checked.

    Args:
        task: the task.
        model: the task's trained model.
        path: a folder that does not exist yet.
        write: function of (task, folded model, folder) that writes the network.
        extra: function that takes the path of the export's folder assets.extra, and writes further files there.
        check: function that takes the path of the export's folder, before the folder gets its final name. It may add
            the model card. If the function raises an error, no export is left.

    Raises:
        InputError: `path` exists.
    """
    with new_folder(path, SPEC) as folder:
        write(task, folded_model(task, model), folder)
        write_json(os.path.join(folder, SPEC), task.spec.to_json())
        if extra:
            extra(os.path.join(folder, "assets.extra"))
        write_json(os.path.join(folder, HASHES), folder_digests(folder, leave=(PAGE,)))
        if check:
            check(folder)


def folded_model(task, model):
    """The result of `fold`, which is built in float32 even if the global policy is mixed precision."""
    policy = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy("float32")
    try:
        return fold(task, model)
    finally:
        keras.mixed_precision.set_global_policy(policy)


def fold(task, model):
    """A float32 model without batch norms that equals `model` in inference up to rounding.

    The kernel of a convolution absorbs the scale of its batch norm, and a bias absorbs the shift.
    `Attention.folded_weights` explains how attention is folded.

    Args:
        task: the task that built the model.
        model: the model.
    """
    twin = task.build_model(folded=True)
    for folded, source in zip(twin.folding_units(), model.folding_units(), strict=True):
        for weight, value in zip(folded.weights, source.folded_weights(), strict=True):
            weight.assign(value)
    return twin
