"""Writes and reads models as TFLite or ONNX files. The network is folded: it has no batch norms.

A file takes a photo, uint8 [h, w, 3] of any size, and returns the outputs of the task's `serve`. A file of maps
has only the network: it takes one canvas of a fixed size, float32 [1, H, W, 3] from -1 to 1, and returns output maps;
the task does the rest.
"""

import functools
import io
import json
import logging
import os
import re
import warnings
import zipfile

import numpy as np
import tensorflow as tf
from packaging.version import Version
from tensorflow.lite.python.convert import ConverterError

from axial.data.preprocess import IN_FILE, SCALE, tile_size
from axial.errors import InputError, check_installed, pip_install
from axial.io.read import first_line, read_file
from axial.io.show import progress
from axial.io.write import write_bytes
from axial.layers import device
from axial.layers.context import holds
from axial.weights.source import LITE

LARGEST = 2**31  # bytes: the limit of flat buffers (TFLite) and of protocol buffers (ONNX)
ABOUT = "axial.json"  # name of a TFLite file's description, in the ZIP archive at the end of the file
_OPSET = 18  # ONNX's operator set of 2022, the first with the reductions that the grouping needs
_OLDEST = "1.14"  # the first onnxruntime with this operator set


def description(task, license=""):
    """JSON dict that a file holds for programs without axial: classes, label divisor, scale, licence."""
    about = {**task.spec.to_json(), "task": task.evaluator.name, "canvas": task.canvas, "license": license}
    if task.scale is not None:
        about |= {SCALE: task.scale, "largest_photo": tile_size(task.canvas, task.scale)}
    return about


class FileNetwork(tf.Module):
    """What a file holds: `run`, a `tf.function`, with its model, without which a TFLite file has no signature.

    Args:
        model: folded float32 model.
        predict: function from an input to a dict of outputs.
        given: `tf.TensorSpec` of the input.
    """

    def __init__(self, model, predict, given):
        super().__init__()

        def run(image):
            with holds(IN_FILE, True):
                return {name: tf.identity(x, name) for name, x in predict(image).items()}

        self.model, self.run = model, tf.function(run, autograph=False, input_signature=[given])


def maps_network(model, canvas):
    """The `FileNetwork` that maps one canvas to a dict of the model's output maps in float32."""
    return FileNetwork(model, model, tf.TensorSpec([1, *canvas, 3], tf.float32, "image"))


def photo_network(task, model):
    """The `FileNetwork` that maps a photo to a dict of the task's outputs."""
    return FileNetwork(model, functools.partial(task.serve, model), tf.TensorSpec([None, None, 3], tf.uint8, "image"))


# === Writing ===


def write_lite(network, path, *, about=(), precision="float32", images=()):
    """Writes a TFLite file.

    Args:
        network: `FileNetwork`.
        path: path of the file.
        about: result of `description`.
        precision: 'float32'; 'float16' for weights of half the size; or 'int8' for weights and activations of a quarter
            of the size. Inputs and outputs are always float32.
        images: typical inputs of the file. 'int8' needs these to calibrate the ranges of the activations.

    Raises:
        InputError: 'int8' has no images, or TFLite lacks an op of the model.
    """
    converter = tf.lite.TFLiteConverter.from_concrete_functions([network.run.get_concrete_function()], network)
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
    file = io.BytesIO(data)
    file.seek(len(data))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(zipfile.ZipInfo(ABOUT), json.dumps(dict(about)))
    write_bytes(path, file.getvalue())


def write_onnx(network, path, *, about=()):
    """Writes an ONNX file in float32; see `write_lite`.

    Raises InputError if tf2onnx is not installed, or names the operators that ONNX lacks.
    """
    check_installed("ONNX needs", "onnx", "onnx", "tf2onnx")
    import onnx
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.CRITICAL)  # it logs what it cannot convert; `_foreign` finds that
    reductions = {f"UnsortedSegment{kind}": (_segment, []) for kind in ("Sum", "Min", "Max")}
    with device.portable():  # tf2onnx converts TensorFlow's resize op to one with other output sizes
        proto, _ = tf2onnx.convert.from_function(
            network.run, network.run.input_signature, opset=_OPSET, custom_op_handlers=reductions
        )
    if lacking := _foreign(proto):
        raise InputError(f"ONNX cannot hold the model: {', '.join(lacking)}")
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in dict(about).items()}
    onnx.helper.set_model_props(proto, texts)
    write_bytes(path, proto.SerializeToString())


def _segment(graph, node, name, _):
    """Converts TensorFlow's reductions of a list's segments, for which tf2onnx has few types and needs much memory."""
    import onnx

    (values, segments, count), (output,) = node.input, node.output
    kind, dtype = node.type.removeprefix("UnsortedSegment").lower(), graph.get_dtype(values)
    shapes = [graph.get_shape(output)]
    limits = tf.as_dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype))
    first = onnx.helper.make_tensor("first", dtype, [1], [{"sum": 0, "min": limits.max, "max": limits.min}[kind]])
    graph.remove_node(node.name)
    one = graph.make_const(f"{name}/one", np.array([1], np.int64)).output[0]
    count, segments = (
        graph.make_node("Cast", [x], attr={"to": onnx.TensorProto.INT64}).output[0] for x in (count, segments)
    )
    count = graph.make_node("Reshape", [count, one]).output[0]
    blank = graph.make_node("ConstantOfShape", [count], attr={"value": first}).output[0]
    given, how = [blank, segments, values], {"reduction": kind.replace("sum", "add")}
    graph.make_node("ScatterElements", given, how, outputs=[output], shapes=shapes, dtypes=[dtype], name=name)


def _foreign(proto):
    """Sorted list of what an ONNX model has beyond the standard: operators, own functions, data in other files."""
    import onnx

    extras, graphs, tensors = {"own functions"} if proto.functions else set(), [proto.graph], []
    while graphs:
        graph = graphs.pop()
        tensors += [*graph.initializer, *(tensor.values for tensor in graph.sparse_initializer)]
        for node in graph.node:
            if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type):
                extras.add(node.op_type)
            for attribute in node.attribute:
                graphs += [attribute.g, *attribute.graphs]
                tensors += [attribute.t, *attribute.tensors, attribute.sparse_tensor.values]
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in tensors):
        extras.add("data in other files")
    return sorted(extras)


# === Reading ===


class FileModel:
    """A model in a file. The network of a file of maps takes the place of a task's model.

    A call with images, float32 [N, H, W, 3], returns a dict of output maps. The call runs one canvas at a time.

    Attributes:
        path: path of the file.
        canvas: (height, width) of the input; None if the file takes photos.
        shapes: dict from the name of each output to its shape.

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
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None
        except Exception as error:  # the runtimes raise many types for damaged files
            raise InputError(f"{self.path}: not a whole file of axial-export ({first_line(error)})") from None

    def __call__(self, images):
        names = list(self.shapes)

        def run(images):
            rows = [self._run(image[None]) for image in images]
            return [np.concatenate([row[name] for row in rows]) for name in names]

        values = tf.numpy_function(run, [images], [tf.float32] * len(names), stateful=False)
        values = tf.nest.flatten(values)  # in eager mode, a single map comes without a list
        return {name: tf.ensure_shape(x, [images.shape[0], *self.shapes[name][1:]]) for name, x in zip(names, values)}

    def predict(self, image):
        """dict of the outputs for a photo, uint8 [h, w, 3]. Raises InputError for a photo that the file refuses."""
        try:
            return self._run(np.asarray(image))
        except Exception as error:  # of the runtimes
            size = "x".join(map(str, image.shape[1::-1]))
            raise InputError(f"{self.path}: refuses a photo of {size} pixels ({first_line(error)})") from None


def _open_lite(data):
    """(canvas or None, dict of the outputs' shapes, function that maps an input to a dict) of a TFLite file."""
    try:
        from ai_edge_litert.interpreter import Interpreter  # comes with TensorFlow, but not on TPU workers
    except ImportError as error:
        raise InputError(f"TFLite needs pip install ai-edge-litert ({error})") from None
    interpreter = Interpreter(model_content=data, num_threads=os.cpu_count())
    run = interpreter.get_signature_runner()
    shapes = {name: tuple(map(int, about["shape"])) for name, about in run.get_output_details().items()}
    given = run.get_input_details()["image"]
    canvas = tuple(map(int, given["shape"][1:3])) if given["dtype"] == np.float32 else None
    return canvas, shapes, lambda image: run(image=image)


def _open_onnx(data):
    """As `_open_lite`, for an ONNX file."""
    check_installed("ONNX needs", "onnx", "onnx", "onnxruntime")
    import onnx
    import onnxruntime

    if Version(onnxruntime.__version__) < Version(_OLDEST):
        raise InputError(f"onnxruntime {onnxruntime.__version__} is too old, needs {_OLDEST}: {pip_install('onnx')}")
    if foreign := _foreign(onnx.load_from_string(data)):
        raise InputError(f"has what axial-export does not write: {', '.join(foreign)}")
    onnxruntime.set_default_logger_severity(4)  # an error is raised, and need not be logged too
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    shapes = {output.name: tuple(output.shape) for output in session.get_outputs()}
    (given,) = session.get_inputs()
    canvas = tuple(given.shape[1:3]) if given.type == "tensor(float)" else None
    return canvas, shapes, lambda image: dict(zip(shapes, session.run(list(shapes), {"image": image})))
