"""csrhddlam/axial-deeplab beside ours, from the same file: logits of its four networks, and the same training.

AXIAL_TORCH names a Python with PyTorch, CSRHDDLAM a checkout of the source; `scripts/test.sh -n 0 -m slow -s` with this
file prints the figures of experiments/RESULTS.md. The source computes in float32 and in float64. Where ours is as far
from its float64 as its own float32 is, the difference is rounding.
"""

import itertools
import os
import subprocess

import numpy as np
import pytest
import tensorflow as tf

from axial.data.classification import ClassificationData, evaluation_photos, training_batches
from axial.data.tfrecord import read_manifest
from axial.models.registry import ModelConfig
from axial.tasks.classification import ClassificationTask
from axial.training.optimizers import NesterovMomentum
from axial.weights import convert
from axial.weights.names import csrhddlam_weights, weight_names
from conftest import DATA, ROOT

TORCH, SOURCE = os.environ.get("AXIAL_TORCH"), os.environ.get("CSRHDDLAM")
IMAGENETTE = DATA / "imagenette"
STEPS, BATCH, RATE = 30, 8, 0.05  # the rate is that of torch_side.py
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TORCH and SOURCE), reason="AXIAL_TORCH and CSRHDDLAM name PyTorch and the source"),
    pytest.mark.skipif(not IMAGENETTE.is_dir(), reason=f"no data in {IMAGENETTE}"),
]


def theirs(verb, name, out):
    """Runs torch_side.py on a folder."""
    environment = {**os.environ, "PYTHONPATH": ""}
    subprocess.run([TORCH, ROOT / "tests" / "weights" / "torch_side.py", verb, name, out], check=True, env=environment)


def arrays(path, start=""):
    """dict of the arrays of an .npz file whose names begin so, without the beginning."""
    with np.load(path) as file:
        return {name.removeprefix(start): file[name] for name in file.files if name.startswith(start)}


@pytest.fixture(scope="session")
def records(command, tmp_path_factory):
    """imagenette as TFRecords, and its spec."""
    out = str(tmp_path_factory.mktemp("imagenette"))
    splits = "--split=train", "--split=val"
    result = command("convert", "imagenet", f"--input_dir={IMAGENETTE}", f"--output_dir={out}", *splits)
    assert result.code == 0, result.err
    return out, read_manifest(out, "train")["spec"]


# === Logits ===


@pytest.mark.parametrize("name", ["axial26s", "axial50s", "axial50m", "axial50l"])
def test_logits(name, records, tmp_path):
    """20 photos at 224: the same top-1, and logits within 1e-4 where float32 itself is."""
    data_dir, spec = records
    photos = evaluation_photos(data_dir, "val", spec, (224, 224), central=0.875)
    photos = np.stack([example["image"].numpy() for example in itertools.islice(photos, 0, 200, 10)])
    np.save(tmp_path / "photos.npy", photos)
    theirs("logits", name, tmp_path)
    rows = compare_logits(str(tmp_path))
    print(f"\n{name}: {rows}")
    assert rows["same top-1"] == len(photos) == 20
    assert rows["ours"] < max(1e-4, 2 * rows["theirs"])


def compare_logits(out):
    """Largest differences from the source's float64 logits, in logits, and the logits' own deviation."""
    _, model = convert.convert("csrhddlam", os.path.join(out, "net.pth"), os.path.join(out, "converted"))
    photos, wanted = np.load(os.path.join(out, "photos.npy")), arrays(os.path.join(out, "logits.npz"))
    call = tf.function(model)
    ours = np.concatenate([call(tf.constant(photo[None]))["logits"] for photo in photos])
    exact, single = wanted["float64"], wanted["float32"]
    return {
        "ours": np.abs(ours - exact).max(),
        "theirs": np.abs(single - exact).max(),
        "ours from their float32": np.abs(ours - single).max(),
        "photos beyond 1e-4, ours": int((np.abs(ours - exact).max(1) > 1e-4).sum()),
        "theirs beyond": int((np.abs(single - exact).max(1) > 1e-4).sum()),
        "deviation": exact.std(),
        "same top-1": int((ours.argmax(1) == exact.argmax(1)).sum()),
    }


# === Training ===


def test_the_same_training(records, tmp_path):
    """30 steps of plain gradient descent, label smoothing 0.1, on the same batches."""
    data_dir, spec = records
    batches = training_batches(data_dir, ClassificationData("train", "val"), spec, batch=BATCH, seed=0)
    batches = list(itertools.islice(batches, STEPS))
    np.savez(
        tmp_path / "batches.npz",
        images=np.stack([batch["image"] for batch in batches]),
        labels=np.stack([np.argmax(batch["label"], -1) for batch in batches]),
    )
    theirs("train", "axial26s", tmp_path)
    ours = train(data_dir, str(tmp_path))
    compare_training(ours, str(tmp_path))


def train(data_dir, out):
    """Ours: a dict as the torch side's files, with our names."""
    conversion, model = convert.convert("csrhddlam", os.path.join(out, "net.pth"), os.path.join(out, "converted"))
    config = ModelConfig(conversion.model, norm=conversion.norm, arguments=conversion.arguments)
    task = ClassificationTask(config, ClassificationData("train", "val"), data_dir, label_smoothing=0.1)
    optimizer = NesterovMomentum(RATE, momentum=0.0)

    @tf.function
    def step(image, label):
        with tf.GradientTape() as tape:
            loss = task.losses(model, {"image": image, "label": label})["total"]
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss, gradients

    batches, found = arrays(os.path.join(out, "batches.npz")), {"losses": []}
    for images, labels in zip(batches["images"], batches["labels"]):
        loss, gradients = step(tf.constant(images), tf.one_hot(labels, 10))
        found["losses"].append(float(loss))
        if len(found["losses"]) == 1:
            names = {id(weight): name for name, weight in weight_names(model).items()}
            pairs = zip(model.trainable_variables, gradients)
            found["gradient"] = {names[id(weight)]: gradient.numpy() for weight, gradient in pairs}
            found["first"] = {name: weight.numpy() for name, weight in weight_names(model).items()}
    found["last"] = {name: weight.numpy() for name, weight in weight_names(model).items()}
    return found


def of_theirs(out, dtype, what):
    """Their arrays of a kind, under our names."""
    found = arrays(os.path.join(out, f"{dtype}.npz"), f"{what}/")
    return csrhddlam_weights({name: a for name, a in found.items() if not convert.is_unused(name)})


def errors(found, wanted):
    """dict from names to the largest difference, divided by the largest value of the tensor."""
    assert set(found) == set(wanted)
    return {n: np.abs(found[n] - wanted[n]).max() / max(np.abs(wanted[n]).max(), 1e-12) for n in wanted}


def compare_training(ours, out):
    """Prints losses and largest relative differences, and asserts what the docstrings promise."""
    losses = np.array(ours["losses"]), arrays(os.path.join(out, "float32.npz"), "losses")[""]
    for step in (1, 2, 5, 10, 15, 20, 25, 30):
        mine, other = losses[0][step - 1], losses[1][step - 1]
        print(f"step {step}: ours {mine:.6f} theirs {other:.6f} {100 * (mine / other - 1):+.5f} %")
    exact = {what: of_theirs(out, "float64", what) for what in ("gradient", "first")}
    single = {what: of_theirs(out, "float32", what) for what in ("gradient", "first", "last")}
    moving = [name for name in exact["first"] if name.endswith(("moving_mean", "moving_variance"))]
    worst = {}
    for label, what, names in (
        ("gradients of step 1", "gradient", list(exact["gradient"])),
        ("moving averages after step 1", "first", moving),
        ("weights after step 1", "first", [n for n in exact["first"] if n not in moving]),
    ):
        wanted = {n: exact[what][n] for n in names}
        own, other = (errors({n: side[what][n] for n in names}, wanted) for side in (ours, single))
        name = max(own, key=own.get)
        worst[label] = max(own.values()), max(other.values())
        print(f"{label}: {len(names)}; ours {own[name]:.2e} ({name}), their float32 {max(other.values()):.2e}")
    for label, names in (("moving averages", moving), ("weights", [n for n in single["last"] if n not in moving])):
        last = errors({n: ours["last"][n] for n in names}, {n: single["last"][n] for n in names})
        worst[label] = max(last.values()), np.median(list(last.values()))
        print(f"{label} after step {STEPS}: from their float32 {worst[label][0]:.2e}, median {worst[label][1]:.2e}")
    assert abs(losses[0][0] / losses[1][0] - 1) < 1e-5
    assert abs(losses[0][-1] / losses[1][-1] - 1) < 0.01
    for label in ("gradients of step 1", "moving averages after step 1", "weights after step 1"):
        assert worst[label][0] < max(1e-5, 4 * worst[label][1]), label
