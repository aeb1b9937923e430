"""Exports equal their models on photos of every kind, and have no batch norm."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from tensorflow.core.protobuf import saved_model_pb2

from axial.data.files import load_photo
from axial.data.streams import decode_photo
from axial.errors import InputError
from axial.layers import device
from axial.layers.batch_norm import BatchNormConfig
from axial.serving.export import HASHES, export, fold, write_saved_model
from axial.serving.predictor import Predictor, check_export
from axial.tasks.segmentation.evaluator import PANOPTIC
from axial.tasks.segmentation.grouping import PostprocessConfig
from tests.conftest import make_task, relative_error
from tests.data.test_decode import more_photos, placed
from tests.io.image_fixture import samples


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


def test_an_export_joins_the_tiles_of_larger_photos_as_the_run_does(scaled):
    """A mosaic of 4x4 sample photos exceeds the canvas. 99 % of the export's pixels equal the model's pixels."""
    task, model, path = scaled
    predictor, one_canvas = Predictor.of_saved_model(path), dataclasses.replace(task, one_canvas=True)
    photo = np.tile(decode_photo(next(iter(task.eval_dataset()))), [4, 4, 1])
    assert max(photo.shape) * 0.2 > 145  # larger than the canvas
    expected, actual = Predictor.of_task(one_canvas, model)(photo), predictor(photo)
    assert {name: x.shape for name, x in actual.items() if x.ndim == 2} == dict.fromkeys(
        ("panoptic", "semantic", "instance"), photo.shape[:2]
    )
    for key in ("panoptic", "semantic"):
        assert np.mean(actual[key] != expected[key]) < 0.01, key
    with pytest.raises(tf.errors.InvalidArgumentError, match="has no pixel or is larger than the canvas"):
        tf.saved_model.load(path).signatures["image"](image=tf.constant(photo))


def test_an_export_names_photos_that_its_scale_does_not_suit(scaled):
    """A batch, a photo that scales to 0 pixels, and a photo larger than the canvas raise errors with clear messages."""
    *_, path = scaled
    predictor, serve = Predictor.of_saved_model(path), tf.saved_model.load(path).signatures["image"]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[1,90,90,3\] .* expected shape \[.,.,3\]"):
        serve(image=tf.zeros([1, 90, 90, 3], tf.uint8))
    photo, words = np.zeros([1, 90, 3], np.uint8), "90x1 pixels become 18x0 .* 1x1"
    with pytest.raises(InputError, match=words):
        predictor(photo)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has no pixel or is larger than the canvas"):
        serve(image=tf.constant(photo))
    example = {
        "image/encoded": tf.io.encode_png(photo),
        "image/file_name": tf.constant("a.png"),
        "size": photo.shape[:2],
    }
    with pytest.raises(InputError, match=f"^a.png: {words}"):
        list(predictor.predictions([example]))
    assert predictor(np.zeros([645, 725, 3], np.uint8))["panoptic"].shape == (645, 725)
