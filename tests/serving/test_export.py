"""Exports equal their models on photos of every kind, and have no batch norm."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import http.server
import io
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import threading
import urllib.request

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from google.protobuf import empty_pb2
from google.protobuf.unknown_fields import UnknownFieldSet
from PIL import Image
from tensorflow.core.framework import tensor_pb2
from tensorflow.core.protobuf import saved_model_pb2

from axial.data.converters.nuclei import SAMPLE_DIR as NUCLEI_DIR
from axial.data.files import load_photo
from axial.data.labels import read_panoptic
from axial.data.streams import decode_photo
from axial.errors import InputError
from axial.layers import device
from axial.layers.batch_norm import BatchNormConfig
from axial.serving.export import HASHES, WARMUP, export, fold, write_saved_model
from axial.serving.predictor import Predictor, check_export
from axial.tasks.segmentation.evaluator import PANOPTIC
from axial.tasks.segmentation.grouping import PostprocessConfig
from axial.tasks.segmentation.tiles import Tiling
from tests.conftest import ROOT, make_task, relative_error
from tests.data.test_decode import more_photos, placed
from tests.io.image_fixture import encoded, samples


@pytest.fixture(scope="module")
def trained(sample_dir):
    """(task, model) with random biases and scales, and a batch's moving statistics, as after a training."""
    task = make_task(
        sample_dir,
        model={"norm": BatchNormConfig(momentum=0.0), "arguments": {"repeats": (1, 0, 0, 0)}},
        grouping=PostprocessConfig(center_threshold=0.02, stuff_area=4, top_k=4, pieces="split"),
    )
    keras.utils.set_random_seed(0)  # with other seeds the network may find no instance, or have ties
    model = task.build_model()
    tf.random.set_seed(None)  # a global seed would also change the order of the data
    rng = np.random.default_rng(0)
    for weight in model.weights:
        if weight.name.endswith(("gamma:0", "beta:0", "bias:0")):
            weight.assign(weight + rng.normal(0, 0.2, weight.shape))
    batch = next(iter(task.train_dataset(8, seed=0)))
    tf.function(model, autograph=False)(batch["image"], training=True)  # sets the moving statistics
    return task, model


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """The path of an export of the model, with a note in its assets.extra."""
    path = str(tmp_path_factory.mktemp("export") / "model")
    export(*trained, path, extra=lambda folder: pathlib.Path(folder, "note.txt").write_text("x"))
    return path


@pytest.fixture(scope="module")
def predictor(exported):
    return Predictor.of_saved_model(exported)


def test_folding_keeps_the_function(trained):
    """On three photos, the folded model's maps equal the model's maps up to 1e-4."""
    task, model = trained
    folded = fold(task, model)
    images = tf.stack([e["image"] for e in task.eval_dataset().take(3)])
    ours, theirs = folded(images), model(images)
    for key in theirs:
        assert relative_error(ours[key], theirs[key]) < 1e-4, key


def test_no_batch_norm_is_left(exported):
    """No op of the export's graphs and no weight belongs to a batch norm."""
    loaded = tf.saved_model.load(exported)
    for signature in loaded.signatures.values():
        graph = signature.graph.as_graph_def()
        nodes = list(graph.node) + [n for f in graph.library.function for n in f.node_def]
        assert nodes and not [n.name for n in nodes if "BatchNorm" in n.op or "Rsqrt" in n.op]
    assert not [v.name for v in loaded.weights if "norm" in v.name or "moving" in v.name]


def test_equal_to_the_evaluator(trained, predictor):
    """The export's maps of the sample photos equal the model's maps, except for 0.1 % of the pixels, at ties."""
    task, model = trained
    examples = list(task.eval_dataset())
    expected = [p for _, p in task.predictions(model)(examples)]
    actual = [p for _, p in predictor.predictions(examples)]
    things = 0
    for prediction, reference in zip(actual, expected, strict=True):
        for key in ("panoptic", "semantic", "instance"):
            assert prediction[key].shape == reference[key].shape
            assert np.mean(prediction[key].numpy() != reference[key].numpy()) < 1e-3, key
        assert int(prediction["dropped"]) == int(reference["dropped"]) >= 0
        things += int(np.max(reference["instance"]) > 0 and reference["dropped"] > 0)
        np.testing.assert_allclose(np.sort(prediction["score"]), np.sort(reference["score"]), atol=1e-3)
    assert things  # some photo has instances and dropped ones


@pytest.mark.parametrize("last,dropped", [(0.2, 1), (0.0, 0)])
def test_dropped_instances_of_an_older_export_are_1_if_its_scores_are_full(last, dropped):
    """An older export does not return 'dropped'. The value is then 1 if the last score is above 0, else 0."""
    signatures = {"image": lambda image: {"score": tf.constant([0.5, last])}}
    examples = [PANOPTIC.example(np.zeros([2, 2, 3], np.uint8))]
    ((_, prediction),) = PANOPTIC.predictions(signatures, None, {})(examples)
    assert int(prediction["dropped"]) == dropped


def test_any_photo_size(predictor):
    """Photos of 1x1, 3x500 and 333x77 pixels have int32 maps of the same size."""
    for size in ((1, 1), (3, 500), (333, 77)):
        result = predictor(np.zeros([*size, 3], np.uint8))
        for key in ("panoptic", "semantic", "instance"):
            assert result[key].shape == size and result[key].dtype == np.int32


@pytest.mark.slow
def test_a_compiled_export_equals_the_plain_export(trained, predictor, sample_dir, tmp_path):
    """XLA compiles only the network. The maps equal the plain export's maps on 99.9 % of the pixels."""
    if not device.has_xla():
        pytest.skip("this TensorFlow has XLA for TPUs only")
    path = tmp_path / "model"
    export(*trained, str(path), write=functools.partial(write_saved_model, compiled=True))
    model = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    functions = model.meta_graphs[0].graph_def.library.function
    compiled = [function for function in functions if function.attr["_XlaMustCompile"].b]
    assert compiled and len(compiled) < len(functions)
    (example,) = trained[0].eval_dataset().take(1)
    photo = decode_photo(example).numpy()
    actual, expected = Predictor.of_saved_model(str(path))(photo), predictor(photo)
    for name in ("semantic", "instance"):
        assert np.mean(actual[name] == expected[name]) > 0.999, name


def test_what_an_export_says_of_itself(exported, predictor, trained):
    """The signature 'classes' and assets.extra have the spec, and no temporary folder is left."""
    spec, extra = trained[0].spec, pathlib.Path(exported, "assets.extra")
    inside = tf.saved_model.load(exported).signatures["classes"]()
    assert [n.decode() for n in inside["class_names"].numpy()] == list(spec.class_names)
    np.testing.assert_array_equal(inside["colors"], spec.colors)
    np.testing.assert_array_equal(inside["things"], spec.things)
    assert "photo_scale" not in inside and predictor.spec == spec and predictor.canvas == (65, 65)
    assert (extra / "note.txt").read_text() == "x"
    assert json.loads((extra / "spec.json").read_text())["name"] == "coco"
    assert not [name for name in os.listdir(os.path.dirname(exported)) if name.startswith(".partial.")]


def test_an_export_never_overwrites(trained, tmp_path):
    """An existing folder is refused and stays as it is. A folder that is not an export is not loaded."""
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="exists"):
        export(*trained, str(tmp_path / "there"))
    assert list((tmp_path / "there").iterdir()) == []
    (tmp_path / "there" / "saved_model.pb").touch()
    for name, words in (
        ("there", "axial-export did not write this folder"),
        ("nowhere", "no model or file has this name"),
    ):
        with pytest.raises(InputError, match=f"{name}: {words}"):
            Predictor.of_saved_model(str(tmp_path / name))


def test_an_export_that_fails_its_check_is_not_left(trained, tmp_path):
    """The check of an export gets a complete export. If the check raises, the folder is removed."""

    def write(task, folded, folder):
        pathlib.Path(folder, "saved_model.pb").touch()

    def check(folder):
        assert {"assets.extra", "saved_model.pb"} <= {*os.listdir(folder)} and check_export(folder) == trained[0].spec
        raise InputError("NaN")

    with pytest.raises(InputError, match="NaN"):
        export(*trained, str(tmp_path / "export"), write=write, check=check)
    assert not os.listdir(tmp_path)


def test_a_line_says_that_an_export_without_hashes_is_unverified(exported, tmp_path, capsys):
    shutil.copytree(exported, tmp_path / "export")
    (tmp_path / "export" / HASHES).unlink()
    check_export(str(tmp_path / "export"))
    assert capsys.readouterr().err.endswith(f"{HASHES}: whether the export was changed is not known; export again\n")


def test_the_served_signature_sees_what_axial_predict_sees(exported, predictor, tmp_path):
    """'serving_default' and the predictor give equal outputs for every image format and EXIF orientation."""
    serve = tf.saved_model.load(exported).signatures["serving_default"]
    photos = {**{name: data for name, data in samples().items() if name[0] != "TIFF"}, **placed(6), **more_photos()}
    refused = set()
    assert predictor.spec.levels == "percentiles"
    for name, data in photos.items():
        (tmp_path / "photo").write_bytes(data)
        expected = predictor(load_photo(str(tmp_path / "photo"), predictor.spec.levels))
        try:
            actual = serve(encoded=tf.constant(data))
        except tf.errors.InvalidArgumentError:
            refused.add(name)
            continue
        for key, value in expected.items():
            np.testing.assert_array_equal(actual[key], value, str(name))
    assert refused == {("BMP", "1", "")}


@pytest.fixture(scope="module")
def scaled(sample_dir, tmp_path_factory):
    """(task, model, path of the export) for photos scaled by 0.2, to sides of 67 to 128 pixels."""
    task = make_task(
        sample_dir,
        (129, 145),
        model={"name": "panoptic_deeplab_resnet_nano", "arguments": {"repeats": (1, 0, 0, 0)}},
        data={"photo_scale": 0.2},
        grouping=PostprocessConfig(center_threshold=0.0, stuff_area=4, pieces="largest"),
    )
    keras.utils.set_random_seed(0)
    model = task.build_model()
    for head in (model.semantic_head, model.center_head):  # larger logits, so that predictions differ
        head.logits.conv.kernel.assign(30 * head.logits.conv.kernel)
    path = str(tmp_path_factory.mktemp("scaled") / "model")
    export(task, model, path)
    return task, model, path


def test_an_export_scales_photos_as_the_run_does(scaled):
    """The export's maps of the sample photos equal the model's maps on the largest canvas, except at ties."""
    task, model, path = scaled
    inside = tf.saved_model.load(path).signatures["classes"]()
    assert float(inside["photo_scale"]) == np.float32(0.2) and tuple(inside["canvas"].numpy()) == (129, 145)
    predictor = Predictor.of_saved_model(path)
    one_canvas = dataclasses.replace(task, one_canvas=True)  # the largest canvas, which the export uses
    examples = list(one_canvas.eval_dataset())
    assert {tuple(example["image"].shape) for example in examples} == {(129, 145, 3)}
    expected = [p for _, p in one_canvas.predictions(model)(examples)]
    for actual, reference in zip(predictor.predictions(examples), expected, strict=True):
        for key in ("panoptic", "semantic"):
            assert np.mean(actual[1][key].numpy() != reference[key].numpy()) < 1e-3, key


def test_tiles_in_the_graph_equal_those_of_the_predictor(scaled):
    """The signatures return for photos of 1 to 4 tiles what the predictor returns, alone and in a batch.

    99 % of the pixels of a photo of 4 tiles equal those of the run's predictor.
    """
    task, model, path = scaled
    predictor, signatures = Predictor.of_saved_model(path), tf.saved_model.load(path).signatures
    photo = np.tile(decode_photo(next(iter(task.eval_dataset()))), [4, 4, 1])
    photos = [photo[:height, :width] for height, width in ((50, 726), (647, 727), (648, 728), (900, 1300), (1500, 90))]
    expected = [predictor(photo) for photo in photos]
    assert [len(Tiling(x.shape[:2], (645, 725), 161, 80).boxes) for x in photos[2:]] == [4, 4, 2]
    assert sum(len(np.unique(prediction["panoptic"])) > 3 for prediction in expected) > 3
    by_run = Predictor.of_task(dataclasses.replace(task, one_canvas=True), model)(photos[3])
    for key in ("panoptic", "semantic"):
        assert np.mean(by_run[key] != expected[3][key]) < 0.01, key
    broken = {2: b"II*\0", 4: b""}
    files = [tf.io.encode_png(photo).numpy() for photo in photos]
    served = [files[i] if i not in broken else broken[i] for i in range(5)] + [files[2], files[4]]
    batch = signatures["batch"](encoded=tf.constant(served))
    assert [i for i, error in enumerate(batch["error"].numpy()) if error] == [*broken]
    for number, index in zip((0, 1, 3, 5, 6), (0, 1, 3, 2, 4)):
        alone, (height, width) = signatures["image"](image=tf.constant(photos[index])), photos[index].shape[:2]
        assert batch["size"][number].numpy().tolist() == [height, width]
        for key, value in expected[index].items():
            np.testing.assert_array_equal(alone[key], value, key)
            inside = tuple(map(slice, value.shape))
            np.testing.assert_array_equal(batch[key][number][inside], value, key)


def test_an_export_names_photos_that_its_scale_does_not_suit(scaled):
    """A batch, a photo that scales to 0 pixels and a photo without pixels raise errors with clear messages."""
    *_, path = scaled
    predictor, serve = Predictor.of_saved_model(path), tf.saved_model.load(path).signatures["image"]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[1,90,90,3\] .* expected shape \[.,.,3\]"):
        serve(image=tf.zeros([1, 90, 90, 3], tf.uint8))
    photo, words = np.zeros([1, 90, 3], np.uint8), "90x1 pixels become 18x0 .* 1x1"
    with pytest.raises(InputError, match=words):
        predictor(photo)
    with pytest.raises(tf.errors.InvalidArgumentError, match="image: 1x90 pixels .* become 0x18 .* at least 1x1"):
        serve(image=tf.constant(photo))
    with pytest.raises(tf.errors.InvalidArgumentError, match="image: 0x90 pixels .*; expected 1 to 268435456"):
        serve(image=tf.constant(photo[:0]))
    example = {
        "image/encoded": tf.io.encode_png(photo),
        "image/file_name": tf.constant("a.png"),
        "size": photo.shape[:2],
    }
    with pytest.raises(InputError, match=f"^a.png: {words}"):
        list(predictor.predictions([example]))
    assert predictor(np.zeros([645, 725, 3], np.uint8))["panoptic"].shape == (645, 725)


# === A server on this machine ===


@contextlib.contextmanager
def serving(serve):
    """Serves a signature on this machine. Yields a function from a photo's bytes to its outputs, or to an 'error'."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            data, body = self.rfile.read(int(self.headers["Content-Length"])), io.BytesIO()
            try:
                np.savez(body, **{name: x.numpy() for name, x in serve(encoded=tf.constant(data)).items()})
            except tf.errors.InvalidArgumentError as error:
                np.savez(body, error=str(error))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.getvalue())

        def log_message(self, *_):
            pass

    def ask(data):
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", data, timeout=600) as answer:
            return dict(np.load(io.BytesIO(answer.read())))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield ask
        server.shutdown()


def check_load(path, photo, large, count, most):
    """8 threads send photos and broken files to a server of an export. All answers equal the predictor's.

    Args:
        path: the export.
        photo, large: uint8 [h, w, 3]. `large` needs tiles.
        count: number of requests.
        most: largest growth of this process, in KiB.
    """
    crops = ("PNG", photo[:150, :99]), ("JPEG", photo), ("WEBP", photo), ("JPEG", large), ("PNG", large[:60])
    files = [encoded(Image.fromarray(crop), format) for format, crop in crops]
    predictor = Predictor.of_saved_model(path)
    expected = [predictor(np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))) for data in files]
    assert max(len(np.unique(prediction["panoptic"])) for prediction in expected) > 2
    expected += ["encoded: a TIFF, which only axial-predict reads", "encoded: not a JPEG, PNG, WebP, GIF or BMP", "PNG"]
    files += [encoded(Image.fromarray(photo), "TIFF"), b"no photo", files[0][:500]]

    def check(number):
        answer = ask(files[number])
        if isinstance(expected[number], str):
            assert expected[number] in str(answer["error"])
            return
        for key, value in expected[number].items():
            np.testing.assert_array_equal(answer[key], value, f"{number} {key}")

    def resident(name):
        return int(re.search(rf"{name}:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])

    serve = tf.saved_model.load(path).signatures["serving_default"]
    with serving(serve) as ask, concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(map(check, range(len(files))))
        before = resident("VmRSS")
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
        list(pool.map(check, random.Random(0).choices(range(len(files)), k=count)))
    assert resident("VmHWM") - before < most


@pytest.mark.parametrize("count", [32, pytest.param(200, marks=pytest.mark.slow)])
def test_a_server_under_load(scaled, count):
    task, _, path = scaled
    photo = decode_photo(next(iter(task.eval_dataset()))).numpy()
    check_load(path, photo, np.tile(photo, [2, 2, 1]), count, 2**19)


@pytest.mark.slow
def test_the_shipped_model_serves_large_photos(command, tmp_path):
    """Its export predicts 2000x3000 pixels in 1.5 GB, besides TensorFlow's libraries, and serves 8 threads."""
    path, photo = tmp_path / "export", tmp_path / "large.png"
    assert command("export", "--model_dir=nuclei", f"--output_dir={path}").code == 0
    photos = [np.asarray(Image.open(name)) for name in sorted((ROOT / NUCLEI_DIR / "test" / "photos").iterdir())]
    row = np.concatenate([np.stack([x] * 3, -1) for x in photos if x.shape == (256, 256)][:12], 1)[:, :3000]
    large = np.concatenate([np.roll(row, 300 * i, 1) for i in range(8)])[:2000]
    Image.fromarray(large).save(photo)
    script = (
        "import sys, numpy, tensorflow as tf; model = tf.saved_model.load(sys.argv[1]);"
        "outputs = model.signatures['serving_default'](encoded=tf.io.read_file(sys.argv[2]));"
        "numpy.savez(sys.argv[3], **outputs); print(open('/proc/self/status').read())"
    )
    call = [sys.executable, "-c", script, path, photo, tmp_path / "served.npz"]
    status = subprocess.run(call, check=True, capture_output=True, text=True).stdout
    peak, libraries = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmHWM", "RssFile"))
    assert peak - libraries < 1.5 * 2**20  # KiB
    described = PANOPTIC.describe(large, dict(np.load(tmp_path / "served.npz")), check_export(str(path)))
    result = command("predict", f"--model={path}", f"--output_dir={tmp_path}", photo)
    assert result.code == 0 and len(described.segments) > 500 and large.shape == (2000, 3000, 3), result.err
    np.testing.assert_array_equal(read_panoptic(str(tmp_path / "large.panoptic.png")), described.panoptic)
    check_load(str(path), row[:, :256], row[:, :700], 200, 2**22)


def test_warm_up_requests_of_tf_serving(scaled):
    """The file has a request for each signature that takes photos, and its inputs are those of the signature.

    The fields are read by their numbers in prediction_log.proto and predict.proto of TensorFlow Serving.
    """

    def fields(message):
        """dict from field numbers to the list of their contents, in an encoded protocol buffer."""
        contents = collections.defaultdict(list)
        for field in UnknownFieldSet(empty_pb2.Empty.FromString(message)):
            contents[field.field_number].append(field.data)
        return contents

    *_, path = scaled
    signatures, names = tf.saved_model.load(path).signatures, []
    for record in tf.data.TFRecordDataset(os.path.join(path, WARMUP)):
        ((predict_log,),) = fields(record.numpy()).values()
        ((request,),) = fields(predict_log).values()
        (model_spec,), entries = fields(request)[1], map(fields, fields(request)[2])
        names.append(fields(model_spec)[3][0].decode())
        inputs = {e[1][0].decode(): tf.make_ndarray(tensor_pb2.TensorProto.FromString(e[2][0])) for e in entries}
        assert signatures[names[-1]](**{name: tf.constant(x) for name, x in inputs.items()})
    assert {*names} == {*signatures} - {"classes"}
