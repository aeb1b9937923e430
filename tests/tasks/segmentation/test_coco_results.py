"""Results made elsewhere get the scores of the run that made them. Wrong results get a one-line message."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import shutil
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from cityscapesscripts.preparation.createPanopticImgs import convert2panoptic
from PIL import Image

from axial.data.convert import convert_split, encode_item
from axial.data.converters.cityscapes import cityscapes_items
from axial.data.converters.coco import SAMPLE_DIR, coco_items
from axial.data.labels import colors_of
from axial.data.specs import CITYSCAPES, COCO
from axial.errors import InputError
from axial.evaluation.loop import evaluate
from axial.evaluation.split_run import SplitRun, merge
from axial.tasks.registry import find_evaluation
from axial.tasks.segmentation.coco_results import CocoResults, ResultPredictions
from axial.tasks.segmentation.evaluation import PANOPTIC, PanopticScores
from axial.tasks.segmentation.feed import evaluation_dataset
from axial.tasks.segmentation.predictions import OutputStore
from axial.tasks.segmentation.submission import zip_coco_results
from tests.data.cityscapes_fixture import CityscapesFolder, street
from tests.data.coco_fixture import CocoFolder, stripes
from tests.truths import shifted


@pytest.fixture(scope="module")
def examples(sample_dir):
    return list(evaluation_dataset(sample_dir, "val2017", COCO, (17, 17)))


@pytest.fixture(scope="module")
def written(examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    results = CocoResults(str(folder), COCO, "val2017")
    scores = evaluate(examples, shifted, PanopticScores(COCO), watch=results.add)
    results.close()
    return folder, scores


def read(folder, sample_dir):
    paths = str(folder / "panoptic_val2017.json"), str(folder / "panoptic_val2017")
    return ResultPredictions(*paths, sample_dir, "val2017", spec=COCO)


def test_reading_gives_the_scores_of_writing(written, examples, sample_dir):
    found = evaluate(examples, read(written[0], sample_dir), PanopticScores(COCO))
    assert found == written[1]


def unsure(examples):
    """`shifted` with scores that rank segments, a heat above 1 among them, and with classes where segments are void."""
    for example, prediction in shifted(examples):
        rng = np.random.default_rng(int(example["image/id"]))
        panoptic, semantic = np.asarray(prediction["panoptic"]).copy(), np.asarray(prediction["semantic"]).copy()
        semantic[:, ::3] = rng.integers(COCO.num_classes, size=semantic[:, ::3].shape)
        panoptic[::4] = COCO.void
        score = rng.uniform(0, 1.2, np.shape(prediction["score"])).astype(np.float32)
        yield example, {**prediction, "panoptic": panoptic, "semantic": semantic, "score": score}


def test_reading_gives_all_scores_of_a_prediction_that_is_not_its_segments(examples, sample_dir, tmp_path, capsys):
    """The grouping drops small areas, and votes. mIoU is of the classes before it, AP of the segments' scores."""
    results = CocoResults(str(tmp_path), COCO, "val2017", sample_dir)
    scores = evaluate(examples, unsure, PanopticScores(COCO), watch=results.add)
    results.close()
    assert evaluate(examples, read(tmp_path, sample_dir), PanopticScores(COCO)) == scores
    assert not capsys.readouterr().out
    shutil.rmtree(tmp_path / "semantic_val2017")
    found = evaluate(examples, read(tmp_path, sample_dir), PanopticScores(COCO))
    assert found["pq"] == scores["pq"] and found["ap"] == scores["ap"] and found["miou"] != scores["miou"]
    assert "8 of 8 images have no map of classes; their mIoU is of the segments" in capsys.readouterr().out


def test_it_is_said_that_there_are_no_scores(sample_dir, capsys):
    paths = f"{SAMPLE_DIR}/annotations/panoptic_val2017.json", f"{SAMPLE_DIR}/annotations/panoptic_val2017"
    ResultPredictions(*paths, sample_dir, "val2017", spec=COCO)
    assert "no segment has a score; AP takes all of an image as equally sure" in capsys.readouterr().out


def _small_map(folder, path):
    Image.open(path).resize((30, 20)).save(path)


def _odd_map(folder, path):
    Image.fromarray(np.full(np.asarray(Image.open(path)).shape, 12, np.uint8)).save(path)  # COCO has no category 12


@pytest.mark.parametrize(
    "spoil,words", [(_small_map, "30x20 pixels, the photo has"), (_odd_map, "category 12, which the spec 'coco'")]
)
def test_a_bad_map_of_classes_is_one_line(written, examples, sample_dir, tmp_path, spoil, words):
    shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
    path = next((tmp_path / "semantic_val2017").iterdir())
    spoil(tmp_path, path)
    with pytest.raises(InputError, match=rf"{path}: {words}"):
        evaluate(examples, read(tmp_path, sample_dir), PanopticScores(COCO))


def test_the_folder_above_the_pngs_is_told(written, sample_dir):
    paths = str(written[0] / "panoptic_val2017.json"), str(written[0])
    with pytest.raises(InputError, match=rf"did you mean --results_dir={written[0]}/panoptic_val2017\?\)"):
        ResultPredictions(*paths, sample_dir, "val2017", spec=COCO)


def test_scores_are_read_where_there_are_any(written, examples, sample_dir, tmp_path):
    shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "panoptic_val2017.json"
    content = json.loads(path.read_text())
    scores = {}
    for annotation in content["annotations"]:
        rng = np.random.default_rng(annotation["image_id"])
        for segment in annotation["segments_info"]:
            segment["score"] = float(rng.uniform())
        scores[annotation["image_id"]] = [s["score"] for s in annotation["segments_info"]]
    path.write_text(json.dumps(content))
    for example, prediction in read(tmp_path, sample_dir)(examples):
        assert prediction["table"][2].tolist() == scores[int(example["image/id"])]


def test_the_truth_of_the_data_set_scores_one(examples, sample_dir):
    """COCO's own files are in this format. A crowd does not count as a matching prediction."""
    paths = f"{SAMPLE_DIR}/annotations/panoptic_val2017.json", f"{SAMPLE_DIR}/annotations/panoptic_val2017"
    scores = evaluate(examples, ResultPredictions(*paths, sample_dir, "val2017", spec=COCO), PanopticScores(COCO))
    assert scores["pq"]["all"]["pq"] == 1.0 and scores["miou"]["miou"] == 1.0


def _drop_image(folder, content):
    content["annotations"].pop()


def _drop_images(folder, content):
    del content["annotations"][1:]


def _drop_png(folder, content):
    os.remove(folder / "panoptic_val2017" / content["annotations"][0]["file_name"])


def _resize(folder, content):
    path = folder / "panoptic_val2017" / content["annotations"][0]["file_name"]
    Image.open(path).resize((30, 20)).save(path)


def _unlisted(folder, content):
    content["annotations"][0]["segments_info"].pop()


def _unpainted(folder, content):
    content["annotations"][0]["segments_info"].append({"id": 99, "category_id": 1})


def _twice(folder, content):
    content["annotations"][0]["segments_info"] *= 2


def _category(folder, content):
    content["annotations"][0]["segments_info"][0]["category_id"] = 999


def _instances(folder, content):
    content["annotations"] = [{"image_id": 1, "bbox": [0, 0, 1, 1]}]


BAD = {
    _drop_image: r"no prediction of 1 of the split's 8 images: image \d+ \(\d+\.jpg\)$",
    _drop_images: r"no prediction of 7 of the split's 8 images: image \d+ \(\d+\.jpg\), .* and 4 more$",
    _drop_png: r"lacks 1 of the PNGs that .*\.json names: \d+\.png",
    _resize: r"30x20 pixels, the photo has \d+x\d+",
    _unlisted: r"id \d+ is only in the PNG",
    _unpainted: r"id 99 is only in the JSON",
    _twice: r"image \d+: segments_info: id 1 is there twice",
    _category: r"category_id 999, which the spec 'coco' does not have",
    _instances: r"annotations\[0\]: is missing the required field file_name",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda f: f.__name__.strip("_"))
def test_bad_results_are_one_line(written, examples, sample_dir, tmp_path, spoil):
    shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "panoptic_val2017.json"
    content = json.loads(path.read_text())
    spoil(tmp_path, content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=BAD[spoil]) as caught:
        evaluate(examples, read(tmp_path, sample_dir), PanopticScores(COCO))
    assert "\n" not in str(caught.value)


def test_results_in_cityscapesscripts_form(tmp_path):
    """In this format an image id is a name such as frankfurt_000000_000294. A segment's id is its panoptic id."""
    tree = CityscapesFolder(tmp_path / "cs")
    for frame in range(3):
        tree.add("mine", frame, street(height=120, width=512, seed=frame))
    items, source = cityscapes_items(str(tmp_path / "cs"), "val")
    data_dir = str(tmp_path / "data")
    convert_split(items, encode_item, CITYSCAPES, "val", output_dir=data_dir, source=source, progress=False)
    convert2panoptic(str(tmp_path / "cs" / "gtFine"), setNames=["val"])
    path = tmp_path / "cs" / "gtFine" / "cityscapes_panoptic_val.json"
    ids = [annotation["image_id"] for annotation in json.loads(path.read_text())["annotations"]]
    assert ids == [f"mine_000000_{frame:06d}" for frame in range(3)]
    results = ResultPredictions(str(path), str(path.with_suffix("")), data_dir, "val", spec=CITYSCAPES)
    scores = evaluate(evaluation_dataset(data_dir, "val", CITYSCAPES, (17, 17)), results, PanopticScores(CITYSCAPES))
    assert scores["pq"]["all"]["pq"] == 1.0
    content = json.loads(path.read_text())
    content["annotations"].pop(1)
    path.write_text(json.dumps(content))
    with pytest.raises(
        InputError, match="no prediction of 1 of the split's 3 images: image 1 \\(mine_000000_000001_left"
    ):
        ResultPredictions(str(path), str(path.with_suffix("")), data_dir, "val", spec=CITYSCAPES)


def test_of_two_crowds_the_last_one_listed_excuses(tmp_path):
    """A prediction lies on crowd 5. panopticapi's rule, which cityscapesscripts has, goes by the order of the JSON."""
    official = pytest.importorskip("cityscapesscripts.evaluation.evalPanopticSemanticLabeling")
    ids = stripes(20, 40, [9, 5, 7, 11])
    things = {i: {"isthing": int(t)} for i, t in zip(COCO.category_ids, COCO.things)}
    for order in ((9, 5, 7, 11), (5, 9, 7, 11), (11, 7, 5, 9)):
        folder = CocoFolder(tmp_path / f"coco{order}")
        categories = {9: 1, 5: 1, 7: 3, 11: 193}
        folder.add(1, ids, {i: categories[i] for i in order}, crowd=(9, 5))
        items, source = coco_items(str(folder.root), "val")
        data_dir = str(tmp_path / f"data{order}")
        convert_split(items, encode_item, COCO, "val", output_dir=data_dir, source=source, progress=False)
        annotation = folder.content["annotations"][0]
        predicted = np.where(ids == 9, 0, ids)
        (folder.root / "found").mkdir()
        Image.fromarray(colors_of(predicted)).save(folder.root / "found" / annotation["file_name"])
        rows = [{"id": i, "category_id": categories[i]} for i in order[::-1] if i != 9]
        found = {**annotation, "segments_info": rows}
        path = folder.root / "found.json"
        path.write_text(json.dumps({"annotations": [found]}))
        results = ResultPredictions(str(path), str(folder.root / "found"), data_dir, "val", spec=COCO)
        photos = evaluation_dataset(data_dir, "val", COCO, (17, 17))
        scores = evaluate(photos, results, PanopticScores(COCO))["pq"]
        for segment in annotation["segments_info"]:
            segment["area"] = int((ids == segment["id"]).sum())
        places = str(folder.labels), str(folder.root / "found")
        with contextlib.redirect_stdout(io.StringIO()):
            stat = official.pq_compute_single_core(0, [(annotation, found)], *places, categories=things)
            wanted = stat.pq_average(things, None)[0]
        assert (scores["all"]["pq"], scores["all"]["classes"]) == (wanted["pq"], wanted["n"]), order
        assert wanted["n"] == (2 if order.index(5) > order.index(9) else 3)


def test_results_of_other_categories_or_in_folders(written, examples, sample_dir, tmp_path):
    shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
    path, pngs = tmp_path / "panoptic_val2017.json", tmp_path / "panoptic_val2017"
    content = json.loads(path.read_text())
    (pngs / "a").mkdir()
    for one in content["annotations"][:2]:
        (pngs / one["file_name"]).rename(pngs / "a" / one["file_name"])
        one["file_name"] = f"a/{one['file_name']}"
    path.write_text(json.dumps(content))
    results = ResultPredictions(str(path), str(pngs), sample_dir, "val2017", spec=COCO)
    assert len(list(results(examples))) == 8
    content["categories"][0]["name"] = "weed"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="category 1 is 'weed' .*calls it 'person'"):
        ResultPredictions(str(path), str(pngs), sample_dir, "val2017", spec=COCO)


# === Names ===


@pytest.mark.parametrize(
    "names,pngs",
    [
        (["a.jpg", "a.png", "b.jpg"], ["a.jpg.png", "a.png.png", "b.png"]),
        (["a/x.jpg", "b/x.jpg", "x.jpg"], ["a/x.png", "b/x.png", "x.png"]),
        (["a/x.jpg", "a/x.png", "x.jpg"], ["a/x.jpg.png", "a/x.png.png", "x.png"]),
        (["x.jpg", "x.jpg", "y.jpg"], ["1-x.jpg.png", "2-x.jpg.png", "y.png"]),  # records of an older version
    ],
)
def test_no_two_photos_share_a_result(tmp_path, names, pngs):
    """Two shards write them, and they score as the run did."""
    items, source = coco_items(SAMPLE_DIR, "val2017")
    items = [{**item, "name": name} for item, name in zip(items, names)]
    data, results = str(tmp_path / "data"), str(tmp_path / "results")
    convert_split(items, encode_item, COCO, "val2017", output_dir=data, source=source, progress=False)

    def some(shard, skip):
        return evaluation_dataset(data, "val2017", COCO, (17, 17), shard=shard, skip=skip)

    for number in range(2):
        options = dict(results_dir=results, data_dir=data, shard=(number, 2))
        SplitRun(PANOPTIC, COCO, "val2017", **options).run(some, shifted)
    merged = merge(results, "val2017", find_evaluation)
    files = [os.path.relpath(path, f"{results}/panoptic_val2017") for path in glob(f"{results}/panoptic_val2017")]
    if len(set(names)) == len(names):
        assert sorted(files) == sorted(pngs)
    else:  # the numbers are those of the records, which have an order of their own
        assert len(files) == 3 and "y.png" in files
    reader = ResultPredictions(
        f"{results}/panoptic_val2017.json", f"{results}/panoptic_val2017", data, "val2017", spec=COCO
    )
    assert evaluate(some((0, 1), 0), reader, PanopticScores(COCO)) == merged.scores.result()
    with zipfile.ZipFile(zip_coco_results(results, "val2017", data, str(tmp_path / "zip"))) as archive:
        assert len(set(archive.namelist())) == 4


def glob(folder):
    return [str(path) for path in pathlib.Path(folder).rglob("*.png")]


# === Names and links from outside ===


def write_one(results, name):
    """Writes the results of one photo of this name."""
    example = {"image/file_name": tf.constant(name), "image/id": tf.constant(1, tf.int64)}
    results.add(example, (np.ones([4, 4], np.int32), np.array([0]), np.array([0.5]), np.zeros([4, 4], np.int32)))


@pytest.mark.parametrize(
    "name", ["../../x.jpg", "/x.jpg", "a/../../../x.jpg", "..\\x.jpg", "a\nb.jpg", "x" * 300, b"\xff"]
)
def test_a_photos_name_does_not_leave_the_results(tmp_path, name):
    results = CocoResults(str(tmp_path / "out" / "results"), COCO, "val")
    with pytest.raises(InputError, match="a record's image/file_name"):
        write_one(results, name)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "results", "panoptic_val"]
    assert not results.annotations


def test_a_photo_in_a_folder_has_its_result_in_one(tmp_path):
    results = CocoResults(str(tmp_path), COCO, "val")
    write_one(results, "aachen/aachen_000.png")
    assert results.annotations[0]["file_name"] == "aachen/aachen_000.png"
    assert Image.open(tmp_path / "panoptic_val" / "aachen" / "aachen_000.png").size == (4, 4)
    assert (results.seen(0)[0] == 1).all()
    later = CocoResults(str(tmp_path), COCO, "val")
    later.restore("state.json", results.annotations)
    assert (later.seen(0)[0] == 1).all()
    later.restore("state.json", [{**results.annotations[0], "file_name": "../../x.png"}])
    with pytest.raises(InputError, match="leaves its folder"):
        later.seen(0)
    (tmp_path / "home").mkdir()
    (tmp_path / "panoptic_val" / "bochum").symlink_to(tmp_path / "home")
    with pytest.raises(InputError, match="bochum: a link that leads out of "):
        write_one(results, "bochum/bochum_000.png")
    assert not os.listdir(tmp_path / "home")


def test_results_take_the_place_of_links_and_do_not_follow_them(tmp_path):
    folder, file = tmp_path / "panoptic_val", tmp_path / "file"
    file.write_text("mine")
    folder.mkdir()
    for name in ("a.png", ".partial.b.png"):
        (folder / name).symlink_to(file)
    (tmp_path / "panoptic_test").symlink_to(tmp_path.parent)
    results = CocoResults(str(tmp_path), COCO, "val")
    for name in ("a.jpg", "b.jpg"):
        write_one(results, name)
    assert file.read_text() == "mine" and sorted(os.listdir(folder)) == ["a.png", "b.png"]
    assert sorted(os.listdir(tmp_path / "semantic_val")) == ["a.png", "b.png"]
    assert not any(path.is_symlink() for path in folder.iterdir())
    with pytest.raises(InputError, match="panoptic_test: a link that leads out of "):
        CocoResults(str(tmp_path), COCO, "test")


@pytest.mark.parametrize(
    "name,split", [("../../x", "val"), ("x", "/../../val"), ("/x", "val"), ("", "/.."), ("x\n", "val")]
)
def test_the_names_of_a_spec_and_a_split_do_not_leave_the_outputs(tmp_path, name, split):
    spec = dataclasses.replace(COCO, name=name)
    with pytest.raises(InputError, match="^the spec's name, --split: "):
        OutputStore(str(tmp_path / "outputs"), spec, split, {"a": 1})
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["coco", "my data/v2", "coco ...", "..a"])
def test_other_names_of_specs_are_kept(tmp_path, name):
    OutputStore(str(tmp_path), dataclasses.replace(COCO, name=name), "val", {"a": 1})
    assert (tmp_path / f"{name}-val" / "outputs.json").exists()
