"""`axial.load` and `axial.predict` with the shipped model, runs, exports, weights files, and invalid input."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import axial
from axial import api
from axial.cli import flags
from axial.data.converters.coco import SAMPLE_DIR
from axial.data.converters.nuclei import SAMPLE_DIR as NUCLEI_DIR
from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.weights.interchange import make_card, read_safetensors, write_safetensors
from axial.weights.names import weight_names
from axial.weights.restore import find_weights
from axial.weights.source import Source, resolve, shipped_folder, shipped_names
from tests.conftest import ROOT

PHOTOS = sorted((ROOT / NUCLEI_DIR / "test" / "photos").iterdir())
NUCLEI = slice(80, 144), slice(160, 208)  # 64x48 pixels of the first photo, with two nuclei
PHOTO = f"{SAMPLE_DIR}/val2017/000000000285.jpg"


@pytest.fixture(scope="module")
def nuclei():
    return axial.load("nuclei")


def test_import_is_lazy_and_silent():
    """`import axial` prints nothing and imports no TensorFlow, NumPy or gin. The error names a wrong attribute."""
    text = (
        "import sys, axial, axial.models\n"
        "assert not {'tensorflow', 'tf_keras', 'numpy', 'gin'} & set(sys.modules)\n"
        "try:\n"
        "    axial.laod\n"
        "except AttributeError as error:\n"
        "    assert 'laod' in str(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", text], check=False, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


FRESH = """
import sys
import axial

model = axial.load("nuclei")
axial.predict(model, sys.argv[1])
import axial.cli.predict
unneeded = "official", "tensorflow_datasets", "tensorflow_text", "tensorflow_hub", "tensorflow_model_optimization"
print(*[name for name in unneeded if name in sys.modules])

import numpy as np
from axial.data.labels import read_ids
from axial.data.specs import NUCLEI
from axial.metrics.panoptic_quality import PanopticQuality, Segments

quality = PanopticQuality(NUCLEI)
for photo in sys.argv[1:]:
    result = axial.predict(model, photo)
    truth = read_ids(photo.replace("/photos/", "/instance/"))
    truth = np.searchsorted(np.unique(np.append(truth, 0)), truth) + 1  # 1 is the background
    classes = np.array([0] + [1] * (truth.max() - 1))
    numbers = np.zeros(result.panoptic.max() + 1, np.int32)  # of segments, by their ids
    numbers[[segment["id"] for segment in result.segments]] = 1 + np.arange(len(result.segments))
    names = [NUCLEI.class_names.index(segment["class"]) for segment in result.segments]
    quality.update(Segments(truth, classes), Segments(numbers[result.panoptic], np.array(names)))
print(quality.result()["all"]["pq"])
"""


def test_the_shipped_weights_find_nuclei_that_no_training_has_seen():
    """In a new process, the PQ on test photos is above 0.75. axial prints nothing and imports no slow package."""
    photos = [str(path) for path in PHOTOS[::16]]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    call = [sys.executable, "-c", FRESH, *photos]
    result = subprocess.run(call, check=False, capture_output=True, text=True, timeout=600, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    unneeded, score = result.stdout.splitlines()
    assert len(photos) >= 2 and float(score) > 0.75
    assert unneeded == ""


@pytest.mark.slow
def test_an_older_run_keeps_its_levels(nuclei, tmp_path):
    """On a 16-bit photo with a hot pixel, a run without 'levels' divides by 256. The shipped model uses percentiles."""
    shutil.copytree(shipped_folder("nuclei"), tmp_path / "run")
    spec = json.loads((tmp_path / "run" / "spec.json").read_text())
    assert spec.pop("levels") == nuclei.spec.levels == "percentiles"
    (tmp_path / "run" / "spec.json").write_text(json.dumps(spec))
    values = np.asarray(Image.open(PHOTOS[0]).convert("L")).astype(np.uint16)
    values[0, 0] = 65535
    Image.fromarray(values).save(tmp_path / "deep.png")
    old, new = (axial.predict(model, tmp_path / "deep.png") for model in (axial.load(tmp_path / "run"), nuclei))
    np.testing.assert_array_equal(old.image, values[..., None] // 256 + np.zeros([1, 1, 3]))
    assert len(old.segments) < len(new.segments) and new.image.max() == 255


def test_every_shipped_folder_is_complete_and_small():
    """Each shipped model has its five files and over a million parameters. All shipped files have below 6 MB."""
    size = 0
    for name in shipped_names():
        folder = ROOT / "axial" / "shipped" / name
        files = sorted(path.name for path in folder.iterdir())
        assert files == ["README.md", "config.gin", "objects.json", "spec.json", "weights.safetensors"]
        card, arrays = read_safetensors(str(folder / "weights.safetensors"))
        assert sum(array.size for array in arrays.values()) > 1e6
        text = (folder / "README.md").read_text()
        assert text.startswith("---\nlicense:") and card.weights in text
        size += sum(p.stat().st_size for p in folder.iterdir())
    assert 0 < size < 6e6


def test_photos_come_as_paths_arrays_lists_and_folders(nuclei, tmp_path):
    """A photo of 64x48 pixels gets the same panoptic map as an array, a path, a list or a folder."""
    array = np.asarray(Image.open(PHOTOS[0]).convert("RGB"))[NUCLEI]
    Image.fromarray(array).save(tmp_path / "a.png")
    one = axial.predict(nuclei, array)
    assert one.panoptic.shape == (64, 48)
    for photos in (tmp_path, [array], (str(tmp_path / "a.png"),), [tmp_path]):
        (other,) = axial.predict(nuclei, photos)
        np.testing.assert_array_equal(other.panoptic, one.panoptic)
    mixed = axial.predict(nuclei, [array, tmp_path, tmp_path / "a.png"])
    assert [result.photo for result in mixed] == [None, *2 * [str(tmp_path / "a.png")]]
    assert mixed[0].table() == [{**row, "photo": None} for row in mixed[1].table()] and mixed[0].masks().any()
    assert axial.predict(nuclei, tmp_path / "a.png").json()["photo"] == str(tmp_path / "a.png")


def test_arguments_and_feature_maps(nuclei):
    features = axial.load("nuclei", features_only=True)
    assert features.strides["res5"] == 16
    refused(lambda: axial.load("nuclei", widths=3), "widths")
    photo = tf.random.stateless_uniform([1, 33, 33, 3], [1, 2], -1, 1)
    np.testing.assert_array_equal(features(photo)["res5"], nuclei.backbone(photo)["res5"])


def test_a_network_takes_other_canvases(nuclei):
    """Tiles of 32 pixels have the nuclei of the whole photo, but near their edges. Wrong sizes are refused."""
    photo = np.asarray(Image.open(PHOTOS[0]).convert("RGB"))[NUCLEI]
    whole, tiled = (axial.predict(nuclei, photo, size=size).labels > 0 for size in (None, np.int64(49)))
    assert np.sum(whole & tiled) / np.sum(whole | tiled) > 0.9
    assert nuclei.predictor.resized((49, 49)) is nuclei.predictor.resized(49)
    for size, words in {
        640: "size=640: the network takes no side of 640 pixels; expected 625 or 641",
        (65, 8): "size=(65, 8): the network takes no side of 8 pixels; expected 17",
        "65": "size = '65': expected a list",
        (65,): "size = (65,): expected a list of length 2",
        -1: "expected int >= 1",
    }.items():
        refused(lambda: axial.predict(nuclei, photo, size=size), words)


def refused(call, *words):
    """Asserts that `call` raises an InputError whose message has one line and contains all `words`."""
    with pytest.raises(InputError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


@pytest.mark.parametrize(
    "what,words",
    [
        ("nuclie", ["did you mean 'nuclei'", "axial ships nuclei"]),
        ("axial_resnet_nano", ["no weights", "build_model('axial_resnet_nano'", "random weights"]),
        ("axial_resnet_26_s", ["`axial-analyze zoo` lists public ones"]),
        (PHOTO, ["this file is none of a run"]),
        (SAMPLE_DIR, ["this folder is none of a run"]),
        ("hf://nuclei", ["expected hf://OWNER/REPO"]),
    ],
)
def test_what_is_no_model_is_refused(what, words):
    refused(lambda: axial.load(what), *words)


def test_other_models_and_classes_are_refused(nuclei, tmp_path):
    """Weights of another model or of other classes raise InputError, and a hostile recipe does too."""
    refused(lambda: axial.load("nuclei", model="axial_resnet_s"), "holds 'axial_deeplab_nano', not 'axial_resnet_s'")
    other = DatasetSpec("mine", ("road", "car"), (1, 2), (False, True))
    task = nuclei.predictor.task
    write_safetensors(nuclei, str(tmp_path / "w.safetensors"), make_card(task.model, 2, (65, 65), spec=other))
    for name in ("config.gin", "spec.json"):
        (tmp_path / name).write_text((ROOT / "axial" / "shipped" / "nuclei" / name).read_text())
    words = "w.safetensors: has weights for other classes: its class_names[0] is 'road', not 'background'"
    refused(lambda: axial.load(tmp_path / "w.safetensors"), words)
    (tmp_path / "config.gin").write_text("import os\n")
    refused(lambda: axial.load(tmp_path), "config.gin:1: imports are refused")
    (tmp_path / "config.gin").unlink()
    model = axial.load(tmp_path / "w.safetensors")  # without a recipe the model has outputs, but no predictor
    assert model.spec == other and model.predictor is None
    refused(lambda: axial.predict(model, PHOTO), "no recipe (config.gin)")


@pytest.mark.parametrize(
    "photos,words",
    [
        (np.zeros([4, 4, 3], np.float32), "photo 1: float32 [4, 4, 3]; expected"),
        ([np.zeros([4, 4, 3], np.uint8), np.zeros([4, 4], np.uint8)], "photo 2: uint8 [4, 4]; expected"),
        (np.zeros([0, 4, 3], np.uint8), "photo 1: uint8 [0, 4, 3] has no pixel"),
        ([], "the list is empty"),
        ("/nowhere.png", "/nowhere.png: no such photo"),
        (str(ROOT / "scripts"), "scripts: no photo in this folder"),
        (str(ROOT / "setup.py"), "setup.py: "),
    ],
)
def test_what_is_no_photo_is_refused(nuclei, photos, words):
    refused(lambda: axial.predict(nuclei, photos), words)


def test_runs_and_exports(trained, exported):
    """A run and its export have the same task and spec. A checkpoint has the run's weights. Exports predict batches."""
    run, export = axial.load(trained), axial.load(exported)
    assert (export.task, export.spec, export.photo_scale) == (run.task, run.spec, None)
    assert isinstance(export, api.Exported) and isinstance(export, tf.Module)
    result = axial.predict(export, PHOTO)
    batch = export(np.asarray(Image.open(PHOTO).convert("RGB"))[None])
    assert batch["panoptic"].shape == (1, *result.panoptic.shape)
    np.testing.assert_array_equal(batch["semantic"][0], result.prediction["semantic"])
    (prefix,) = [path.with_suffix("") for path in trained.glob("ckpt-*.index")]
    again = axial.load(prefix)
    for name, weight in weight_names(run).items():
        np.testing.assert_array_equal(weight, weight_names(again)[name])
    refused(lambda: axial.load(exported, features_only=True), "an export is as it is")
    refused(lambda: axial.predict(export, PHOTO, size=65), "size=65: not for an export")
    small = run.predictor.resized(33).task  # the areas of the grouping shrink with the canvas of 65x65 pixels
    assert (small.canvas, small.grouping.stuff_area) == ((33, 33), round(32 * (33 / 65) ** 2))


def test_a_file_from_the_hub_comes_with_what_lies_beside_it(hub_of, trained, tmp_path):
    """axial also downloads a TFLite file's spec, the recipe of a weights file, and the run's files of a checkpoint."""
    lite, run = tmp_path / "repository" / "lite", tmp_path / "repository" / "run"
    (lite / "assets.extra").mkdir(parents=True)
    for name in ("model.tflite", "assets.extra/spec.json", "other.bin"):
        (lite / name).write_text("{}")
    shutil.copytree(trained, run)
    shutil.copytree(ROOT / "axial" / "shipped" / "nuclei", tmp_path / "repository" / "nuclei")
    hub_of(tmp_path / "repository")
    source = resolve("hf://me/nano/lite/model.tflite")
    assert (source.kind, source.file) == ("export", source.path) and not os.path.exists(f"{source.folder}/other.bin")
    (checkpoint,) = (path.stem for path in (trained / "best").glob("*.index"))
    source = resolve(f"hf://me/nano/run/best/{checkpoint}")
    assert source.kind == "run" and source.folder.endswith("/run") and source.file.endswith(f"/run/best/{checkpoint}")
    model = axial.load("hf://me/nano/nuclei/weights.safetensors")
    assert model.photo_scale == 1.5 and model.predictor is not None
    refused(lambda: axial.load("hf://me/nano/models"), "models: no model or file has this name")


def test_older_flags_take_paths_alone(exported, tmp_path, monkeypatch):
    """--saved_model=nuclei still means a local folder; --model=nuclei means the shipped model."""
    shutil.copytree(exported, tmp_path / "nuclei")
    monkeypatch.chdir(tmp_path)
    assert resolve(flags.as_path("nuclei")) == Source("export", "./nuclei", "./nuclei")
    assert resolve("nuclei").folder == str(ROOT / "axial" / "shipped" / "nuclei")
    for path in ("other", "./nuclei", "gs://bucket/nuclei", str(tmp_path / "nuclei")):
        assert flags.as_path(path) == path
    with pytest.raises(InputError, match="^./nuclei: an export, whose batch norms are folded; a run or weights are"):
        find_weights("./nuclei")


def test_a_shipped_model_is_exported_with_its_card(succeed, nuclei, tmp_path):
    """The export's card has the shipped card's scores, training data and licence."""
    succeed("export", "--model_dir=nuclei", f"--output_dir={tmp_path}/out", "--format=safetensors")
    card, arrays = read_safetensors(str(tmp_path / "out" / "axial_deeplab_nano.safetensors"))
    shipped, expected = read_safetensors(f"{shipped_folder('nuclei')}/weights.safetensors")
    for name in ("scores", "scored_split", "scored_photos", "results", "trained", "license", "input", "weights"):
        assert getattr(card, name) == getattr(shipped, name), name
    assert card.results and card.license
    assert card.made == [*shipped.made, "axial-export --model_dir=RUN --output_dir=FOLDER --format=safetensors"]
    assert arrays.keys() == expected.keys()
    again = axial.load(tmp_path / "out")
    np.testing.assert_array_equal(again.get_weights()[0], nuclei.get_weights()[0])
