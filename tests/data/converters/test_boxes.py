"""COCO's boxes in instances_SPLIT.json, in new and old records, and in the examples of a detector."""

import json

import numpy as np
import pytest
import tensorflow as tf
from pycocotools import mask as coco_masks

from axial.data import tfrecord
from axial.data.converters.boxes import check_runs
from axial.data.converters.coco import coco_items
from axial.data.specs import COCO
from axial.data.streams import check_records
from axial.errors import InputError
from axial.io import schemas
from axial.models.faster_rcnn.anchors import choose
from axial.models.registry import ModelConfig
from axial.tasks.detection.evaluator import DETECTION
from axial.tasks.detection.input_pipeline import DetectionData, mirrored, photo_size, record_masks
from axial.tasks.detection.task import DetectionTask
from tests.conftest import DATA
from tests.data import conversion
from tests.data.coco_fixture import CocoFolder, stripes

PERSON, DOG, SKY = 1, 18, 187


def training_batches(folder, data, name="mask_rcnn_resnet_nano"):
    return DetectionTask(ModelConfig(name), data, folder).train_dataset(3, seed=0)


class Folder(CocoFolder):
    """Three photos of 96x64 pixels: one with two objects and a crowd, one without objects, one with a box of area 0."""

    def __init__(self, root):
        super().__init__(root)
        for image in (1, 2, 3):
            self.add(image, stripes(64, 96, [7, 8]), {7: PERSON, 8: SKY})
        self.path = root / "annotations" / "instances_val.json"
        square = [[8.0, 4.0, 24.0, 4.0, 24.0, 20.0, 8.0, 20.0]]
        runs = {"size": [64, 96], "counts": [0, 64 * 10, 64 * 86]}
        self.objects = [
            self.object(1, 1, PERSON, [8.25, 4.0, 15.5, 16.0], square),
            self.object(2, 1, DOG, [40, 30, 20, 10], [[40.0, 30.0, 60.0, 30.0, 60.0, 40.0, 40.0, 40.0]]),
            self.object(3, 1, PERSON, [0, 0, 10, 64], runs, iscrowd=1),
            self.object(4, 3, DOG, [5, 5, 7, 0], square),
        ]
        self.save()

    def object(self, number, image, category, box, segmentation, iscrowd=0):
        area = box[2] * box[3] / 2
        keys = dict(id=number, image_id=image, category_id=category, bbox=box, segmentation=segmentation)
        return {**keys, "area": area, "iscrowd": iscrowd}

    def save(self, **changes):
        categories = [{"id": i, "name": name} for i, name in zip(COCO.category_ids, COCO.class_names)]
        content = {"images": self.content["images"], "annotations": self.objects, "categories": categories, **changes}
        self.path.write_text(json.dumps(content))

    def convert(self, output, spec=COCO):
        conversion.convert(coco_items(str(self.root), "val", spec), spec, output)
        return str(output)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "coco")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    root = tmp_path_factory.mktemp("boxes")
    return Folder(root / "coco").convert(root / "data")


def test_boxes_are_those_of_the_json(converted):
    first, second, third = DETECTION.examples(converted, "val", COCO)
    np.testing.assert_array_equal(first["object/box"], [[8.25, 4, 15.5, 16], [40, 30, 20, 10], [0, 0, 10, 64]])
    np.testing.assert_array_equal(first["object/area"], [124, 100, 320])
    np.testing.assert_array_equal(first["object/crowd"], [0, 0, 1])
    assert [COCO.category_ids[i] for i in first["object/class"]] == [PERSON, DOG, PERSON]
    assert second["object/box"].shape == (0, 4) and third["object/box"].shape == (1, 4)
    masks, has_mask = (x.numpy() for x in record_masks(first, COCO))
    assert masks.shape == (3, 64, 96) and has_mask.all()
    assert masks[0, 4:20, 8:24].all() and masks[0].sum() == 256
    assert masks[2, :, :10].all() and masks[2].sum() == 640
    assert record_masks(second, COCO)[0].shape == (0, 64, 96)


def test_boxes_of_photos_whose_ids_are_names(folder, tmp_path):
    """If photo ids are names, records number the photos in the order of the names."""
    names = {1: "b", 2: "c", 3: "a"}
    for image, annotation in zip(folder.content["images"], folder.content["annotations"]):
        image["id"] = annotation["image_id"] = names[image["id"]]
    for one in folder.objects:
        one["image_id"] = names[one["image_id"]]
    folder.write()
    folder.save()
    photos = list(DETECTION.examples(folder.convert(tmp_path / "out"), "val", COCO))
    assert [int(photo["image/id"]) for photo in photos] == [0, 1, 2]
    assert [photo["object/box"].shape[0] for photo in photos] == [1, 3, 0]
    folder.save(images=folder.content["images"][1:], annotations=folder.objects[3:])
    with pytest.raises(InputError, match="instances_val.json: image 'b' of the panoptic JSON is missing"):
        folder.convert(tmp_path / "less")


def old(record):
    """Returns the record as axial 0.2 would have written it."""
    fields = {k: v.numpy() for k, v in record.items() if k in tfrecord.SCHEMAS["panoptic"] and not k.startswith("box/")}
    lists = {k: tuple(v.tolist()) if k.startswith("segment/") else v for k, v in fields.items()}
    return tfrecord.parse_example(tfrecord.encode_example(lists))


def test_old_records_have_the_boxes_of_their_things(converted):
    from axial.tasks.detection.input_pipeline import record_objects

    record = old(next(iter(DETECTION.examples(converted, "val", COCO))))
    assert record["box/known"] == 0 and record["box/mask"].shape == (0,)
    objects = record_objects(record, COCO)
    np.testing.assert_array_equal(objects["box"], [[0, 0, 48, 64]])  # the sky is stuff
    np.testing.assert_array_equal(objects["area"], [48 * 64])
    masks, has_mask = (x.numpy() for x in record_masks(record, COCO))
    assert masks.shape == (1, 64, 96) and masks[0, :, :48].all() and masks.sum() == 48 * 64 and has_mask.all()


SQUARE = [[8.0, 4.0, 24.0, 4.0, 24.0, 20.0, 8.0, 20.0]]


def test_masks_stay_with_the_objects_that_have_one(folder, tmp_path, capsys):
    """Polygons that are too short are skipped and counted. pycocotools would read four numbers as a box."""
    box, short = [40, 30, 20, 10], [8, 4, 24, 20]
    cases = ([], None, [short], [short, [1, 2]], [[0, 0, 50, 50], *SQUARE])
    folder.objects += [folder.object(number, 1, DOG, box, case) for number, case in enumerate(cases, 5)]
    folder.save()
    data_dir = folder.convert(tmp_path / "out")
    path = str(folder.path)
    assert capsys.readouterr().err.splitlines() == [
        f"{path}: left out: polygons of fewer than 6 numbers (4, first annotation 7)",
        f"{path}: left out: objects without a mask, where masks are needed (4, first annotation 5)",
    ]
    first, *_ = DETECTION.examples(data_dir, "val", COCO)
    masks, has_mask = (x.numpy() for x in record_masks(first, COCO))
    assert has_mask.tolist() == 3 * [True] + 4 * [False] + [True]
    assert masks.sum((1, 2)).tolist() == [256, masks[1].sum(), 640, 0, 0, 0, 0, 256]
    data = DetectionData("val", "val", (64, 96), (64, 128), shuffle=0, flip=False, boxes=8)
    batch = next(iter(training_batches(data_dir, data)))
    assert (batch["masks"][0, 2:6] == -1).numpy().all() and batch["masks"][0, 1].numpy().max() == 1  # without crowd
    assert batch["classes"][0].numpy().tolist() == [1, *6 * [1 + COCO.class_index(DOG)], -1]
    check_records(data_dir, "val")


@pytest.mark.parametrize("shape,fill", [((12, 7), 0.5), ((5, 9), 1.0)])
def test_run_lengths_that_fill_their_mask_are_taken(shape, fill):
    """Run lengths are numbers or pycocotools' text. An extra pixel, a wrong character or empty text is refused."""
    pixels = (np.random.default_rng(0).random(shape) < fill).astype(np.uint8)
    text = coco_masks.encode(np.asfortranarray(pixels))["counts"].decode()
    edges = np.flatnonzero(np.diff(pixels.ravel("F"), prepend=0, append=2)) if pixels.size else []
    counts = np.diff([0, *edges]).tolist()
    larger = (shape[0] + 1, shape[1])
    for right in (text, counts):
        check_runs("a", schemas.AnyRunLengths(size=shape, counts=right), shape)
    wrong = [(larger, text), (larger, counts), (larger, "")]
    wrong += [(shape, odd) for odd in (text + "1", [*counts, 1], text + "P", text + "\x7f")]
    for size, odd in wrong:
        with pytest.raises(InputError, match="^a: counts: "):
            check_runs("a", schemas.AnyRunLengths(size=size, counts=odd), size)


def put(number, key, value):
    def damage(folder):
        folder.objects[number][key] = value
        folder.save()

    return damage


BAD = {
    "negative side": (put(1, "bbox", [40, 30, -2, 10]), r"annotation 2: bbox \(40, 30, -2, 10\): expected .x, y, w"),
    "outside": (put(1, "bbox", [90, 30, 20, 10]), "annotation 2: bbox .* inside its image of 96x64"),
    "category": (put(0, "category_id", 300), "annotation 1: category_id 300, which the spec 'coco' lacks"),
    "stuff": (put(0, "category_id", SKY), "annotation 1: category_id 187: 'sky-other-merged' is not a thing of 'coco'"),
    "no box": (put(0, "bbox", None), "annotation 1: bbox and area are needed"),
    "image": (put(0, "image_id", 9), "annotation 1: image_id 9 is not in images"),
    "an image less": (
        lambda folder: folder.save(images=folder.content["images"][:1], annotations=folder.objects[:3]),
        "image 2 of the panoptic JSON is missing",
    ),
    "polygon": (put(0, "segmentation", [["a"]]), "annotation 1: segmentation: not COCO's"),
    "runs": (put(2, "segmentation", {"size": [4, 4], "counts": [16]}), "annotation 3: segmentation: of 4x4 pixels"),
    "flat polygon": (put(0, "segmentation", SQUARE[0]), r"annotation 1: segmentation: .*lists of x, y"),
    "renamed": (
        lambda folder: folder.save(categories=[{"id": 1, "name": "weed"}, {"id": DOG, "name": "dog"}]),
        "category 1 is 'weed', the spec 'coco' calls it 'person'",
    ),
}


@pytest.mark.parametrize("damage,words", BAD.values(), ids=BAD)
def test_bad_boxes_are_one_line(damage, words, folder, tmp_path):
    damage(folder)
    with pytest.raises(InputError, match=words) as error:
        folder.convert(tmp_path / "data")
    assert "instances_val.json" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "data" / "val.json").exists()


@pytest.mark.parametrize(
    "size,expected",
    [((480, 640), (800, 1067)), ((640, 480), (1067, 800)), ((400, 1000), (533, 1333)), ((1, 1), (800, 800))],
)
def test_photos_have_the_protocols_sizes(size, expected):
    np.testing.assert_array_equal(photo_size(tf.constant(size), (800, 1333), (1344, 1344)), expected)


def test_a_canvas_is_made_of_strides():
    with pytest.raises(InputError, match="multiples of 64"):
        DetectionData("a", "b", canvas=(65, 64))
    with pytest.raises(InputError, match="shorter, longer"):
        DetectionData("a", "b", sides=(65, 64))


@pytest.fixture(scope="module")
def batch(converted):
    data = DetectionData("val", "val", (64, 96), (64, 128), shuffle=0, flip=False, boxes=4)
    return next(iter(training_batches(converted, data)))


def test_training_examples_have_padded_boxes(batch):
    """The valid region has the photo's size, 64x96, so boxes are not scaled."""
    assert batch["image"].shape == (3, 64, 128, 3) and not batch["image"][:, :, 96:].numpy().any()
    np.testing.assert_array_equal(batch["valid_size"], [[64, 96]] * 3)
    np.testing.assert_allclose(batch["boxes"][0], [[4, 8.25, 20, 23.75], [30, 40, 40, 60], [-1] * 4, [-1] * 4])
    np.testing.assert_array_equal(batch["classes"], [[1, 1 + COCO.class_index(DOG), -1, -1], [-1] * 4, [-1] * 4])
    assert (batch["boxes"][1:] == -1).numpy().all()  # the photos without an object and with an object of area 0
    inner = batch["masks"][0, 1, 12:-12, 12:-12].numpy()  # the mask's border is interpolated
    assert inner.min() == 1 and (batch["masks"][0, 2:] == -1).numpy().all()


def test_mirror_images_keep_boxes_on_their_objects(converted):
    data = DetectionData("val", "val", (64, 96), (64, 128), shuffle=0, boxes=4)
    batches = training_batches(converted, data, "faster_rcnn_resnet_nano").take(8)
    boxes = {tuple(batch["boxes"][0, 1].numpy()) for batch in batches}
    assert boxes == {(30, 40, 40, 60), tuple(mirrored(tf.constant([[30.0, 40, 40, 60]]), 96.0).numpy()[0])}
    assert (30, 36, 40, 56) in boxes


def test_choice_takes_a_share_and_fills_up():
    draw = tf.random.stateless_uniform([3, 40], [0, 0])
    positive = tf.constant([[i < n for i in range(40)] for n in (30, 2, 0)])
    chosen = choose(positive, ~positive, 8, draw, positive_fraction=0.25).numpy()
    assert chosen.sum(1).tolist() == [8, 8, 8]
    assert (chosen & positive.numpy()).sum(1).tolist() == [2, 2, 0]
    assert choose(positive, positive, 8, draw, positive_fraction=1.0).numpy().sum(1).tolist() == [8, 2, 0]


@pytest.mark.skipif(not (DATA / "coco").is_dir(), reason=f"no COCO in {DATA}")
def test_masks_are_pycocotools(tmp_path):
    coco = pytest.importorskip("pycocotools.coco").COCO(str(DATA / "coco/annotations/instances_val2017.json"))
    items, source = coco_items(str(DATA / "coco"), "val2017")
    conversion.convert((items[:6], source), COCO, tmp_path, "val2017")
    for example in DETECTION.examples(str(tmp_path), "val2017", COCO):
        expected = coco.imgToAnns[int(example["image/id"])]
        np.testing.assert_array_equal(example["object/box"], [one["bbox"] for one in expected])
        np.testing.assert_array_equal(record_masks(example, COCO)[0], [coco.annToMask(one) for one in expected])
