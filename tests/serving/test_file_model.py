"""TFLite and ONNX files: their maps, their errors, and the commands that write and run them."""

import json
import os
import re
import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.data.converters.coco import SAMPLE_DIR
from axial.data.streams import decode_photo
from axial.errors import InputError
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.spatial_attention.deformable_conv import FORMS, DeformableConv
from axial.models.registry import build_model
from axial.serving.export import fold, folded_model
from axial.serving.files import FileModel, write_lite, write_onnx
from axial.serving.parity import map_differences
from axial.weights.source import LITE, ONNX
from tests.conftest import free_graphs, make_task


def photos(task, count=3):
    """The first `count` sample photos, uint8 [h, w, 3]."""
    return [decode_photo(example).numpy() for example in task.eval_dataset().take(count)]


@pytest.fixture(scope="module")
def network(sample_dir):
    """(task, model with the sample photos' moving statistics, folded model)."""
    norm = BatchNormConfig(momentum=0.0)
    model = {"name": "panoptic_deeplab_resnet_nano", "arguments": {"repeats": (1, 0, 0, 0)}, "norm": norm}
    task = make_task(sample_dir, (33, 33), model=model)
    keras.utils.set_random_seed(0)
    model = task.build_model()
    model(tf.stack([e["image"] for e in task.eval_dataset()]), training=True)
    return task, model, folded_model(task, model)


@pytest.fixture(scope="module")
def files(network, tmp_path_factory):
    """dict from 'float32' (TFLite) and 'onnx' to the paths of the network's files."""
    task, _, folded = network
    root = tmp_path_factory.mktemp("forms")
    write_lite(folded, task.canvas, str(root / LITE))
    write_onnx(folded, task.canvas, str(root / ONNX))
    return {"float32": root / LITE, "onnx": root / ONNX}


def test_files_have_the_checkpoints_maps(network, files, tmp_path):
    """All three maps of both files equal the model's maps up to 1e-4. 'int8' needs photos for calibration."""
    task, model, folded = network
    for form, path in files.items():
        differences = map_differences(task, model, FileModel(str(path)), photos(task))
        assert len(differences) == 3 and 0 < max(differences.values()) < 1e-4, (form, differences)
    with pytest.raises(InputError, match="--precision=int8: no photos"):
        write_lite(folded, task.canvas, str(tmp_path / LITE), precision="int8")


# A small model for each kind of head, for axial attention, and for deformable and dynamic convolution.
MODELS = {
    "axial_resnet_nano": dict(span=5),
    "axial_deeplab_nano": dict(span=5),
    "ccnet_nano_0010_deformable": {},
    "attended_deeplab_nano_dynamic": {},
}


@pytest.mark.slow  # 10 s or more each
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_fits_a_file(name, sample_dir, tmp_path, request):
    """In float32, float16 and int8, a TFLite file's maps equal the model's maps within each precision's bound."""
    request.addfinalizer(free_graphs)
    keras.utils.set_random_seed(0)
    images = tf.stack([example["image"] for example in make_task(sample_dir).eval_dataset().take(4)])
    # With a momentum of 0, the batch norm after global pooling would normalise four nearly equal numbers, and scale
    # their noise to the whole range of 8 bits.
    model = build_model(name, 5, BatchNormConfig(momentum=0.9), **MODELS[name])
    tf.function(model, autograph=False)(images, training=True)
    twin = build_model(name, 5, None, **MODELS[name])
    twin(images[:1])
    task = types.SimpleNamespace(build_model=lambda folded: twin)
    folded, expected = fold(task, model), model(images[:1])
    for precision, bound in (("float32", 1e-4), ("float16", 2e-2), ("int8", 0.5)):
        folder = tmp_path / precision
        write_lite(folded, (65, 65), str(folder / LITE), precision=precision, images=list(images))
        actual = FileModel(str(folder / LITE))(images[:1])
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            error = np.abs(actual[key] - value).mean() / np.abs(value).mean()
            assert error < bound, (precision, key, error)
    float32, float16 = ((tmp_path / precision / LITE).stat().st_size for precision in ("float32", "float16"))
    assert float16 < 0.65 * float32


@pytest.mark.parametrize("form", [FORMS[0], *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS[1:])])
def test_8_bits_hold_the_positions_of_deformable_convolution(form, tmp_path):
    """With offsets of more than two pixels on a 65x65 map, the int8 file's error is below 10 %.

    If one scale quantised absolute positions, positions would have steps of a quarter of a pixel.
    """
    keras.utils.set_random_seed(0)
    images = tf.random.stateless_normal([4, 65, 65, 3], [0, 1])
    layer = DeformableConv(4, 3, None, relu=False, form=form)
    layer(images)
    layer.offset_kernel.assign(tf.random.stateless_normal(layer.offset_kernel.shape, [0, 2], stddev=0.3))
    assert tf.reduce_max(tf.abs(layer.offsets(images)[0])) > 2

    x = keras.Input([65, 65, 3])
    model = keras.Model(x, {"map": layer(x)})
    write_lite(model, (65, 65), str(tmp_path / LITE), precision="int8", images=list(images))
    actual, expected = FileModel(str(tmp_path / LITE))(images[:1])["map"], layer(images[:1])
    error = np.abs(actual - expected).mean() / np.abs(expected).mean()
    assert error < 0.1, error


def test_operations_that_tflite_lacks_are_one_line(tmp_path):
    """If a model has two ops that TFLite lacks, the message names both ops, and no file is written."""

    def model(image):
        return {"map": tf.math.betainc(image + 2, image + 2, image / 9) + tf.math.digamma(image)}

    with pytest.raises(InputError, match=r"^TFLite cannot hold the model: tf\.Betainc, tf\.Digamma$"):
        write_lite(model, (5, 5), str(tmp_path / LITE))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("form", ["float32", "onnx"])
def test_damaged_files_are_one_line(files, tmp_path, form):
    path = tmp_path / files[form].name
    path.write_bytes(files[form].read_bytes()[:1000])
    with pytest.raises(InputError, match=f"{path.name}: not a whole file of axial-export"):
        FileModel(str(path))


TINY = (
    "--gin_file=sample/overfit.gin",
    "--gin_file=tiny/panoptic.gin",
    "--gin_binding=MODEL = 'panoptic_deeplab_resnet_nano'",
)


@pytest.fixture(scope="module")
def run(command, sample_dir, tmp_path_factory):
    """The folder of a tiny run of axial-train on the sample data."""
    path = tmp_path_factory.mktemp("files") / "run"
    assert command("train", *TINY, f"--data_dir={sample_dir}", f"--model_dir={path}").code == 0
    return path


@pytest.mark.slow  # minutes
@pytest.mark.parametrize("name", ["tflite", "onnx"])
def test_commands(command, run, name, tmp_path):
    """axial-export writes a file. axial-evaluate and axial-predict take it. Its PQ equals the run's up to 0.1 %."""
    result = command("export", f"--model_dir={run}", f"--output_dir={tmp_path}/export", f"--format={name}")
    assert result.code == 0, result.err
    (line,) = (line for line in result.out.splitlines() if line.startswith("against the checkpoint"))
    percentage = float(re.search(r"panoptic equal on ([\d.]+) %", line)[1])
    assert percentage > 99 and "ms a photo, a SavedModel" in line and "instance equal" not in line
    assert re.search(r"PQ of its segments against the checkpoint's ([\d.]+|-);", line)
    scores = {}
    for name, source in {"run": f"--model_dir={run}", "file": f"--saved_model={tmp_path}/export"}.items():
        result = command("evaluate", source, "--split=val2017", f"--json={tmp_path}/{name}.json")
        assert result.code == 0, result.err
        scores[name] = json.loads((tmp_path / f"{name}.json").read_text())["val2017"]["pq"]["all"]["pq"]
    assert scores["file"] == pytest.approx(scores["run"], abs=1e-3)
    photo = os.path.join(SAMPLE_DIR, "val2017", "000000000285.jpg")
    result = command("predict", f"--saved_model={tmp_path}/export", f"--output_dir={tmp_path}/out", photo)
    assert result.code == 0 and (tmp_path / "out" / "000000000285.overlay.png").exists(), result.err
