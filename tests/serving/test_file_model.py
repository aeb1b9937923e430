"""TFLite and ONNX files: their maps, their errors, and the commands that write and run them."""

import dataclasses
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import types

import numpy as np
import onnx
import pytest
import tensorflow as tf
import tf_keras as keras
from PIL import Image
from scipy.ndimage import find_objects

from axial.data.converters.coco import SAMPLE_DIR
from axial.data.specs import NUCLEI
from axial.data.streams import decode_photo
from axial.errors import InputError
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.spatial_attention.deformable_conv import FORMS, DeformableConv
from axial.models.registry import build_model
from axial.serving.export import Server, fold, folded_model
from axial.serving.files import FileModel, description, maps_network, photo_network, write_lite, write_onnx
from axial.serving.parity import map_differences
from axial.tasks.segmentation.evaluator import segment_table
from axial.tasks.segmentation.grouping import PostprocessConfig
from axial.weights.source import LITE, ONNX
from tests.conftest import ROOT, free_graphs, make_task, randomize
from tests.tasks.test_contract import MAKERS

PORTABLE, PACKAGE_DATA = ROOT / "docs" / "portable", ROOT / "axial" / "data"


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
    write_lite(maps_network(folded, task.canvas), str(root / LITE))
    write_onnx(maps_network(folded, task.canvas), str(root / ONNX))
    return {"float32": root / LITE, "onnx": root / ONNX}


def test_files_have_the_checkpoints_maps(network, files, tmp_path):
    """All three maps of both files equal the model's maps up to 1e-4. 'int8' needs photos for calibration."""
    task, model, folded = network
    for form, path in files.items():
        differences = map_differences(task, model, FileModel(str(path)), photos(task))
        assert len(differences) == 3 and 0 < max(differences.values()) < 1e-4, (form, differences)
    with pytest.raises(InputError, match="--precision=int8: no photos"):
        write_lite(maps_network(folded, task.canvas), str(tmp_path / LITE), precision="int8")


WRITERS = {ONNX: write_onnx, LITE: write_lite}


def sorted_rows(outputs):
    """The outputs; of a detector, sorted by the boxes, because rounding decides the order of nearly equal scores."""
    if "count" not in outputs:
        return outputs
    order = np.lexsort(np.round(outputs["box"], 1).T)
    return {name: np.asarray(x)[order] if np.ndim(x) else x for name, x in outputs.items()}


def check_equal(task, folded, path, sizes):
    """The file returns what `served_in_file` lists. Its labels equal the SavedModel's, and its numbers up to 0.1 %."""
    file, server, rng = FileModel(str(path)), Server(task, folded), np.random.default_rng(0)
    for size in sizes:
        photo = rng.integers(0, 256, [*size, 3], np.uint8)
        expected, actual = (sorted_rows(x) for x in (server.image(tf.constant(photo)), file.predict(photo)))
        assert set(actual) == {row[0] for row in task.served_in_file or task.served}
        for key, value in expected.items():
            if value.dtype == tf.string:
                value = [task.spec.class_names.index(name.decode()) for name in value.numpy()]
            tolerance = 1e-3 * (actual[key].dtype == np.float32)
            np.testing.assert_allclose(actual[key], value, tolerance, tolerance, err_msg=key)
    return actual


@pytest.fixture(scope="module")
def whole(network, tmp_path_factory):
    """(task at the photos' own scale, folded model, dict from `WRITERS` to the paths of files that take photos)."""
    task, _, folded = network
    grouping = PostprocessConfig(center_threshold=0.0, stuff_area=1)
    data = dataclasses.replace(task.data, photo_scale=1.0)
    task = dataclasses.replace(task, data=data, one_canvas=True, grouping=grouping)
    root = tmp_path_factory.mktemp("whole")
    for form, write in WRITERS.items():
        write(photo_network(task, folded), str(root / form), about=description(task, "cc0-1.0"))
    return task, folded, {form: root / form for form in WRITERS}


@pytest.mark.parametrize("form", WRITERS)
def test_a_file_segments_as_a_savedmodel_does(whole, form):
    """Photos of one pixel, of one row and of the whole canvas. The rows of the segments are those of axial-predict."""
    task, folded, paths = whole
    photo = check_equal(task, folded, paths[form], ((1, 1), (1, 30), (20, 33), (33, 33)))
    table = segment_table(photo, task.spec)
    rows = (photo["segment"] // task.spec.label_divisor, photo["segment_class"], photo["segment_score"])
    for actual, expected in zip(rows, (table.classes, table.classes, table.scores)):
        np.testing.assert_array_equal(actual, expected)
    boxes = [(x.start, y.start, x.stop - x.start, y.stop - y.start) for y, x in find_objects(table.ids)]
    assert len(boxes) > 2 and photo["segment_box"].tolist() == [list(box) for box in boxes]
    with pytest.raises(InputError, match=f"{form}: refuses a photo of 33x34 pixels"):
        FileModel(str(paths[form])).predict(np.zeros([34, 33, 3], np.uint8))


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize(
    "name",
    ["classification", *(pytest.param(n, marks=pytest.mark.slow) for n in ("panoptic", "segmentation", "detection"))],
)
def test_every_task_fits_a_file(name, form, sample_dir, colours_dir, tmp_path):
    """Random networks, whose canvas the photos are fitted to."""
    keras.utils.set_random_seed(0)
    task = MAKERS[name](sample_dir=sample_dir, colours_dir=colours_dir)
    model, sizes = task.build_model(), [(50, 31), (90, 140)]
    if name == "detection":  # with all weights random, boxes have no area and equal scores
        model.box_head.classes.set_weights([100 * weight for weight in model.box_head.classes.get_weights()])
    else:
        randomize(model)
        for kernel in (weight for weight in model.weights if len(weight.shape) == 4):  # or scores are of the order 1e5
            kernel.assign(2 * kernel / np.sqrt(np.prod(kernel.shape[:3])))
        sizes += [(1, 1), (1, 40)]
    folded = folded_model(task, model)
    WRITERS[form](photo_network(task, folded), str(tmp_path / form))
    outputs = check_equal(task, folded, tmp_path / form, sizes)
    assert name != "detection" or outputs["count"] > 5


@pytest.mark.parametrize("form,program", [(ONNX, "with_onnxruntime.py"), (LITE, "with_litert.py")])
def test_files_run_without_tensorflow(whole, form, program, tmp_path):
    """The programs of docs/portable print a line for each segment, where TensorFlow cannot be imported."""
    task, _, paths = whole
    (tmp_path / "tensorflow.py").write_text("raise ImportError('no TensorFlow here')")
    photo = np.random.default_rng(0).integers(0, 256, [30, 33, 3], np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    call = [sys.executable, PORTABLE / program, paths[form], tmp_path / "photo.png"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(call, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == segment_lines(FileModel(str(paths[form])).predict(photo), task.spec.class_names)


def segment_lines(prediction, names):
    """The lines that the programs of docs/portable print."""
    rows = zip(*(prediction[f"segment{part}"] for part in ("", "_class", "_score", "_box")))
    return [
        f"{label} {names[index]} {score:.3f} {(prediction['panoptic'] == label).sum()} {' '.join(map(str, box))}"
        for label, index, score, box in rows
    ]


@pytest.mark.slow  # a minute, and a download from npm
def test_the_shipped_model_runs_in_a_browser(command, chromium, tmp_path):
    """On a photo of nuclei, the page of docs/portable lists the same segments as onnxruntime in Python."""
    npm = shutil.which("npm") or pytest.skip("needs npm")
    call = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", f"--prefix={tmp_path}", "onnxruntime-web"]
    if subprocess.run(call, check=False, capture_output=True).returncode:
        pytest.skip("npm cannot install onnxruntime-web")
    result = command("export", "--model_dir=nuclei", "--format=onnx", f"--output_dir={tmp_path}/export")
    assert result.code == 0, result.err
    folder = tmp_path / "node_modules" / "onnxruntime-web" / "dist"
    shutil.copy(PORTABLE / "index.html", folder)
    shutil.copy(tmp_path / "export" / ONNX, folder)
    photo = min((PACKAGE_DATA / "nuclei_sample" / "test" / "photos").iterdir())
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        chromium.get(f"http://127.0.0.1:{server.server_port}/index.html")
        chromium.find_element("id", "file").send_keys(str(photo))
        listed = chromium.find_element("id", "list")
        for _ in range(600):
            if listed.text:
                break
            time.sleep(0.5)
        server.shutdown()
    prediction = FileModel(str(folder / ONNX)).predict(np.asarray(Image.open(photo).convert("RGB")))
    expected = [line.split(" ") for line in segment_lines(prediction, NUCLEI.class_names)]
    assert len(expected) > 5 and [line.split(" ") for line in listed.text.splitlines()] == expected


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
        write_lite(maps_network(folded, (65, 65)), str(folder / LITE), precision=precision, images=list(images))
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
    write_lite(maps_network(model, (65, 65)), str(tmp_path / LITE), precision="int8", images=list(images))
    actual, expected = FileModel(str(tmp_path / LITE))(images[:1])["map"], layer(images[:1])
    error = np.abs(actual - expected).mean() / np.abs(expected).mean()
    assert error < 0.1, error


def test_operations_that_tflite_lacks_are_one_line(tmp_path):
    """If a model has two ops that TFLite lacks, the message names both ops, and no file is written."""

    def model(image):
        return {"map": tf.math.betainc(image + 2, image + 2, image / 9) + tf.math.digamma(image)}

    with pytest.raises(InputError, match=r"^TFLite cannot hold the model: tf\.Betainc, tf\.Digamma$"):
        write_lite(maps_network(model, (5, 5)), str(tmp_path / LITE))
    with pytest.raises(InputError, match=r"^ONNX cannot hold the model: Betainc, Digamma$"):
        write_onnx(maps_network(model, (5, 5)), str(tmp_path / ONNX))
    assert not os.listdir(tmp_path)


class Onnx:
    """Changes of an ONNX file that make it another kind of file."""

    @staticmethod
    def operator(model):
        model.graph.node[0].domain = "com.example"
        model.graph.node[0].op_type = "Attack"

    @staticmethod
    def outside(model):
        tensor = model.graph.initializer[0]
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="../../secret")

    @staticmethod
    def function(model):
        model.functions.add(name="Relu", domain="")


@pytest.mark.parametrize(
    "change,words", [("operator", "Attack"), ("outside", "data in other files"), ("function", "own")]
)
def test_files_with_more_than_the_standard_are_one_line(files, tmp_path, change, words):
    """Operators of other domains, data in other files and own functions are refused before the runtime sees them."""
    model = onnx.load(str(files["onnx"]))
    getattr(Onnx, change)(model)
    (tmp_path / ONNX).write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=f"{ONNX}: has what axial-export does not write: .*{words}"):
        FileModel(str(tmp_path / ONNX))


def test_an_old_onnxruntime_is_one_line(files, monkeypatch):
    monkeypatch.setattr("onnxruntime.__version__", "1.9.0")
    with pytest.raises(InputError, match=r"^\S+: onnxruntime 1.9.0 is too old, needs 1.14: pip install"):
        FileModel(str(files["onnx"]))


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
@pytest.mark.parametrize("flags", [["--format=tflite"], ["--format=onnx"], ["--format=onnx", "--maps"]])
def test_commands(command, run, flags, tmp_path):
    """axial-export writes a file. axial-evaluate and axial-predict take it. Its PQ equals the run's up to 0.1 %."""
    result = command("export", f"--model_dir={run}", f"--output_dir={tmp_path}/export", *flags)
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
