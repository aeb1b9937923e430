"""Exports trained models. A SavedModel takes photos of any size."""

import contextlib
import functools
import math
import os
import pathlib

import numpy as np
import tensorflow as tf
import tf_keras as keras
from tensorflow.core.protobuf import saved_model_pb2

from axial.data.decode import decode, orientation, turn
from axial.data.preprocess import tile_size
from axial.io.images import LARGEST_PIXELS
from axial.io.write import folder_digests, new_folder, write_json
from axial.layers import device
from axial.weights.card import PAGE

SPEC = os.path.join("assets.extra", "spec.json")
WARMUP = os.path.join("assets.extra", "tf_serving_warmup_requests")  # the path that TF Serving reads
HASHES = os.path.join("assets.extra", "hashes.json")  # SHA-256 of all other files of an export, except the model card


class Server(tf.Module):
    """The signatures of an export that takes photos.

    'serving_default' takes an encoded photo, string [], and turns it upright by its EXIF tag. It refuses a photo
    that it cannot decode to the same pixels as axial-predict; see `decode`. 'image' takes pixels, uint8 [h, w, 3]. Both
    return the outputs that the task's `served` lists. h x w is the size of the upright photo.

    'batch' takes n encoded photos, string [n], and predicts them one after the other. It returns the same outputs with
    a leading axis n, padded with 0 to the largest photo, and two more: size, int32 [n, 2], the (height, width) of each
    photo, and error, string [n], empty for each photo that is predicted. The outputs of other photos are 0.

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
        return self._serve(self._checked(tf.ensure_shape(image, [None, None, 3])))  # for a clear error message

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.string, "encoded")])
    def encoded(self, encoded):
        return self.image(self._upright(encoded))

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.string, "encoded")])
    def batch(self, encoded):
        outputs = self.image.get_concrete_function().structured_outputs
        ranks = {name: x.shape.rank for name, x in outputs.items()}
        empty = tf.data.Dataset.from_tensors(tf.zeros([0, 0, 3], tf.uint8))

        def one(encoded):
            photo = tf.data.Dataset.from_tensors(encoded).map(lambda x: self._checked(self._upright(x)))
            image = photo.ignore_errors().concatenate(empty).take(1).get_single_element()
            whole = tf.size(image) > 0
            zeros = {name: tf.zeros([0] * ranks[name], x.dtype) for name, x in outputs.items()}
            result = tf.cond(whole, lambda: self.image(image), lambda: zeros)
            error = tf.where(whole, "", "not a photo that serving_default takes; its message has the reason")
            maps = {
                k: tf.RaggedTensor.from_tensor(x, ragged_rank=ranks[k] - 1) for k, x in result.items() if ranks[k] > 1
            }
            return {**result, **maps, "size": tf.shape(image)[:2], "error": error}

        specs = {
            k: tf.RaggedTensorSpec([None] * ranks[k], x.dtype, ranks[k] - 1) if ranks[k] else tf.TensorSpec([], x.dtype)
            for k, x in outputs.items()
        }
        specs |= {"size": tf.TensorSpec([2], tf.int32), "error": tf.TensorSpec([], tf.string)}
        results = tf.map_fn(one, encoded, fn_output_signature=specs, parallel_iterations=1)
        return {k: x.to_tensor() if isinstance(x, tf.RaggedTensor) else x for k, x in results.items()}

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.string)])
    def _upright(self, encoded):
        """The upright photo of a file, string [], as uint8 [h, w, 3]."""
        return turn(decode(encoded, self._task.spec.levels), orientation(encoded))

    def _checked(self, image):
        """The photo, uint8 [h, w, 3]. Raises InvalidArgumentError if the export takes no photo of its size."""
        size = tf.shape(image)[:2]
        pixels = tf.reduce_prod(tf.cast(size, tf.int64))
        text = tf.strings.format(f"image: {{}}x{{}} pixels (h x w); expected 1 to {LARGEST_PIXELS}", tf.unstack(size))
        with tf.control_dependencies([tf.debugging.Assert((pixels > 0) & (pixels <= LARGEST_PIXELS), [text])]):
            size = tf.identity(size)
        with tf.control_dependencies(self._task.expect(size) if self._task.expect else []):
            return tf.identity(image)

    def requests(self):
        """Requests that a server runs before the first user's: pairs (signature, dict of its inputs).

        One photo is small. The other one is wider than a tile, if the export has tiles.
        """
        scale = self._task.scale or 1
        side = math.ceil(1 / scale)
        photos = [np.zeros([side, width, 3], np.uint8) for width in (side, tile_size(self._task.canvas, scale)[1] + 1)]
        small, large = (tf.io.encode_png(photo) for photo in photos)
        several = {"encoded": tf.stack([small, large])}
        return [("serving_default", {"encoded": small}), ("image", {"image": photos[0]}), ("batch", several)]

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
        return {"serving_default": self.encoded, "image": self.image, "batch": self.batch, "classes": self.classes}


def write_saved_model(task, folded, folder, compiled=False):
    """Writes the SavedModel of a folded model; see `fold`.

    With `compiled`, the network has the ops for accelerators, and XLA compiles the network at the first call.
    """
    with device.portable() if compiled else contextlib.nullcontext():
        server = Server(task, folded, compiled=True) if compiled else (task.server or Server)(task, folded)
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
        tf.saved_model.save(server, folder, server.signatures(), options)
    _forget_gradients(os.path.join(folder, "saved_model.pb"))
    write_warmup(os.path.join(folder, WARMUP), server.requests())


def _forget_gradients(path):
    """Deletes the names of the gradients that a saved_model.pb lacks. TensorFlow would warn of them at each loading."""
    model = saved_model_pb2.SavedModel.FromString(pathlib.Path(path).read_bytes())
    for function in model.meta_graphs[0].graph_def.library.function:
        for node in function.node_def:
            if "_gradient_op_type" in node.attr:
                del node.attr["_gradient_op_type"]
    pathlib.Path(path).write_bytes(model.SerializeToString(deterministic=True))


def write_warmup(path, requests):
    """Writes TF Serving's warm-up requests: records of PredictionLog, a protocol buffer of tensorflow-serving-api.

    The fields are PredictionLog.predict_log (6), PredictLog.request (1), PredictRequest.model_spec (1) and inputs (2),
    ModelSpec.signature_name (3), and key (1) and value (2) of an entry of inputs.

    Args:
        path: path of the file.
        requests: pairs (signature, dict of its inputs).
    """

    def field(number, content):
        """bytes of a field whose content is a text or another protocol buffer, after the length in groups of 7 bits."""
        groups = [len(content) >> shift for shift in range(0, max(len(content).bit_length(), 1), 7)]
        length = bytes([*(group & 127 | 128 for group in groups[:-1]), groups[-1]])
        return bytes([number << 3 | 2]) + length + content

    tf.io.gfile.makedirs(os.path.dirname(path))
    with tf.io.TFRecordWriter(path) as file:
        for signature, inputs in requests:
            request = field(1, field(3, signature.encode()))
            for name, value in inputs.items():
                tensor = tf.make_tensor_proto(value.numpy() if tf.is_tensor(value) else value).SerializeToString()
                request += field(2, field(1, name.encode()) + field(2, tensor))
            file.write(field(6, field(1, request)))


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
