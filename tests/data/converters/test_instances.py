"""Outlines of COCO, LabelMe and YOLO as labels, equal to the label images of the same objects."""

import base64
import io
import json
import pathlib
import shutil

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as masks

from axial.data import tfrecord
from axial.data.converters.folder import folder_items
from axial.data.converters.instances import instances_items, instances_spec
from axial.data.converters.nuclei import SAMPLE_DIR
from axial.data.specs import NUCLEI, difference
from axial.errors import InputError
from tests.data.conversion import convert, records

SIZE = 20, 30  # height and width of the photos made here
SPLIT = pathlib.Path(SAMPLE_DIR) / "test"


def encoded(mask):
    """pycocotools' run lengths of a mask, bool [h, w], as JSON holds them."""
    runs = masks.encode(np.asfortranarray(mask, np.uint8))
    return {"size": runs["size"], "counts": runs["counts"].decode()}


def counted(mask):
    """Uncompressed run lengths of a mask: the lengths of runs of 0 and 1, by columns."""
    edges = np.flatnonzero(np.diff(mask.ravel("F").astype(int), prepend=0))
    return {"size": list(mask.shape), "counts": np.diff([0, *edges, mask.size]).tolist()}


class Coco:
    """COCO's layout with one photo, in which objects can be drawn."""

    def __init__(self, root, path="annotations/instances_train.json", photos="train"):
        self.root, self.path = root, root / path
        for folder in (self.path.parent, root / photos):
            folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", SIZE[::-1]).save(root / photos / "a.png")
        self.content = {
            "images": [{"id": 5, "file_name": "a.png", "height": SIZE[0], "width": SIZE[1]}],
            "categories": [{"id": 0, "name": "cell"}, {"id": 7, "name": "Dead Cell"}],
            "annotations": [],
        }

    def draw(self, segmentation, category=0, **fields):
        fields = {"id": len(self.content["annotations"]), "image_id": 5, "iscrowd": 0, **fields}
        fields |= {"category_id": category, "segmentation": segmentation}  # bbox and area are not read
        self.content["annotations"].append(fields)

    def record(self, rest="ground"):
        """(segment ids [h, w], dict from ids to (class index, crowd), spec) after the conversion."""
        self.path.write_text(json.dumps(self.content))
        return read(self.root, rest)


def read(root, rest="ground", split="train"):
    spec = instances_spec(str(root), [split], rest)
    convert(instances_items(str(root), split, spec, rest), spec, root / "out", split)
    (record,) = records(root / "out", split)
    rows = (record[f"segment/{name}"].numpy().tolist() for name in ("id", "class", "crowd"))
    ids = tfrecord.segment_ids(record["panoptic/encoded"]).numpy()
    return ids, {i: (c, crowd) for i, c, crowd in zip(*rows)}, spec


def box(left, top, right, bottom):
    return [[left, top, right, top, right, bottom, left, bottom]]


def sample(count=3):
    """(path of a photo, its instance image, int [h, w]) of sample photos of nuclei, and the names of the photos."""
    photos = sorted((SPLIT / "photos").iterdir())[:count]
    return [(path, np.array(Image.open(SPLIT / "instance" / f"{path.stem}.png")).astype(int)) for path in photos]


def write_coco(root):
    """The sample in COCO's layout. Masks are compressed or uncompressed in turn."""
    coco, content = Coco(root, "annotations/instances_test.json", "test"), {"images": [], "annotations": []}
    coco.content["categories"] = [{"id": 3, "name": "nucleus"}]
    for number, (path, ids) in enumerate(sample()):
        shutil.copy(path, root / "test")
        height, width = ids.shape
        content["images"].append({"id": number, "file_name": path.name, "height": height, "width": width})
        for i in range(1, ids.max() + 1):
            row = {"id": len(content["annotations"]), "image_id": number, "category_id": 3, "bbox": [0, 0, 1, 1]}
            content["annotations"].append({**row, "area": 1, "segmentation": (encoded, counted)[i % 2](ids == i)})
    coco.path.write_text(json.dumps(coco.content | content))


def write_labelme(root):
    """The sample as files of LabelMe, whose masks are PNGs."""
    (root / "test").mkdir(parents=True)
    for path, ids in sample():
        shutil.copy(path, root / "test")
        shapes = []
        for i in range(1, ids.max() + 1):
            rows, columns = np.nonzero(ids == i)
            top, left, bottom, right = (int(x) for x in (rows.min(), columns.min(), rows.max(), columns.max()))
            png = io.BytesIO()
            Image.fromarray(ids[top : bottom + 1, left : right + 1] == i).save(png, "PNG")
            shape = {"label": "nucleus", "points": [[left, top], [right, bottom]], "shape_type": "mask"}
            shapes.append({**shape, "group_id": None, "mask": base64.b64encode(png.getvalue()).decode()})
        content = {"shapes": shapes, "imageHeight": ids.shape[0], "imageWidth": ids.shape[1], "imageData": None}
        (root / "test" / f"{path.stem}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("write", [write_coco, write_labelme])
def test_outlines_give_the_records_of_label_images(tmp_path, write):
    write(tmp_path / "in")
    spec = instances_spec(str(tmp_path / "in"), ["test"], "background")
    convert(instances_items(str(tmp_path / "in"), "test", spec, "background"), spec, tmp_path / "one", "test")
    convert(folder_items(SAMPLE_DIR, "test", NUCLEI), NUCLEI, tmp_path / "two", "test")
    ids = {}
    for name in ("one", "two"):
        for record in records(tmp_path / name, "test"):
            segments = tfrecord.segment_ids(record["panoptic/encoded"]).numpy()
            ids.setdefault(record["image/file_name"].numpy(), []).append(segments)
    pairs = [pair for pair in ids.values() if len(pair) == 2]
    assert len(pairs) == 3 and difference(spec, NUCLEI) == ""
    for one, two in pairs:
        np.testing.assert_array_equal(one, two)


def test_polygons_along_pixel_edges_are_exact_and_cut_at_the_photo(tmp_path):
    coco = Coco(tmp_path)
    coco.draw([*box(2, 3, 6, 5), *box(10, 3, 12, 4)])  # two pieces
    coco.draw(box(-4, 15, 3, 40), category=7)  # beyond the photo
    ids, segments, spec = coco.record()
    expected = np.full(SIZE, spec.label_divisor)
    expected[3:5, 2:6] = expected[3:4, 10:12] = 2 * spec.label_divisor + 1
    expected[15:, :3] = 3 * spec.label_divisor + 2
    np.testing.assert_array_equal(ids, expected)
    assert spec.class_names == ("ground", "cell", "Dead Cell") and spec.category_ids == (8, 0, 7)
    assert sorted(segments.values()) == [(0, 0), (1, 0), (2, 0)]


def test_the_smaller_object_lies_on_top_and_losses_are_counted(tmp_path, capsys):
    coco = Coco(tmp_path)
    coco.draw(box(4, 4, 6, 6))
    coco.draw(box(0, 0, 10, 10), category=7)
    coco.draw(box(12, 0, 14, 2))
    coco.draw(box(12, 0, 14, 2), category=7)  # as large: the later one stays
    coco.draw(box(40, 0, 50, 9))
    coco.draw([[1, 1, 2, 2]])
    ids, segments, spec = coco.record()
    assert ids[5, 5] % spec.label_divisor == 1 and ids[0, 0] % spec.label_divisor == 2
    assert (ids[:2, 12:14] % spec.label_divisor == 4).all() and len(segments) == 4
    error = capsys.readouterr().err
    assert "under smaller objects: pixels (8), objects that lose pixels (2), objects that lose all pixels (1)" in error
    assert "objects without a pixel (2)" in error


def test_a_hole_stays_a_hole_and_a_crowd_has_no_number(tmp_path):
    ring = np.zeros(SIZE, bool)
    ring[4:12, 4:12] = True
    ring[6:9, 6:9] = False
    coco = Coco(tmp_path)
    coco.draw(counted(ring), iscrowd=1)
    ids, segments, spec = coco.record("none")
    np.testing.assert_array_equal(ids, np.where(ring, spec.label_divisor, 0))
    assert segments == {spec.label_divisor: (0, 1)} and spec.things == (True, True)


def test_the_export_of_roboflow(tmp_path):
    """Roboflow's first category groups the others; it is no class."""
    coco = Coco(tmp_path, "train/_annotations.coco.json")
    coco.draw(box(0, 0, 4, 4), category=1)
    groups = [{"id": 0, "name": "cells", "supercategory": "none"}, {"id": 1, "name": "c", "supercategory": "cells"}]
    coco.content["categories"] = groups
    assert coco.record()[2].class_names == ("ground", "c")


@pytest.mark.parametrize("images,labels", [("images/train", "labels/train"), ("train/images", "train/labels")])
def test_yolo(tmp_path, images, labels):
    for folder in (images, labels):
        (tmp_path / folder).mkdir(parents=True)
    Image.new("RGB", SIZE[::-1]).save(tmp_path / images / "a.png")
    corners = np.reshape(box(3, 2, 9, 12), [-1, 2]) / SIZE[::-1]
    (tmp_path / labels / "a.txt").write_text(f"1 {' '.join(map(str, corners.ravel()))}\n\n")
    (tmp_path / "data.yaml").write_text("train: ../elsewhere\nnc: 2\nnames: [a, b]\n")
    ids, segments, spec = read(tmp_path)
    expected = np.zeros(SIZE, bool)
    expected[2:12, 3:9] = True
    np.testing.assert_array_equal(ids == 3 * spec.label_divisor + 1, expected)
    assert spec.class_names == ("ground", "a", "b") and len(segments) == 2


def test_shapes_of_labelme(tmp_path):
    """Shapes of a group are one object; a point is no object; labels of all splits are classes."""
    shapes = [
        {"label": "b", "points": [[0, 0], [4, 3]], "shape_type": "rectangle", "group_id": 1},
        {"label": "b", "points": [[6, 0], [8, 0], [8, 3], [6, 3]], "shape_type": "polygon", "group_id": 1},
        {"label": "c", "points": [[20, 10], [20, 15]], "shape_type": "circle", "group_id": None},
        {"label": "b", "points": [[1, 1]], "shape_type": "point"},
    ]
    for split, content in (("train", shapes), ("val", [{"label": "a", "points": [[0, 0]], "shape_type": "point"}])):
        (tmp_path / split).mkdir()
        Image.new("RGB", SIZE[::-1]).save(tmp_path / split / "x.png")
        sides = {"imageHeight": SIZE[0], "imageWidth": SIZE[1]}
        (tmp_path / split / "x.json").write_text(json.dumps({"shapes": content, **sides}))
    ids, segments, spec = read(tmp_path)
    assert spec.class_names == ("ground", "a", "b", "c")
    assert (ids == 3 * spec.label_divisor + 1).sum() == 12 + 6
    assert abs((ids == 4 * spec.label_divisor + 2).sum() - np.pi * 25) < 4 and len(segments) == 3


def boxed(coco):
    coco.draw([])


def twice(coco):
    coco.content["annotations"] *= 2


def resized(coco):
    coco.draw(counted(np.zeros([SIZE[0], 5], bool)))


def unknown(coco):
    coco.draw(box(0, 0, 4, 4), category=9)


def endless(coco):
    coco.draw(box(0, 0, 1e9, 4))


def homeless(coco):
    (coco.root / "train" / "a.png").unlink()


def alike(coco):
    coco.content["categories"] = [{"id": 0, "name": "dead-cell"}, {"id": 7, "name": "Dead Cell"}]


def endless_name(coco):
    coco.content["categories"][0]["name"] = "c" * 1001


def same_photo(coco):
    coco.content["images"].append({**coco.content["images"][0], "id": 6})


def other_split(coco):
    coco.path = coco.path.with_name("instances_default.json")


def nameless(coco):
    del coco.content["categories"][0]["name"]


BAD = [
    (alike, "ground", "categories, without case and hyphens: 'dead cell' is there twice"),
    (same_photo, "ground", "images: file_name 'a.png' is there twice"),
    (other_split, "ground", "instances_train.json: no such file; here: instances_default.json"),
    (nameless, "ground", "categories: one has no name"),
    (endless_name, "ground", "class_names.*: expected str of length <= 1000"),
    (boxed, "ground", "annotation 1: a box without a mask; a detector learns boxes, by recipes such as coco/faster"),
    (twice, "ground", "annotations: id 0 is there twice"),
    (resized, "ground", "annotation 1: segmentation: of 5x20 pixels, the photo has 30x20"),
    (unknown, "ground", "annotation 1: category 9, which the annotations' list of classes does not have"),
    (endless, "ground", "annotation 1: segmentation: expected pairs x, y of at most 131072"),
    (homeless, "ground", "a.png: missing, though .*instances_train.json names it"),
    (lambda coco: None, "dead_cell", "--rest=dead_cell: the annotations have a category 'Dead Cell'"),
]


@pytest.mark.parametrize("damage,rest,words", BAD, ids=[words for *_, words in BAD])
def test_wrong_annotations_are_named(tmp_path, damage, rest, words):
    coco = Coco(tmp_path)
    coco.draw(box(0, 0, 4, 4))
    damage(coco)
    with pytest.raises(InputError, match=words):
        coco.record(rest)


@pytest.mark.parametrize(
    "line", ["1 0.5 0.5 0.2", "1 0.5 0.5 0.2 0.2", "x 0 0 1 0 1 1", "0 0 0 1 nan 1 1", "0 0 0 9 0 9 9"]
)
def test_a_wrong_line_of_yolo_is_named(tmp_path, line):
    for folder in ("images/train", "labels/train"):
        (tmp_path / folder).mkdir(parents=True)
    Image.new("RGB", SIZE[::-1]).save(tmp_path / "images/train/a.png")
    (tmp_path / "labels/train/a.txt").write_text(f"0 0 0 1 0 1 1\n{line}\n")
    (tmp_path / "data.yaml").write_text("names: {0: a}")
    with pytest.raises(InputError, match="labels/train/a.txt: line 2: (a box without|expected a class)"):
        read(tmp_path)


@pytest.mark.parametrize("labels,width", [(None, 10), ("stored", 15)])
def test_outlines_of_yolo_are_fractions_of_the_upright_or_the_stored_photo(tmp_path, labels, width):
    for folder in ("images/train", "labels/train"):
        (tmp_path / folder).mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn: 20x30 upright
    Image.new("RGB", (30, 20)).save(tmp_path / "images/train/a.jpg", exif=exif)
    (tmp_path / "labels/train/a.txt").write_text("0 0 0 0.5 0 0.5 0.5 0 0.5")
    (tmp_path / "data.yaml").write_text("names: [a]")
    spec = instances_spec(str(tmp_path), ["train"], "none")
    (item,) = instances_items(str(tmp_path), "train", spec, "none", labels)[0]
    ids = np.asarray(Image.open(io.BytesIO(item["labels"]().png)))
    assert ids.any((0, 2)).sum() == width


@pytest.mark.parametrize("shape", ["circle", "rotation", "polygon"])
def test_a_shape_of_labelme_without_corners_is_named(tmp_path, shape):
    (tmp_path / "train").mkdir()
    Image.new("RGB", SIZE[::-1]).save(tmp_path / "train" / "x.png")
    content = {"shapes": [{"label": "a", "points": [[1, 1]], "shape_type": shape}], "imageHeight": 20, "imageWidth": 30}
    (tmp_path / "train" / "x.JSON").write_text(json.dumps(content))
    (tmp_path / "train.json").write_text("{}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.json").write_text("{}")
    with pytest.raises(InputError, match=rf"x.JSON: shapes\[0\]: shape_type '{shape}', 1 points: expected a polygon"):
        read(tmp_path)


def test_a_category_may_be_called_none(tmp_path):
    coco = Coco(tmp_path)
    coco.content["categories"][1]["name"] = "none"
    coco.draw(box(0, 0, 4, 4), category=7)
    assert coco.record("None")[2].class_names == ("cell", "none")


def test_a_folder_without_annotations_says_what_is_expected(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(
        InputError, match="no JSON of LabelMe; .* has none of annotations/instances_train.json, train/_an"
    ):
        read(tmp_path)
