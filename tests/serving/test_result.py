"""The files of predictions, which the tests read back by Pillow, NumPy and pycocotools."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pycocotools import mask as masks

from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.serving.result import Result
from axial.tasks.classification.task import CLASSIFICATION
from axial.tasks.detection.evaluator import DETECTION, SHOWN
from axial.tasks.segmentation.evaluator import PANOPTIC
from axial.tasks.translation.task import TRANSLATION

SPEC = DatasetSpec("scene", ("sky", "cell", "road", "car"), (7, 300, 2, 40), (False, True, False, True))
CELLS = DatasetSpec("cells", ("background", "cell"), (1, 2), (False, True), label_divisor=1 << 20)
WRITTEN = {
    "file_name": ".panoptic.png",
    "semantic_file_name": ".semantic.png",
    "label_file_name": ".labels.png",
    "overlay_file_name": ".overlay.png",
}


def segmentation(classes, instances):
    """Returns a panoptic prediction from two int maps [h, w]: classes (-1 for void), instance numbers (from 1)."""
    things = np.asarray(SPEC.things)[classes] & (classes >= 0)
    instance = np.where(things, instances, 0)
    panoptic = np.where(classes < 0, SPEC.void, classes * SPEC.label_divisor + instance)
    score = np.linspace(0.25, 1, instances.max())
    return {"panoptic": panoptic, "semantic": np.maximum(classes, 0), "instance": instance, "score": score}


def result_of(prediction, evaluator=PANOPTIC, spec=SPEC, size=None):
    """Returns the `Result` of a prediction for a grey photo."""
    photo = np.full([*(size or prediction["panoptic"].shape), 3], 90, np.uint8)
    return Result(photo, prediction, evaluator=evaluator, spec=spec, photo="folder/photo.jpg")


@st.composite
def segmentations(draw):
    """Panoptic predictions of 1x1 to 12x12 pixels, with void and with up to eight instances."""
    height, width = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rough = rng.integers(-1, SPEC.num_classes, [3, 3])  # 3x3 blocks, so that segments are large
    classes = rough[np.arange(height)[:, None] * 3 // height, np.arange(width) * 3 // width]
    return segmentation(classes, rng.integers(1, draw(st.integers(2, 9)), [height, width]))


def read(folder, content, key):
    return np.asarray(Image.open(folder / content[key]))


@pytest.mark.parametrize("dropped", [0, 276])
def test_objects_that_are_left_out_are_told(tmp_path, dropped):
    """The JSON has the number of dropped objects, with a warning if it is not 0."""
    prediction = segmentation(np.zeros([2, 3], int), np.ones([2, 3], int))
    result = result_of({**prediction, "dropped": np.int32(dropped)})
    result.write(tmp_path / "photo")
    content = json.loads((tmp_path / "photo.json").read_text())
    assert content["dropped_objects"] == dropped and content.get("warnings", []) == result.warnings
    assert ["PostprocessConfig.top_k = None" in line for line in result.warnings] == [True] * bool(dropped)


@given(segmentations(), st.sampled_from(["png", "tiff"]))
@settings(max_examples=40, deadline=None)
def test_segments_are_the_same_in_every_file(tmp_path_factory, prediction, label_image):
    """Panoptic PNG, semantic PNG, label image, overlay and JSON agree on ids, classes, masks, boxes and scores."""
    folder, result = tmp_path_factory.mktemp("out"), result_of(prediction)
    if result.labels is None:  # the prediction has no instances
        label_image = None
    paths = result.write(folder / "photo", label_image)
    content = json.loads((folder / "photo.json").read_text())
    names = {key: content.pop(key) for key in WRITTEN if key in content}
    assert content == json.loads(json.dumps(result.json())) and content["photo"] == "folder/photo.jpg"
    endings = {**WRITTEN, "label_file_name": {"png": ".labels.png", "tiff": ".labels.tif"}.get(label_image)}
    assert names == {key: f"photo{ending}" for key, ending in endings.items() if ending}
    assert paths == [str(folder / name) for name in [*names.values(), "photo.json"]]
    assert sorted(os.listdir(folder)) == sorted([*names.values(), "photo.json"])
    color = read(folder, names, "file_name").astype(int)
    ids = color[..., 0] + 256 * color[..., 1] + 256**2 * color[..., 2]  # panopticapi's rgb2id
    np.testing.assert_array_equal(ids, result.panoptic)
    np.testing.assert_array_equal(ids == 0, prediction["panoptic"] == SPEC.void)
    np.testing.assert_array_equal(
        read(folder, names, "semantic_file_name"), np.array(SPEC.category_ids)[prediction["semantic"]]
    )
    np.testing.assert_array_equal(read(folder, names, "overlay_file_name"), result.overlay())
    labels = read(folder, names, "label_file_name") if label_image else None
    assert labels is None or (labels.dtype == np.uint16 and not labels[ids == 0].any())
    assert content["segments"] == result.segments
    check_segments(content["segments"], ids, labels, prediction)


def check_segments(segments, ids, labels, prediction):
    """Checks the JSON's segments against the prediction, `ids` and `labels`, both int [h, w]. `labels` may be None."""
    numbers = [segment["id"] for segment in segments]
    assert len(set(numbers)) == len(numbers) and {*numbers, 0} == {*np.unique(ids), 0}
    for segment in segments:
        mask = ids == segment["id"]
        np.testing.assert_array_equal(masks.decode(segment["segmentation"]), mask)
        (owner,) = np.unique(prediction["panoptic"][mask])
        index, instance = divmod(owner, SPEC.label_divisor)
        assert (segment["class"], segment["category_id"]) == (SPEC.class_names[index], SPEC.category_ids[index])
        assert segment["thing"] == SPEC.things[index] and segment["area"] == mask.sum()
        (top, bottom), (left, right) = ((x.min(), x.max() + 1) for x in np.nonzero(mask))
        assert segment["box"] == [left, top, right - left, bottom - top]
        score = prediction["score"][instance - 1] if segment["thing"] else 1.0
        assert segment["score"] == pytest.approx(score, abs=1e-4)
        assert ("label" in segment) == segment["thing"]
        assert labels is None or (labels[mask] == segment.get("label", 0)).all()
    numbers = [segment["label"] for segment in segments if "label" in segment]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_network_without_instances_has_no_label_image(tmp_path):
    """If the things of a prediction have no instance numbers, a label image is refused, and nothing is written."""
    classes = np.repeat([[1, 1, 2, 3]], 4, 0)
    merged = segmentation(classes, np.zeros([4, 4], int))
    result = result_of({**merged, "score": np.zeros(3)})
    assert result.labels is None and not any("label" in segment for segment in result.segments)
    with pytest.raises(InputError, match="label_image=png: the network finds no pixels of instances"):
        result.write(tmp_path / "photo", "png")
    with pytest.raises(InputError, match="label_image='gif': expected png or tiff"):
        result.write(tmp_path / "photo", "gif")
    assert not os.listdir(tmp_path)


def instances_of_a_pixel(count):
    """Returns a prediction for `CELLS` with `count` instances of one pixel each, followed by background pixels."""
    ids = np.arange(1, 300 * (count // 300 + 1) + 1).reshape(-1, 300)
    instance = np.where(ids <= count, ids, 0)
    panoptic = np.where(instance > 0, CELLS.label_divisor, 0) + instance
    return {"panoptic": panoptic, "semantic": (instance > 0) * 1, "instance": instance, "score": np.ones(count)}


def test_instances_of_joined_tiles_that_need_more_than_two_bytes(tmp_path):
    """A panoptic PNG can hold 65536 instances, because its ids count segments. A 16-bit label image is refused."""
    result = result_of(instances_of_a_pixel(1 << 16), spec=CELLS)
    with pytest.raises(InputError, match="^65536 instances in one photo"):
        result.write(tmp_path / "photo", "tiff")
    assert not os.listdir(tmp_path)
    result.write(tmp_path / "photo")
    color = read(tmp_path, {"file_name": "photo.panoptic.png"}, "file_name").astype(int)
    np.testing.assert_array_equal(color @ [1, 256, 256**2], result.panoptic)
    assert color[..., 2].max() == 1


def test_categories_beyond_16_bits_have_no_map(tmp_path):
    """A category id of 70000 is in the JSON, but no semantic PNG is written."""
    spec = DatasetSpec("large", ("cell",), (70000,), (True,))
    one = np.ones([2, 2], int)
    prediction = {"panoptic": one, "semantic": 0 * one, "instance": one, "score": np.ones(1)}
    result_of(prediction, spec=spec).write(tmp_path / "photo")
    assert sorted(os.listdir(tmp_path)) == ["photo.json", "photo.overlay.png", "photo.panoptic.png"]
    assert json.loads((tmp_path / "photo.json").read_text())["segments"][0]["category_id"] == 70000


@pytest.mark.parametrize("killed_at", range(5))
def test_a_killed_process_leaves_whole_files_and_no_json(tmp_path, monkeypatch, killed_at):
    """The process ends before it renames file number `killed_at`. The next write completes the files."""
    result, replace, left = result_of(instances_of_a_pixel(20), spec=CELLS), os.replace, [killed_at]

    def give_name(temporary, path):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        replace(temporary, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", give_name)
        with pytest.raises(KeyboardInterrupt):
            result.write(tmp_path / "photo", "png")
    there = {name for name in os.listdir(tmp_path) if not name.startswith(".partial.")}
    assert len(there) == killed_at and "photo.json" not in there
    for name in there:
        Image.open(tmp_path / name).load()
    result.write(tmp_path / "photo", "png")
    assert sorted(os.listdir(tmp_path)) == sorted([*(f"photo{ending}" for ending in WRITTEN.values()), "photo.json"])


def detections(scores, mask=None):
    """Returns a detection of two 8x8 cars at (0, 0) and (4, 4), in a photo of 12x16 pixels."""
    prediction = {
        "box": np.array([[0, 0, 8, 8], [4, 4, 8, 8]], np.float32),
        "class": np.array([3, 3]),
        "score": np.array(scores, np.float32),
        "count": np.array(2),
    }
    return {**prediction, **({} if mask is None else {"mask": np.full([2, 4, 4], mask, np.float32)})}


def test_objects_have_the_keys_of_segments(tmp_path):
    """For two overlapping cars, the JSON has both boxes and masks. In the label image, the better score is on top."""
    result = result_of(detections([0.9, 0.7], mask=1), DETECTION, size=(12, 16))
    result.write(tmp_path / "photo", "png")
    content = json.loads((tmp_path / "photo.json").read_text())
    assert content["objects"] == result.segments and result.panoptic is None
    assert sorted(os.listdir(tmp_path)) == ["photo.json", "photo.labels.png", "photo.overlay.png"]
    segment = result_of(segmentation(np.full([2, 2], 3), np.ones([2, 2], int))).segments[0]
    for number, one in enumerate(content["objects"], 1):
        assert set(one) == set(segment) | {"mask"} and one["mask"] == one["segmentation"]
        mask = np.zeros([12, 16], np.uint8)
        x, y, width, height = map(int, one["box"])
        mask[y : y + height, x : x + width] = 1
        np.testing.assert_array_equal(masks.decode(one["segmentation"]), mask)
        assert (one["id"], one["label"], one["area"]) == (number, number, 64)
        assert (one["class"], one["category_id"]) == ("car", 40)
    expected = np.zeros([12, 16], np.uint16)
    expected[4:12, 4:12] = 2
    expected[:8, :8] = 1  # the car with the better score
    labels = read(tmp_path, content, "label_file_name")
    assert labels.dtype == np.uint16
    np.testing.assert_array_equal(labels, expected)


def test_only_objects_that_are_drawn_have_labels():
    result = result_of(detections([0.9, SHOWN - 0.1], mask=1), DETECTION, size=(12, 16))
    assert [one.get("label") for one in result.segments] == [1, None] and set(np.unique(result.labels)) == {0, 1}
    boxes = result_of(detections([0.9, 0.8]), DETECTION, size=(12, 16))
    assert boxes.labels is None
    assert [(one["area"], "mask" in one, "segmentation" in one) for one in boxes.segments] == [(64, False, False)] * 2


def test_pictures_of_every_kind_are_saved(tmp_path):
    """A translation, a classification and a segmentation as PNG, JPEG and TIFF have the overlay's size and pixels."""
    text = Result("Two dogs run.", {"translation": "Zwei Hunde.", "score": -1.0}, evaluator=TRANSLATION, spec=None)
    probability = np.array([0.1, 0.2, 0.7, 0], np.float32)
    label = result_of({"probability": probability}, CLASSIFICATION, size=(30, 40))
    cells = result_of(instances_of_a_pixel(9), spec=CELLS)
    for number, result in enumerate((text, label, cells)):
        picture = result.overlay()
        for suffix, format in {"png": "PNG", "JPG": "JPEG", "tiff": "TIFF"}.items():
            result.save(tmp_path / f"{number}.{suffix}")
            image = Image.open(tmp_path / f"{number}.{suffix}")
            assert image.format == format and image.size == picture.shape[1::-1]
            assert format == "JPEG" or (np.asarray(image) == picture).all()
    assert (text.segments, label.segments, text.panoptic, label.panoptic) == (None, None, None, None)
    label.write(tmp_path / "label")
    assert json.loads((tmp_path / "label.json").read_text())["best"][0]["class"] == "road"
    assert text.json()["translation"] == "Zwei Hunde." and not (tmp_path / "label.overlay.png").exists()


def test_pictures_that_are_not_saved(tmp_path):
    """A picture with sides too long for JPEG, and names without an image suffix, are refused."""
    long = result_of({"probability": np.ones(4) / 4}, CLASSIFICATION, size=(65600, 1))
    for name, words in (
        ("out.jpg", r"JPEG holds at most 65500 pixels along a side; save it as PNG"),
        ("out.gif", r"a picture's name ends in \.png, \.jpg, \.jpeg, \.tif, \.tiff$"),
        (".png", "a picture's name ends in"),
    ):
        with pytest.raises(InputError, match=f"{name}: {words}"):
            long.save(tmp_path / name)
    assert not os.listdir(tmp_path)
