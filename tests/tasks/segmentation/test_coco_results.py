"""Predictions in COCO's format have the same scores when they are read back. Invalid files get a one-line message."""

import json
import pathlib
import shutil
import zipfile

import numpy as np
import pytest
from PIL import Image

from axial.data.convert import Conversion, convert_split
from axial.data.converters.coco import SAMPLE_DIR, coco_items
from axial.data.specs import COCO
from axial.errors import InputError
from axial.tasks.metrics import evaluate
from axial.tasks.registry import find_evaluator
from axial.tasks.segmentation.evaluator import PANOPTIC, PanopticMetrics
from axial.tasks.segmentation.prediction_writers import CocoPredictionWriter, StoredPredictions, zip_coco_results
from axial.training.split_run import SplitRun, merge
from tests.truths import shifted


@pytest.fixture(scope="module")
def examples(sample_dir):
    return list(PANOPTIC.examples(sample_dir, "val2017", COCO))


def score_and_write(examples, predictions, writer):
    """Writes predictions, and returns their scores."""
    metrics = PanopticMetrics(COCO)
    for example, prediction in predictions(examples):
        writer.add(example, metrics.update(example, prediction))
    writer.close()
    return metrics.result()


@pytest.fixture(scope="module")
def written(examples, tmp_path_factory):
    """(folder of the `shifted` predictions in COCO's format, scores of these predictions)."""
    folder = tmp_path_factory.mktemp("results")
    return folder, score_and_write(examples, shifted, CocoPredictionWriter(str(folder), COCO, "val2017"))


def read(folder, sample_dir):
    """The `StoredPredictions` of a folder with predictions in COCO's format."""
    paths = str(folder / "panoptic_val2017.json"), str(folder / "panoptic_val2017")
    return StoredPredictions(*paths, sample_dir, "val2017", spec=COCO)


def unsure(examples):
    """Yields `shifted` predictions with random scores from 0 to 1.2. Pixels without a segment have a class too."""
    for example, prediction in shifted(examples):
        rng = np.random.default_rng(int(example["image/id"]))
        panoptic, semantic = np.asarray(prediction["panoptic"]).copy(), np.asarray(prediction["semantic"]).copy()
        semantic[:, ::3] = rng.integers(COCO.num_classes, size=semantic[:, ::3].shape)
        panoptic[::4] = COCO.void
        score = rng.uniform(0, 1.2, np.shape(prediction["score"])).astype(np.float32)
        yield example, {**prediction, "panoptic": panoptic, "semantic": semantic, "score": score}


def test_reading_gives_all_scores_of_a_prediction_that_is_not_its_segments(examples, sample_dir, tmp_path, capsys):
    """The files contain the segments' scores for AP, and the class of each pixel before the grouping for mIoU."""
    results = CocoPredictionWriter(str(tmp_path), COCO, "val2017", sample_dir)
    scores = score_and_write(examples, unsure, results)
    assert evaluate(examples, read(tmp_path, sample_dir), PanopticMetrics(COCO)) == scores
    assert not capsys.readouterr().out
    shutil.rmtree(tmp_path / "semantic_val2017")
    again = evaluate(examples, read(tmp_path, sample_dir), PanopticMetrics(COCO))
    assert again["pq"] == scores["pq"] and again["ap"] == scores["ap"] and again["miou"] != scores["miou"]
    assert "8 of 8 images have no map of classes; their mIoU is of the segments" in capsys.readouterr().out


def test_the_truth_of_the_data_set_scores_one(examples, sample_dir, capsys):
    """COCO's ground truth files, read as predictions, have a PQ and mIoU of 1. The photos include crowds."""
    paths = f"{SAMPLE_DIR}/annotations/panoptic_val2017.json", f"{SAMPLE_DIR}/annotations/panoptic_val2017"
    scores = evaluate(examples, StoredPredictions(*paths, sample_dir, "val2017", spec=COCO), PanopticMetrics(COCO))
    assert scores["pq"]["all"]["pq"] == 1.0 and scores["miou"]["miou"] == 1.0
    assert "no segment has a score; AP ranks all segments of an image as equal" in capsys.readouterr().out


def test_the_official_evaluator_prints_our_scores(written, tmp_path):
    """The evaluator is cityscapesscripts', which computes panopticapi's PQ and reads COCO's format."""
    official = pytest.importorskip("cityscapesscripts.evaluation.evalPanopticSemanticLabeling")
    truth, (folder, scores) = f"{SAMPLE_DIR}/annotations/panoptic_val2017", written
    pngs = str(folder / "panoptic_val2017")
    theirs = official.evaluatePanoptic(truth + ".json", truth, pngs + ".json", pngs, str(tmp_path / "scores.json"))
    for group in ("all", "things", "stuff"):
        for quantity in ("pq", "sq", "rq"):
            np.testing.assert_allclose(scores["pq"][group][quantity], theirs[group.title()][quantity], rtol=1e-12)
    assert 0.2 < scores["pq"]["all"]["pq"] < 1


def first_png(folder, content):
    """Path of the PNG with the first image's segment ids."""
    return folder / "panoptic_val2017" / content["annotations"][0]["file_name"]


def resize(path):
    Image.open(path).resize((30, 20)).save(path)


def odd_map(folder, content):
    """Fills the first image's semantic map with an unknown category id."""
    path = folder / content["annotations"][0]["semantic"]
    Image.fromarray(np.full(np.asarray(Image.open(path)).shape, 12, np.uint8)).save(path)  # COCO has no category 12


def first_segments(content):
    """The 'segments_info' of the first image."""
    return content["annotations"][0]["segments_info"]


BAD = [  # (function that makes the files invalid, words of the error message)
    (lambda folder, c: c["annotations"].pop(), r"1 of 8 photos are missing, first \d+\.jpg \(image \d+\)$"),
    (lambda folder, c: first_png(folder, c).unlink(), r"1 of \d+ photos are missing, first \d+\.png"),
    (lambda folder, c: resize(first_png(folder, c)), r"30x20 pixels, the photo has \d+x\d+"),
    (lambda folder, c: first_segments(c).pop(), r"id \d+ is only in the PNG"),
    (lambda folder, c: first_segments(c).append({"id": 99, "category_id": 1}), "id 99 is only in the JSON"),
    (lambda folder, c: first_segments(c)[0].update(category_id=999), "category_id 999, which the spec 'coco' lacks"),
    (lambda folder, c: c["categories"][0].update(name="weed"), "category 1 is 'weed' .*calls it 'person'"),
    (odd_map, r"semantic_val2017/\d+.png: category 12, which the spec 'coco'"),
]


@pytest.mark.parametrize("spoil,words", BAD)
def test_bad_results_are_one_line(written, examples, sample_dir, tmp_path, spoil, words):
    shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "panoptic_val2017.json"
    content = json.loads(path.read_text())
    spoil(tmp_path, content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=words) as caught:
        list(read(tmp_path, sample_dir)(examples))
    assert "\n" not in str(caught.value)


def test_image_ids_may_be_names_as_in_cityscapesscripts_form(written, examples, sample_dir, tmp_path):
    shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "panoptic_val2017.json"
    content = json.loads(path.read_text())
    for annotation in content["annotations"]:
        annotation["image_id"] = annotation["file_name"].removesuffix(".png")
    path.write_text(json.dumps(content))
    assert evaluate(examples, read(tmp_path, sample_dir), PanopticMetrics(COCO)) == written[1]


# === Names ===


def test_no_two_photos_share_a_result(tmp_path):
    """If names differ only in folder or extension, two shards write distinct PNGs, which have the same scores."""
    names, pngs = ["a/x.jpg", "a/x.png", "x.jpg"], ["a/x.jpg.png", "a/x.png.png", "x.png"]
    items, source = coco_items(SAMPLE_DIR, "val2017")
    items = [{**item, "name": name} for item, name in zip(items, names)]
    data, results = str(tmp_path / "data"), str(tmp_path / "results")
    convert_split(Conversion(items, source, COCO, "val2017", data, progress=False))

    def some(shard, skip):
        return PANOPTIC.examples(data, "val2017", COCO, shard=shard, skip=skip)

    for number in range(2):
        options = dict(results_dir=results, data_dir=data, shard=(number, 2))
        SplitRun(PANOPTIC, COCO, "val2017", **options).run(some, shifted)
    merged = merge(results, "val2017", find_evaluator)
    folder = pathlib.Path(results, "panoptic_val2017")
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png")) == pngs
    reader = StoredPredictions(
        f"{results}/panoptic_val2017.json", f"{results}/panoptic_val2017", data, "val2017", spec=COCO
    )
    assert evaluate(some((0, 1), 0), reader, PanopticMetrics(COCO)) == merged.metrics.result()
    with zipfile.ZipFile(zip_coco_results(results, "val2017", data, str(tmp_path / "zip"))) as archive:
        assert len(set(archive.namelist())) == 4
