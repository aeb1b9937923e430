"""Writes and reads networks as TFLite or ONNX files. A file only maps a canvas to output maps; the task does the rest.

The network is folded: it has no batch norms. Its input 'image' is one canvas of a fixed size, float32 [1, H, W, 3] from
-1 to 1.
"""

import logging
import os
import re
import warnings

import numpy as np
import tensorflow as tf
from tensorflow.lite.python.convert import ConverterError

from axial.errors import InputError, check_installed
from axial.io.read import first_line, read_file
from axial.io.show import progress
from axial.io.write import write_bytes
from axial.layers import device
from axial.weights.source import LITE

LARGEST = 2**31  # bytes: the limit of flat buffers (TFLite) and of protocol buffers (ONNX)
_OPSET = 17  # ONNX's operator set of 2022, which every later runtime supports


def _network(model, canvas):
    """A `tf.function` that maps one canvas to a dict of the model's output maps in float32."""
    signature = [tf.TensorSpec([1, *canvas, 3], tf.float32, "image")]

    def run(image):
        return {name: tf.identity(tf.cast(x, tf.float32), name) for name, x in model(image).items()}

    return tf.function(run, autograph=False, input_signature=signature)


# === Writing ===


def write_lite(model, canvas, path, *, precision="float32", images=()):
    """Writes a TFLite file.

    Args:
        model: folded float32 model.
        canvas: (height, width) of the model's input.
        path: path of the file.
        precision: 'float32'; 'float16' for weights of half the size; or 'int8' for weights and activations of a quarter
            of the size. Inputs and outputs are always float32.
        images: typical canvases [H, W, 3]. 'int8' needs these canvases to calibrate the ranges of the activations.

    Raises:
        InputError: 'int8' has no images, or TFLite lacks an op of the model.
    """
    network = _network(model, canvas)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([network.get_concrete_function()], model)
    if precision != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if precision == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if precision == "int8":
        images = [tf.cast(image, tf.float32)[None] for image in images]
        if not images:
            raise InputError("--precision=int8: no photos to calibrate the ranges of the activations")

        def samples():
            return ({"image": image} for image in progress(images, "ranges of int8", unit="photo"))

        converter.representative_dataset = samples
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"\s*Warning: tf.lite.Interpreter is deprecated")  # from TensorFlow
            data = converter.convert()
    except ConverterError as error:
        lacking = sorted(set(re.findall(r"'(tf\.\w+)' op is neither", str(error))))
        raise InputError(f"TFLite cannot hold the model: {', '.join(lacking) or first_line(error)}") from None
    write_bytes(path, data)


def write_onnx(model, canvas, path):
    """Writes an ONNX file in float32; see `write_lite`. Raises InputError if tf2onnx is not installed."""
    check_installed("ONNX needs", "onnx", "tf2onnx")
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    network = _network(model, canvas)
    with device.portable():  # tf2onnx converts TensorFlow's resize op to one with other output sizes
        proto, _ = tf2onnx.convert.from_function(network, network.input_signature, opset=_OPSET)
    write_bytes(path, proto.SerializeToString())


# === Reading ===


class FileModel:
    """The network of a file, which tasks use in place of a model.

    A call with images, float32 [N, H, W, 3], returns a dict of output maps. The call runs one canvas at a time.

    Attributes:
        path: path of the file.
        canvas: (height, width) of the input.
        shapes: dict from the name of each output map to its shape.

    Args:
        path: path of a TFLite or ONNX file that axial-export wrote.

    Raises:
        InputError: the file is missing or damaged, or a package is not installed.
    """

    def __init__(self, path):
        self.path = path
        data = read_file(self.path, LARGEST)
        open_file = _open_lite if self.path.endswith(LITE) else _open_onnx
        try:
            self.canvas, self.shapes, self._run = open_file(data)
        except InputError:
            raise
        except Exception as error:  # the runtimes raise many types for damaged files
            raise InputError(f"{self.path}: not a whole file of axial-export ({first_line(error)})") from None

    def __call__(self, images):
        names = list(self.shapes)

        def run(images):
            rows = [self._run(image[None]) for image in images]
            return [np.concatenate([row[name] for row in rows]) for name in names]

        values = tf.numpy_function(run, [images], [tf.float32] * len(names), stateful=False)
        values = tf.nest.flatten(values)  # in eager mode, a single map comes without a list
        batch = images.shape[0]
        return {name: tf.ensure_shape(x, [batch, *self.shapes[name][1:]]) for name, x in zip(names, values)}


def _open_lite(data):
    """(canvas, dict of the maps' shapes, function that maps a canvas to a dict of maps) of a TFLite file."""
    try:
        from ai_edge_litert.interpreter import Interpreter  # comes with TensorFlow, but not on TPU workers
    except ImportError as error:
        raise InputError(f"TFLite needs pip install ai-edge-litert ({error})") from None
    interpreter = Interpreter(model_content=data, num_threads=os.cpu_count())
    interpreter.allocate_tensors()
    run = interpreter.get_signature_runner()
    shapes = {name: tuple(map(int, about["shape"])) for name, about in run.get_output_details().items()}
    canvas = tuple(map(int, run.get_input_details()["image"]["shape"][1:3]))
    return canvas, shapes, lambda image: run(image=image)


def _open_onnx(data):
    """As `_open_lite`, for an ONNX file."""
    check_installed("ONNX needs", "onnx", "onnxruntime")
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    shapes = {output.name: tuple(output.shape) for output in session.get_outputs()}
    canvas = tuple(session.get_inputs()[0].shape[1:3])
    return canvas, shapes, lambda image: dict(zip(shapes, session.run(list(shapes), {"image": image})))
