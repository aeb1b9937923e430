"""Submission files for the evaluation servers of Cityscapes and COCO. cityscapesscripts scores the former."""

import json
import os
import pathlib
import zipfile

import numpy as np
import pytest

from axial.data.convert import Conversion, convert_split
from axial.data.converters.cityscapes import cityscapes_items
from axial.data.converters.coco import SAMPLE_DIR, coco_items
from axial.data.specs import CITYSCAPES, COCO
from axial.errors import InputError
from axial.metrics.panoptic_quality import Segments
from axial.tasks.metrics import evaluate
from axial.tasks.segmentation.cityscapes_scores import cityscapes_scores
from axial.tasks.segmentation.evaluator import PANOPTIC, PanopticMetrics, submitted
from axial.tasks.segmentation.input_pipeline import segment_map
from axial.tasks.segmentation.prediction_writers import CityscapesPredictionWriter, zip_coco_results
from tests.data.cityscapes_fixture import CityscapesFolder, street


def as_prediction(instances, spec):
    """Converts instanceIds [h, w] to arguments of `CityscapesPredictionWriter.add`: (`Segments`, class indices [h, w]).

    Groups of things and ignored ids become void.
    """
    segments, classes = np.zeros(instances.shape, np.int32), []
    semantic = np.zeros(instances.shape, np.int32)
    for identity in np.unique(instances):
        category = identity // 1000 if identity >= 1000 else identity
        index = spec.class_index(category)
        if index == spec.ignore:
            continue
        semantic[instances == identity] = index
        if not (spec.things[index] and identity < 1000):
            classes.append(index)
            segments[instances == identity] = len(classes)
    scores = np.linspace(0.9, 0.5, len(classes))
    return Segments(segments, classes, scores), semantic


def guesses(examples):
    """Yields (example, prediction). The ground truth's segments are shifted, and a fifth of them get a random class."""
    for example in examples:
        rng = np.random.default_rng(int(example["image/id"]))
        truth, true_classes = segment_map(example).numpy(), example["segment/class"].numpy()
        segments = np.roll(truth, rng.integers(2, 6, 2), (0, 1))
        kinds = np.where(rng.uniform(size=len(true_classes)) < 0.2, rng.permutation(true_classes), true_classes)
        semantic = np.concatenate([[CITYSCAPES.ignore], kinds])[segments]
        table = Segments(segments, kinds, rng.integers(1, 10, len(kinds)) / 10)
        yield example, {"table": table, "semantic": semantic}


def test_evaluation_writes_files_that_cityscapesscripts_scores_as_we_do(tmp_path):
    """Three photos have predictions with errors in shape and class. Ground truth has groups of things and void."""
    tree = CityscapesFolder(tmp_path / "cs")
    for frame in range(3):
        tree.add("mine", frame, street(height=120, width=512, seed=frame))
    items, source = cityscapes_items(str(tmp_path / "cs"), "val")
    data_dir = str(tmp_path / "data")
    convert_split(Conversion(items, source, CITYSCAPES, "val", data_dir, progress=False))

    results = CityscapesPredictionWriter(str(tmp_path / "results"), CITYSCAPES, "val")
    scores = PanopticMetrics(CITYSCAPES)
    examples = PANOPTIC.examples(str(tmp_path / "data"), "val", CITYSCAPES)
    ours = evaluate(examples, submitted(guesses, results, CITYSCAPES), scores)
    results.close(name for _, name, _ in scores.photos)
    theirs = cityscapes_scores(str(tmp_path / "cs"), str(tmp_path / "results"), "val")
    for group in ("all", "things", "stuff"):
        for quantity in ("pq", "sq", "rq"):
            np.testing.assert_allclose(ours["pq"][group][quantity], theirs[f"{quantity}_{group}"], rtol=1e-12)
    np.testing.assert_allclose(ours["miou"]["miou"], theirs["miou"], rtol=1e-12)
    assert 0.1 < ours["pq"]["all"]["pq"] < 0.9 and 0.1 < ours["miou"]["miou"] < 0.9
    assert 0 < theirs["ap"] < theirs["ap50"] < 1


def test_missing_photos_and_old_results_are_refused(tmp_path):
    with pytest.raises(InputError, match="no gtFine/test/CITY"):
        cityscapes_scores(str(tmp_path), str(tmp_path), "test")
    with pytest.raises(InputError, match="takes cityscapes' classes, these are coco's"):
        CityscapesPredictionWriter(str(tmp_path), COCO, "val")
    results = CityscapesPredictionWriter(str(tmp_path), CITYSCAPES, "val")
    results.add("a_000000_000001_leftImg8bit.png", *as_prediction(street(), CITYSCAPES))
    with pytest.raises(InputError, match="1 of 2 photos are missing, first b.png"):
        results.close(["a_000000_000001_leftImg8bit.png", "b.png"])
    assert not (tmp_path / "panoptic/cityscapes_panoptic_val.json").exists()
    results.close(["a_000000_000001_leftImg8bit.png"])
    with pytest.raises(InputError, match="never overwritten"):
        CityscapesPredictionWriter(str(tmp_path), CITYSCAPES, "val")


# === COCO's zip ===


@pytest.fixture
def coco_results(tmp_path):
    """A folder with a converted split in data/, and with the split's ground truth as predictions in COCO's format."""
    items, source = coco_items(SAMPLE_DIR, "val2017")
    convert_split(Conversion(items, source, COCO, "val2017", str(tmp_path / "data"), progress=False))
    truth = os.path.join(SAMPLE_DIR, "annotations", "panoptic_val2017")
    content = json.loads(pathlib.Path(truth + ".json").read_text())
    os.symlink(truth, tmp_path / "panoptic_val2017")
    (tmp_path / "panoptic_val2017.json").write_text(json.dumps({"annotations": content["annotations"]}))
    return tmp_path


def test_the_zip_has_the_servers_names(coco_results):
    arguments = (str(coco_results), "val2017", str(coco_results / "data"), str(coco_results / "zip"), "mine")
    path = zip_coco_results(*arguments)
    assert os.path.basename(path) == "panoptic_val2017_mine_results.zip"
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        content = json.loads(archive.read("panoptic_val2017_mine_results.json"))
        pngs = {f"panoptic_val2017_mine_results/{a['file_name']}" for a in content["annotations"]}
        assert len(pngs) == 8 and set(names) == pngs | {"panoptic_val2017_mine_results.json"}
        assert archive.testzip() is None
    with pytest.raises(InputError, match="exists; results are never overwritten"):
        zip_coco_results(*arguments)


def test_a_zip_without_every_photo_is_refused(coco_results):
    path = coco_results / "panoptic_val2017.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({"annotations": content["annotations"][1:]}))
    arguments = (str(coco_results), "val2017", str(coco_results / "data"), str(coco_results / "zip"))
    with pytest.raises(InputError, match="1 of 8 photos are missing"):
        zip_coco_results(*arguments)
    content["annotations"][0]["file_name"] = "nowhere.png"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="first nowhere.png"):
        zip_coco_results(*arguments)
    with pytest.raises(InputError, match="axial-evaluate --results_dir writes it"):
        zip_coco_results(str(coco_results / "data"), *arguments[1:])
    with pytest.raises(InputError, match="^--split: .* leaves its folder"):
        zip_coco_results(str(coco_results), "a/../../x", *arguments[2:])
    assert not (coco_results / "zip").exists()


@pytest.mark.parametrize("name", ["../../x.png", "a/b.png", "a\n_leftImg8bit.png", "x" * 250 + ".png"])
def test_a_photos_name_does_not_leave_the_submission(tmp_path, name):
    results = CityscapesPredictionWriter(str(tmp_path / "out" / "files"), CITYSCAPES, "val")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match="^a record's image/file_name"):
        results.add(name, *as_prediction(np.full([4, 6], 26001), CITYSCAPES))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_submission_is_not_written_through_links(tmp_path):
    home, folder = tmp_path / "home", tmp_path / "files" / "instance" / "masks"
    home.mkdir()
    folder.parent.mkdir(parents=True)
    folder.symlink_to(home)
    with pytest.raises(InputError, match="files/instance/masks.*: a link that leads out of "):
        CityscapesPredictionWriter(str(tmp_path / "files"), CITYSCAPES, "val")
    assert not os.listdir(home)
