"""Shared set-up: two logical CPUs, converted sample photos, golden files."""

import ctypes
import functools
import gc
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"  # addresses of the fake services

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.framework import ops

from axial.layers import device
from axial.models.registry import ModelConfig
from axial.tasks.segmentation.input_pipeline import DataConfig
from axial.tasks.segmentation.panoptic import PanopticTask
from tests.browser import chromium  # noqa: F401, a fixture
from tests.cli.run_fixture import exported, trained  # noqa: F401, fixtures
from tests.cloud.tools_fixture import tools  # noqa: F401, a fixture
from tests.command_server import command, refuse, succeed  # noqa: F401, fixtures
from tests.data.classification_fixture import colours_dir  # noqa: F401, a fixture
from tests.data.text_fixture import texts_dir  # noqa: F401, a fixture
from tests.weights.hub_fixture import hub_of, hub_server  # noqa: F401, fixtures

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = pathlib.Path(os.environ.get("AXIAL_GOLDEN") or ROOT / "tests" / "golden")
DATA = pathlib.Path(os.environ.get("AXIAL_DATA") or ROOT.parent / "shared" / "data")

# The TPU kernels are written in jax. The version that axial uses needs Python 3.11.
KERNEL_TESTS = ["layers/attention/test_tpu_layer.py"]
collect_ignore = [] if importlib.util.find_spec("jax") else KERNEL_TESTS

# TensorFlow graphs have many reference cycles. With Python's defaults, garbage collection takes 1/8 of the time.
gc.freeze()
gc.set_threshold(50_000, 10, 5)

# Grappler takes an eighth of a training's time, which does not pay off, as a test runs a graph for a few steps only.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def _untuned(dataset):
    """Returns the dataset without autotuning, whose thread can delay the teardown by a minute (see `data.streams`)."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


dataset_ops.DatasetV2._apply_debug_options = _untuned  # TensorFlow calls it when a dataset is iterated

_cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(_cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


@functools.cache
def run_script(script, *arguments):
    """Runs a script of experiments/ in the clone, and returns the finished process."""
    call = [sys.executable, f"experiments/{script}", *map(str, arguments)]
    return subprocess.run(call, check=False, capture_output=True, text=True, cwd=ROOT)


def jit_values():
    """Values of tf.function's jit_compile that this TensorFlow supports on a CPU.

    It is a function and not a constant, because workers must connect to each other before the first use of TensorFlow.
    """
    return (False, True) if device.has_xla() else (False,)


@functools.cache
def two_replicas():
    """The `MirroredStrategy` that all tests use. A second one in this process would reuse its collective keys."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def golden_files(pattern):
    """Names of the golden files that match a pattern. Asserts that at least one file matches."""
    names = sorted(path.name for path in GOLDEN.glob(pattern))
    assert names, f"no {pattern} in {GOLDEN}"
    return names


def read_golden(name):
    """Reads a golden file. Returns (dict from names to arrays, dict of the file's JSON metadata)."""
    with np.load(GOLDEN / name) as file:
        arrays = {key: file[key] for key in file.files}
    return arrays, json.loads(str(arrays.pop("meta")))


def prefixed(arrays, prefix):
    """Selects the arrays whose names start with a prefix. Returns a dict with the prefix removed from the names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def check_golden(arrays, run, weights, *, convert, to_ours=lambda array: array):
    """Checks a layer's outputs, gradients and weight updates. Returns the names of the gradients and of the updates.

    Args:
        arrays: dict of a golden file's arrays.
        run: function of (x, training) that calls the layer. The layer has the file's weights.
        weights: dict from axial's names to the layer's weights.
        convert: function that converts a dict of the file's weights to axial's names and shapes.
        to_ours: function that transposes the file's feature maps to axial's order of axes.
    """
    x = tf.constant(to_ours(arrays["x"]))
    assert relative_error(run(x, False), to_ours(arrays["y_inference"])) < 1e-4
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = run(x, True)
        loss = tf.reduce_sum(y * to_ours(arrays["cotangent"]))
    assert relative_error(y, to_ours(arrays["y_training"])) < 1e-4
    expected = prefixed(arrays, "grad_train/")
    expected_x, expected = to_ours(expected.pop("x")), convert(expected)
    gradient_x, gradients = tape.gradient(loss, [x, {name: weights[name] for name in expected}])
    assert relative_error(gradient_x, expected_x) < 1e-4
    scale = max(abs(value).max() for value in expected.values())
    for name, gradient in gradients.items():
        gradient = tf.convert_to_tensor(gradient).numpy()
        if "height/" in name and name.endswith("output_norm/beta"):
            # The width layer's batch norm removes this offset. Both gradients are 0 except for rounding errors.
            assert max(abs(gradient).max(), abs(expected[name]).max()) < 1e-6 * scale, name
        else:
            assert relative_error(gradient, expected[name]) < 1e-4, name
    moved = convert(prefixed(arrays, "after_train/"))
    for name, value in moved.items():
        assert relative_error(weights[name], value) < 1e-4, name
    return set(expected), set(moved)


def reached_by(port):
    """Which machines can connect to a TCP port: 'this machine' or 'all'. Reads the listening addresses from `ss`."""
    if not shutil.which("ss"):
        pytest.skip("needs ss (Debian: apt install iproute2)")
    words = ["ss", "--no-header", "--listening", "--tcp", "--numeric", f"sport = :{port}"]
    addresses = [line.split()[3] for line in subprocess.check_output(words, text=True).splitlines()]
    assert addresses, f"nothing listens at {port}"
    local = [address.startswith(("127.", "[::1]")) or "%lo:" in address for address in addresses]
    return "this machine" if all(local) else "all"


def relative_error(ours, theirs):
    """Largest absolute difference of two arrays, divided by the largest absolute value of `theirs`."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    return np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-12)


def outputs_and_gradients(layer, x):
    """Returns [y, gradient of x, *gradients of the trainable weights] in training. The loss is the mean of y^2."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
        loss = tf.reduce_mean(y**2)
    return [y, *map(tf.convert_to_tensor, tape.gradient(loss, [x, *layer.trainable_weights]))]


def randomize(layer, seed=0):
    """Sets all weights of a built layer or model to random values, including the statistics of batch norms."""
    rng = np.random.default_rng(seed)
    for weight in layer.weights:
        name = weight.name
        if name.endswith(("gamma:0", "variance:0")):
            weight.assign(rng.uniform(0.5, 1.5, weight.shape))
        else:
            weight.assign(rng.normal(0, 0.5, weight.shape))


def built(layer, *inputs):
    """Calls a layer once, which builds it. Returns the layer with random weights."""
    layer(*inputs)
    randomize(layer)
    return layer


def make_task(data_dir, canvas=(65, 65), *, model=None, data=None, **options):
    """A `PanopticTask` on the sample photos.

    Args:
        data_dir: folder of the TFRecords.
        canvas: (height, width) of the network's input, in pixels.
        model, data: dicts of further arguments of `ModelConfig` and `DataConfig`.
        **options: further arguments of `PanopticTask`.
    """
    model = ModelConfig(**{"name": "axial_deeplab_nano", **(model or {})})
    data = DataConfig("train2017", "val2017", canvas, **(data or {}))
    return PanopticTask(model, data, data_dir, **options)


@pytest.fixture(autouse=True)
def clean_keras():
    """Every test starts with the float32 policy and leaves no global state."""
    keras.mixed_precision.set_global_policy("float32")
    yield
    keras.mixed_precision.set_global_policy("float32")
    tf.random.set_seed(None)  # a global seed would change tf.data's random numbers


def free_graphs():
    """Frees all unused graphs.

    TensorFlow registers the gradient function of each `tf.custom_gradient` that is traced or loaded. Each registered
    function keeps a whole graph alive.
    """
    gradients = ops.gradient_registry._registry
    for name in [name for name in gradients if name.startswith("CustomGradient-")]:
        del gradients[name]
    keras.backend.clear_session()
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # only glibc has it
        libc.malloc_trim(0)


@pytest.fixture(scope="module", autouse=True)
def freed_memory():
    """Frees the graphs of a test file when its last test ends. Otherwise a test process grows to 11 GB."""
    before = len(ops.gradient_registry._registry)
    yield
    if len(ops.gradient_registry._registry) > before:
        free_graphs()


@pytest.fixture(params=["cpu", "accelerator"])
def kind_of_device(request, monkeypatch):
    """Runs a test twice: with the implementation for CPUs, and with the implementation for accelerators."""
    monkeypatch.setattr(device, "on_cpu", lambda: request.param == "cpu")


BACKENDS = ("cpu", "xla", "reference")  # implementations of attention that run on a CPU


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(scope="session")
def sample_dir(tmp_path_factory):
    """Path of a folder with the sample photos as TFRecords."""
    from axial.data.converters.coco import sample_data_dir

    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    return sample_data_dir()
