"""Saves models in every format of tf_keras, and loads all of them in one new process without custom_objects."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import tensorflow as tf
import tf_keras as keras

FORMATS = {
    "weights": "model.weights.h5",
    "keras": "model.keras",
    "checkpoint": "checkpoint",
    "saved_model": "saved_model",
}
# Imports of a user's program, which come before it loads a model.
IMPORTS = "from axial.layers import AxialAttention\nfrom axial.models import build_model\n"


def draw(spec, seed=0):
    """Random arrays for a structure of `tf.TensorSpec`s: floats from -1 to 1, integers from 0 to 4."""
    rng = np.random.default_rng(seed)

    def draw_array(spec):
        if spec.dtype.is_integer:
            return rng.integers(0, 5, spec.shape).astype(spec.dtype.as_numpy_dtype)
        return rng.uniform(-1, 1, spec.shape).astype(spec.dtype.as_numpy_dtype)

    return tf.nest.map_structure(draw_array, spec)


def save(model, folder, examples, formats=tuple(FORMATS)):
    """Saves a model in the given formats. Saves its weights and its outputs for `examples` too, which `fault` reads."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keras.saving.serialize_keras_object(model)))
    np.savez(folder / "weights.npz", *model.get_weights())
    for i, x in enumerate(examples):
        flat = tf.nest.flatten(x)
        (folder / f"example{i}.json").write_text(json.dumps(tf.nest.pack_sequence_as(x, [*range(len(flat))])))
        np.savez(folder / f"inputs{i}.npz", *flat)
        np.savez(folder / f"outputs{i}.npz", *(y.numpy() for y in tf.nest.flatten(model(x))))
    for kind in formats:
        path = folder / FORMATS[kind]
        if kind == "weights":
            model.save_weights(path)
        elif kind == "checkpoint":
            model.save_weights(path / "ckpt")
        else:
            model.save(path, save_format="tf" if kind == "saved_model" else "keras")


def load(folder, kind):
    """Loads a model that `save` wrote in a format. If the format has only weights, builds the model from its config."""
    path = folder / FORMATS[kind]
    if kind in ("keras", "saved_model"):
        return keras.models.load_model(path)
    model = keras.saving.deserialize_keras_object(json.loads((folder / "config.json").read_text()))
    if kind == "weights":
        model.load_weights(path)
    else:
        model.load_weights(path / "ckpt").assert_existing_objects_matched()
    return model


def _arrays(path):
    with np.load(path) as file:
        return [file[name] for name in file.files]


def fault(folder, kind):
    """Loads a saved model and compares it with its saved weights and outputs. Returns the difference, '' if none."""
    try:
        model = load(folder, kind)
    except Exception as error:
        return f"cannot be loaded: {type(error).__name__}: {error}"
    lost = [
        weight.name
        for weight, expected in zip(model.weights, _arrays(folder / "weights.npz"), strict=True)
        if not np.array_equal(weight.numpy(), expected)
    ]
    if lost:
        return f"loses {len(lost)} weights: {lost[:3]}"
    for i, path in enumerate(sorted(folder.glob("example*.json"))):
        arrays = _arrays(folder / f"inputs{i}.npz")
        x = tf.nest.map_structure(lambda index: tf.constant(arrays[index]), json.loads(path.read_text()))
        for ours, theirs in zip(tf.nest.flatten(model(x)), _arrays(folder / f"outputs{i}.npz"), strict=True):
            if not np.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max()):
                return f"computes something else on example {i}: {np.abs(ours - theirs).max()}"
    return ""


def faults(root):
    """List of (folder name, format, result of `fault`) for each saved format in each folder of `root`."""
    saved = [
        (path, kind) for path in sorted(root.iterdir()) for kind, name in FORMATS.items() if (path / name).exists()
    ]
    return [(path.name, kind, fault(path, kind)) for path, kind in saved]


def faults_in_a_fresh_process(root, cases, make):
    """Saves models and loads them in one new process. Returns a dict from (name, format) to the result of `fault`.

    Args:
        root: an existing folder without contents.
        cases: list of (name of a model, format).
        make: function from a model's name to (model, list of inputs).
    """
    for name in dict.fromkeys(name for name, _ in cases):
        model, examples = make(name)
        save(model, root / name, examples, [kind for other, kind in cases if other == name])
    code = f"{IMPORTS}import json, pathlib\nfrom tests import keras_programs\n"
    code += f"print(json.dumps(keras_programs.faults(pathlib.Path({str(root)!r}))))"
    paths = os.pathsep.join([str(pathlib.Path(__file__).parent.parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    outcomes = {(name, kind): fault for name, kind, fault in json.loads(done.stdout.splitlines()[-1])}
    assert outcomes.keys() == {*cases}
    return outcomes
