"""On the files that we write, our PQ and AP equal those of the official tools to the last digit."""

import contextlib
import io
import json
import pathlib

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as masks
from pycocotools.coco import COCO as CocoApi
from pycocotools.cocoeval import COCOeval

from axial.data.convert import convert_split, encode_item
from axial.data.converters.coco import coco_items
from axial.data.specs import COCO
from axial.evaluation.loop import evaluate
from axial.tasks.segmentation.coco_results import CocoResults
from axial.tasks.segmentation.evaluation import PanopticScores
from axial.tasks.segmentation.feed import evaluation_dataset, segment_map
from tests.conftest import DATA
from tests.data.coco_fixture import CocoFolder, stripes

SIZE = (60, 90)


def new_folder(root):
    folder = CocoFolder(root, "val2017")
    classes = zip(COCO.category_ids, COCO.class_names, COCO.things)
    folder.content["categories"] = [{"id": i, "name": n, "isthing": int(t)} for i, n, t in classes]
    return folder


def finish(folder):
    for annotation in folder.content["annotations"]:  # the official evaluator reads what is added here
        ids, areas = np.unique(read_png(folder.labels / annotation["file_name"]), return_counts=True)
        areas = dict(zip(ids.tolist(), areas.tolist()))
        for info in annotation["segments_info"]:
            info["area"] = areas[info["id"]]
    folder.write()
    return str(folder.root)


def full(root):
    """One photo of 65,000 instances, which `guesses` does not move. It has stuff, because the official tool would
    otherwise divide by zero.
    """
    folder = new_folder(root)
    ids = np.minimum(1 + np.arange(65500), 65001).reshape(131, 500).repeat(3, 0)
    classes = [c for c, thing in zip(COCO.category_ids, COCO.things) if thing]
    grass = COCO.category_ids[COCO.things.index(False)]
    folder.add(11, ids, {**{i: classes[i % len(classes)] for i in range(1, 65001)}, 65001: grass})
    return finish(folder)


def made_up(root):
    """Crowds, void, an image without segments, segments of one pixel, many segments."""
    folder = new_folder(root)
    things = [c for c, thing in zip(COCO.category_ids, COCO.things) if thing]
    stuff = [c for c, thing in zip(COCO.category_ids, COCO.things) if not thing]
    a, b, grass = things[0], things[1], stuff[0]
    folder.add(1, stripes(*SIZE, [0, 7, 8, 9, 70000]), {7: a, 8: b, 9: grass, 70000: a})
    folder.add(2, stripes(*SIZE, [3, 4, 5, 0]), {3: a, 4: a, 5: b}, crowd=(3, 5))
    folder.add(3, np.zeros(SIZE, int), {})
    dots = stripes(*SIZE, [1, 2])
    dots[5, 5], dots[40, 80] = 11, 12
    folder.add(4, dots, {1: grass, 2: stuff[1], 11: a, 12: b})
    many = 1 + np.arange(SIZE[0] * SIZE[1] // 9).reshape(SIZE[0] // 3, -1).repeat(3, 0).repeat(3, 1)
    folder.add(5, many, {int(i): (a, b)[i % 2] for i in np.unique(many)})
    return finish(folder)


def guesses(examples):
    """Predictions that are partly right: moved, renamed, merged, with holes."""
    for example in examples:
        rng = np.random.default_rng(int(example["image/id"]))
        truth, classes = segment_map(example).numpy(), example["segment/class"].numpy()
        segments = np.roll(truth, rng.integers(0, 2, 2), (0, 1))
        segments[rng.uniform(size=truth.shape) < 0.05] = 0
        renamed = rng.uniform(size=len(classes)) < 0.15
        kinds = np.concatenate([[-1], np.where(renamed, rng.permutation(classes), classes)])
        ids, segments = np.unique(np.append(0, segments), return_inverse=True)
        kinds, segments = kinds[ids[1:]], segments[1:].reshape(truth.shape)
        semantic = np.concatenate([[COCO.ignore], kinds])[segments]
        scores = rng.integers(1, 5, len(kinds)) / 5  # many scores are equal
        yield example, {"table": (segments, kinds, scores), "semantic": semantic}


def read_png(path):
    return np.asarray(Image.open(path)).astype(int) @ [1, 256, 65536]


def pycocotools_ap(root, results, scores):
    """COCOeval on all masks of both JSONs at once."""
    things = {c for c, thing in zip(COCO.category_ids, COCO.things) if thing}
    sides = []
    for folder, of_image in ((f"{root}/annotations", None), (str(results), scores)):
        content = json.loads(pathlib.Path(folder, "panoptic_val2017.json").read_text())
        annotations, images = [], []
        for entry in sorted(content["annotations"], key=lambda a: a["image_id"]):
            ids = read_png(f"{folder}/panoptic_val2017/{entry['file_name']}")
            images.append({"id": entry["image_id"], "height": ids.shape[0], "width": ids.shape[1]})
            for place, info in enumerate(entry["segments_info"]):
                if info["category_id"] not in things:
                    continue
                mask = masks.encode(np.asfortranarray(ids == info["id"], np.uint8))
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": entry["image_id"],
                        "category_id": info["category_id"],
                        "segmentation": mask,
                        "area": int(masks.area(mask)),
                        "iscrowd": info["iscrowd"] if of_image is None else 0,
                        "score": 1.0 if of_image is None else of_image[entry["image_id"]][place],
                    }
                )
        api = CocoApi()
        api.dataset = {"images": images, "categories": [{"id": c} for c in things], "annotations": annotations}
        api.createIndex()
        sides.append(api)
    evaluation = COCOeval(*sides, "segm")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return [np.nan if value < 0 else value for value in evaluation.stats[:6]]


@pytest.mark.parametrize(
    "source",
    ["made up", pytest.param("full", marks=pytest.mark.slow), pytest.param("coco", marks=pytest.mark.slow)],
)  # "coco" is forty photos
def test_official_tools_print_our_scores(tmp_path, source):
    evaluator = pytest.importorskip("cityscapesscripts.evaluation.evalPanopticSemanticLabeling")
    if source == "coco" and not (DATA / "coco").is_dir():
        pytest.skip(f"needs the COCO photos in {DATA / 'coco'}; set AXIAL_DATA")
    root = str(DATA / "coco") if source == "coco" else {"made up": made_up, "full": full}[source](tmp_path / "data")
    items, digest = coco_items(root, "val2017")
    records = str(tmp_path / "records")
    convert_split(items, encode_item, COCO, "val2017", output_dir=records, source=digest, progress=False)
    examples = evaluation_dataset(records, "val2017", COCO, (17, 17))
    results, scores = CocoResults(str(tmp_path / "results"), COCO, "val2017"), {}

    def watch(example, table):
        results.add(example, table)
        scores[int(example["image/id"])] = table[2].tolist()

    ours = evaluate(examples, guesses, PanopticScores(COCO), watch=watch)
    results.close()
    with contextlib.redirect_stdout(io.StringIO()):
        official = evaluator.evaluatePanoptic(
            f"{root}/annotations/panoptic_val2017.json",
            f"{root}/annotations/panoptic_val2017",
            str(tmp_path / "results" / "panoptic_val2017.json"),
            str(tmp_path / "results" / "panoptic_val2017"),
            str(tmp_path / "official.json"),
        )
        wanted_ap = pycocotools_ap(root, tmp_path / "results", scores)
    for theirs, mine in (("All", "all"), ("Things", "things"), ("Stuff", "stuff")):
        for quantity in ("pq", "sq", "rq"):
            np.testing.assert_allclose(ours["pq"][mine][quantity], official[theirs][quantity], rtol=1e-12)
    assert 0.02 < ours["pq"]["all"]["pq"] < 0.99
    np.testing.assert_allclose(list(ours["ap"].values()), wanted_ap, rtol=1e-12)
    assert 0 < ours["ap"]["ap"] < 0.99
