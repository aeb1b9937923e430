"""Models with csrhddlam/axial-deeplab's weights equal its PyTorch models: four networks' logits, and one training.

AXIAL_TORCH is the path of a Python with PyTorch. CSRHDDLAM is the path of a checkout of the source. `scripts/test.sh
-n 0 -m slow -s` with this file prints the numbers of experiments/results/checks.md. Both sides also compute a training
step in float64, where rounding differences vanish.
"""

import functools
import itertools
import os
import subprocess
import tempfile

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.data.convert import Conversion, convert_split
from axial.data.converters import imagenet
from axial.layers.batch_norm import BatchNorm, BatchNormConfig
from axial.models.registry import ModelConfig
from axial.tasks.classification.task import ClassificationData, ClassificationTask
from axial.weights import convert
from axial.weights.interchange import built
from axial.weights.names import assign_weights, csrhddlam_weights, weight_names
from tests.conftest import DATA, ROOT

TORCH, SOURCE = os.environ.get("AXIAL_TORCH"), os.environ.get("CSRHDDLAM")
IMAGENETTE = DATA / "imagenette"
NAMES = "axial26s", "axial50s", "axial50m", "axial50l"
STEPS, BATCH = {"float32": 30, "float64": 1}, 8  # numbers of training steps. See torch_side.py
RATE = 0.05 * BATCH / 128  # csrhddlam's README uses 0.05 for a batch of 128
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TORCH and SOURCE), reason="AXIAL_TORCH and CSRHDDLAM must name PyTorch and the source"),
    pytest.mark.skipif(not IMAGENETTE.is_dir(), reason=f"no data in {IMAGENETTE}"),
]


# === Both sides ===


@functools.cache
def data_dir():
    """Converts imagenette to TFRecords and returns their folder."""
    out, spec = tempfile.mkdtemp(), imagenet.imagenet_spec(str(IMAGENETTE))
    for split in ("train", "val"):
        listed = imagenet.imagenet_items(str(IMAGENETTE), split)
        convert_split(Conversion(*listed, spec, split, out, progress=False))
    return out


def write_photos(out):
    """Writes 20 central crops of imagenette's validation photos, float32 [20, 224, 224, 3]."""
    task = ClassificationTask(ModelConfig("resnet_50"), ClassificationData("train", "val"), data_dir())
    photos = [example["image"].numpy() for example in itertools.islice(task.eval_dataset(), 0, 200, 10)]
    np.save(os.path.join(out, "photos.npy"), np.stack(photos))


def write_batches(out):
    """Writes 30 training batches of 8 images, and their labels."""
    task = ClassificationTask(ModelConfig("resnet_50"), ClassificationData("train", "val"), data_dir())
    batches = list(itertools.islice(task.train_dataset(BATCH, seed=0), STEPS["float32"]))
    labels = np.stack([np.argmax(batch["label"], -1) for batch in batches])
    np.savez(os.path.join(out, "batches.npz"), images=np.stack([b["image"] for b in batches]), labels=labels)


@pytest.fixture(scope="session")
def run_torch_side(tmp_path_factory):
    """A function of (verb of torch_side.py, name of a network). It runs the script and returns the output folder."""

    @functools.cache
    def run(verb, name):
        out = str(tmp_path_factory.mktemp(f"{verb}_{name}"))
        (write_photos if verb == "logits" else write_batches)(out)
        side = ROOT / "tests" / "weights" / "torch_side.py"
        subprocess.run([TORCH, side, verb, name, out], check=True, env={**os.environ, "PYTHONPATH": ""})
        return out

    return run


def arrays(path, start=""):
    """Reads the arrays of an .npz file whose names begin with `start`. Returns a dict with `start` removed."""
    with np.load(path) as file:
        return {name.removeprefix(start): file[name] for name in file.files if name.startswith(start)}


@pytest.fixture(params=["float32", "float64"])
def precision(request, monkeypatch):
    """The precision of axial's models. For float64, the fixture replaces float32 in TensorFlow and Keras."""
    if request.param == "float32":
        yield request.param
        return
    make = keras.layers.Layer.__init__

    def double(self, *args, **options):
        make(self, *args, **{k: "float64" if v == "float32" else v for k, v in options.items()})

    def batch_norm(self, x, training=False):  # the fused op has no float64
        scale, shift = (None, None) if training else self.folded()
        return self._synchronized(x) if training else x * scale + shift

    monkeypatch.setattr(tf, "float32", tf.float64)
    monkeypatch.setattr(keras.layers.Layer, "__init__", double)
    monkeypatch.setattr(BatchNorm, "call", batch_norm)
    keras.backend.set_floatx("float64")
    keras.mixed_precision.set_global_policy("float64")
    yield request.param
    keras.backend.set_floatx("float32")


def converted(out, precision="float32"):
    """Converts net.pth in `out`. Returns (classification task, model with the weights)."""
    conversion = convert.csrhddlam(os.path.join(out, "net.pth"))
    card, backend = conversion.card, {"backend": "reference"} if precision == "float64" else {}
    config = ModelConfig(card.model, norm=BatchNormConfig(0.9, 1e-5, True), arguments=card.arguments)
    model = built(card.model, card.num_classes, config.norm, {**card.arguments, **backend})
    assign_weights(model, conversion.values)
    task = ClassificationTask(config, ClassificationData("train", "val"), data_dir(), label_smoothing=0.1)
    return task, model


# === Logits ===


@pytest.mark.parametrize("name", NAMES)
def test_logits(name, run_torch_side):
    """On 20 photos of 224x224 pixels, the top-1 class is the same, and logits differ by less than 1e-4."""
    out = run_torch_side("logits", name)
    _, model = converted(out)
    photos, expected = np.load(os.path.join(out, "photos.npy")), np.load(os.path.join(out, "logits.npy"))
    call = tf.function(model)
    logits = np.concatenate([call(tf.constant(photo[None]))["logits"] for photo in photos])
    worst = np.abs(logits - expected).max()
    print(f"\nlogits: largest difference {worst:.1e}, standard deviation {expected.std():.2f}")
    assert len(photos) == 20 and (logits.argmax(1) == expected.argmax(1)).all() and worst < 1e-4


# === Training ===


def test_the_same_training(run_torch_side, precision):
    """Plain gradient descent with label smoothing 0.1 on the same batches gives the same losses and weights."""
    out = run_torch_side("train", "axial26s")
    compare_training(train(out, precision), out, precision)


def train(out, precision):
    """Trains axial's model. Returns a dict like torch_side.py's files, with axial's names of weights."""
    task, model = converted(out, precision)

    @tf.function
    def step(image, label):
        with tf.GradientTape() as tape:
            loss = task.losses(model, {"image": image, "label": label})["total"]
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]  # dense: tables have IndexedSlices
        for weight, gradient in zip(model.trainable_variables, gradients):
            weight.assign_sub(RATE * gradient)
        return loss, gradients

    batches, results = arrays(os.path.join(out, "batches.npz")), {"losses": []}
    for images, labels in zip(batches["images"][: STEPS[precision]], batches["labels"]):
        loss, gradients = step(tf.constant(images.astype(precision)), tf.one_hot(labels, 10, dtype=precision))
        results["losses"].append(float(loss))
        if len(results["losses"]) == 1:
            names = {id(weight): name for name, weight in weight_names(model).items()}
            pairs = zip(model.trainable_variables, gradients)
            results["gradient"] = {names[id(weight)]: gradient.numpy() for weight, gradient in pairs}
            results["first"] = {name: weight.numpy() for name, weight in weight_names(model).items()}
    results["last"] = {name: weight.numpy() for name, weight in weight_names(model).items()}
    return results


def their_arrays(out, precision, what, shapes):
    """torch_side.py's arrays by axial's names. `what` is 'gradient', or 'first' or 'last' for a step's weights."""
    return csrhddlam_weights(arrays(os.path.join(out, f"{precision}.npz"), f"{what}/"), shapes)


def errors(actual, expected):
    """dict from names to the largest difference of two tensors, divided by the expected tensor's largest value.

    Some tensors are 0 except for rounding errors: gradients of offsets before a batch norm, and means after one. So the
    divisor is at least a thousandth of the median of all tensors' largest values.
    """
    assert set(actual) == set(expected)
    sizes = {name: np.abs(a).max() for name, a in expected.items()}
    least = np.median(list(sizes.values())) / 1000
    return {name: np.abs(actual[name] - a).max() / max(sizes[name], least) for name, a in expected.items()}


def compare_training(results, out, precision):
    """Prints the losses and relative differences, and asserts that these differences are within limits."""
    losses, expected = np.array(results["losses"]), arrays(os.path.join(out, f"{precision}.npz"), "losses")[""]
    changes = losses / expected - 1
    for step in (1, 2, 3, 5, 10, 15, 20, 25, 30):
        if step <= len(losses):
            mine, other = losses[step - 1], expected[step - 1]
            print(f"{precision}, step {step}: ours {mine:.6f} theirs {other:.6f} {100 * changes[step - 1]:+.1e} %")
    limit = {"float32": None, "float64": 1e-9}[precision]
    for what in ("gradient", "first", "last")[: 3 if precision == "float32" else 2]:
        other = their_arrays(out, precision, what, {name: array.shape for name, array in results["last"].items()})
        kinds = (
            {"gradients": list(other)}
            if what == "gradient"
            else {end: [name for name in other if name.endswith(end)] for end in ("moving_mean", "moving_variance")}
        )
        for kind, names in kinds.items():
            differences = errors({n: results[what][n] for n in names}, {n: other[n] for n in names})
            when = {"gradient": 1, "first": 1, "last": len(losses)}[what]
            worst, median = max(differences.values()), np.median(list(differences.values()))
            print(f"{precision}, {len(differences)} {kind} after step {when}: {worst:.1e}, median {median:.1e}")
            assert limit is None or worst < limit, max(differences, key=differences.get)
    assert abs(changes[0]) < {"float32": 1e-5, "float64": 1e-12}[precision]
    assert abs(changes[-1]) < {"float32": 0.01, "float64": 1e-9}[precision]
