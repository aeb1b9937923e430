"""axial-predict reads photos, and writes segments and pictures."""

import csv
import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from axial.cli.predict import output_names
from axial.data.converters.coco import SAMPLE_DIR
from axial.data.converters.nuclei import SAMPLE_DIR as NUCLEI_DIR
from axial.data.labels import read_panoptic
from axial.data.objects import objects_of, read_objects
from tests.conftest import ROOT

PHOTO = os.path.join(SAMPLE_DIR, "val2017", "000000000285.jpg")


def photos_of_seven_kinds(folder):
    """Writes the photos. Returns a dict from the path of each photo to its (width, height) when it is upright."""
    turned = Image.Exif()
    turned[0x0112] = 6
    photos = {
        "grey.png": (Image.new("L", (40, 30), 99), b""),
        "alpha.png": (Image.new("RGBA", (40, 30), (9, 99, 200, 80)), b""),
        "deep.png": (Image.fromarray(np.full([30, 40], 40000, np.uint16)), b""),
        "dot.png": (Image.new("RGB", (1, 1), (200, 10, 10)), b""),
        "wide.png": (Image.new("RGB", (8000, 6000), (20, 140, 10)), b""),
        "turned.jpg": (Image.new("RGB", (40, 30)), turned),
        "damaged.png": (Image.new("RGB", (40, 30)), b"Exif\0\0garbagegarbage"),
    }
    for name, (photo, exif) in photos.items():
        photo.save(folder / name, exif=exif)
    return {folder / name: (30, 40) if exif is turned else photo.size for name, (photo, exif) in photos.items()}


@pytest.fixture(scope="module")
def predicted(command, exported, tmp_path_factory):
    """Predicts seven photos with one command. Returns (output folder, [(path, (width, height), JSON's content)])."""
    folder = tmp_path_factory.mktemp("predicted")
    sizes = photos_of_seven_kinds(folder)
    out = folder / "out"
    result = command("predict", f"--saved_model={exported}", f"--output_dir={out}", *sizes)
    assert result.code == 0 and not result.err, result.err
    return out, [(path, size, json.loads((out / f"{path.stem}.json").read_text())) for path, size in sizes.items()]


def test_predicted_pictures_have_the_photos_size(predicted):
    out, predictions = predicted
    for path, size, content in predictions:
        assert (content["width"], content["height"]) == size and content["photo"] == str(path)
        for key, name, mode in (("overlay", "overlay", "RGB"), ("", "panoptic", "RGB"), ("semantic", "semantic", "L")):
            file = content[f"{key}_file_name".lstrip("_")]
            picture = Image.open(out / file)
            assert (file, picture.size, picture.mode) == (f"{path.stem}.{name}.png", size, mode)


def test_predicted_segments_are_in_the_png_and_inside_the_photo(predicted):
    out, predictions = predicted
    assert any(content["segments"] for _, _, content in predictions)
    for _, size, content in predictions:
        ids = np.unique(read_panoptic(str(out / content["file_name"])))
        assert {0, *ids} == {0, *(segment["id"] for segment in content["segments"])}
        assert sum(segment["area"] for segment in content["segments"]) <= size[0] * size[1]
        for segment in content["segments"]:
            keys = {"id", "class", "category_id", "thing", "score", "area", "box", "segmentation"}
            assert set(segment) == keys | ({"label"} if segment["thing"] else set())
            x, y, width, height = segment["box"]
            assert x >= 0 and x + width <= size[0] and y >= 0 and y + height <= size[1]
            assert segment["area"] <= width * height and 0 <= segment["score"] <= 1


def test_predict_takes_folders_and_keeps_outputs_apart(command, exported, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (20, 10), (200, 10, 10)).save(tmp_path / folder / "a.png")
    Image.new("RGB", (20, 10)).save(tmp_path / "one" / "b.jpg")
    (tmp_path / "one" / "notes.txt").write_text("no photo")
    folders = (tmp_path / "one", tmp_path / "two" / "a.png")
    result = command("predict", f"--saved_model={exported}", f"--output_dir={tmp_path}/out", *folders)
    assert result.code == 0, result.err
    kinds = ("json", "overlay.png", "panoptic.png", "semantic.png")
    expected = [f"{name}.{kind}" for name in ("b", "one-a.png", "two-a.png") for kind in kinds]
    assert sorted(os.listdir(tmp_path / "out")) == expected
    (tmp_path / "empty").mkdir()
    result = command("predict", f"--saved_model={exported}", f"--output_dir={tmp_path}/out", tmp_path / "empty")
    assert result.code == 2 and "empty: no photo in this folder" in result.line


def test_label_images_of_photos(command, exported, sample_dir, tmp_path):
    out = tmp_path / "out"
    for label_image, suffix in {"png": "png", "tiff": "tif"}.items():
        call = f"--saved_model={exported}", f"--output_dir={out}", f"--label_image={label_image}"
        result = command("predict", *call, PHOTO)
        assert result.code == 0 and f"{out}/000000000285.labels.{suffix}, " in result.out, result.err
        content = json.loads((out / "000000000285.json").read_text())
        labels = np.asarray(Image.open(out / content["label_file_name"]))
        ids = read_panoptic(str(out / content["file_name"]))
        assert content["label_file_name"] == f"000000000285.labels.{suffix}" and labels.dtype == np.uint16
        expected = np.zeros(ids.shape, int)
        for segment in content["segments"]:
            expected[ids == segment["id"]] = segment.get("label", 0)
        np.testing.assert_array_equal(labels, expected)
    result = command("predict", f"--saved_model={exported}", f"--output_dir={out}", "--diameter=auto", PHOTO)
    assert result.code == 2 and "diameter=auto: the model does panoptic and does not tell the size" in result.line
    sizes = read_objects(exported / "assets.extra")
    assert sizes == objects_of(sample_dir, "train2017") and sizes.photos == 8
    assert f"- its objects are {sizes.diameter[1]:g} pixels wide at the median" in (exported / "README.md").read_text()
    result = command("predict", "--saved_model=x", "--label_image=png", "--text=a")
    assert result.code == 2 and "--text does not go with --label_image" in result.line


def test_a_table_and_outlines_of_nuclei(command, tmp_path):
    """A shipped model is called by its name. Table, label image, outlines and JSON have the same objects."""
    photo = sorted((ROOT / NUCLEI_DIR / "test" / "photos").iterdir())[0]
    call = f"--table={tmp_path}/new/cells.csv", "--pixel_size=0.5um", "--geojson", "--label_image=tiff"
    result = command("predict", "--model=nuclei", f"--output_dir={tmp_path}", *call, photo)
    assert result.code == 0 and not result.err, result.err
    content = json.loads((tmp_path / f"{photo.stem}.json").read_text())
    labels = np.asarray(Image.open(tmp_path / content["label_file_name"]))
    features = json.loads((tmp_path / content["geojson_file_name"]).read_text())["features"]
    rows = [*csv.DictReader((tmp_path / "new" / "cells.csv").open())]
    segments = [segment for segment in content["segments"] if segment["thing"]]
    assert len(rows) == len(features) == len(segments) > 3
    assert result.out.splitlines()[-1] == f"{tmp_path}/new/cells.csv: {len(rows)} objects"
    pixels = np.asarray(Image.open(photo).convert("L"))
    for row, feature, segment in zip(rows, features, segments):
        assert row["photo"] == str(photo) and int(row["label"]) == segment["label"] and row["class"] == "nucleus"
        assert [int(row[f"box_{key}"]) for key in ("x", "y", "width", "height")] == segment["box"]
        mask = labels == segment["label"]
        assert int(row["area"]) == mask.sum() == segment["area"] and float(row["area_um2"]) == mask.sum() / 4
        assert int(row["sum_1"]) == pixels[mask].sum()
        assert feature["properties"]["measurements"]["label"] == segment["label"]


def test_no_photo_of_the_call_is_overwritten(command, exported, tmp_path):
    """A folder may hold a.tif and its ground truth a.labels.tif, the name of an output. No photo is overwritten."""
    names = ("a.tif", "a.labels.tif", "b.png", "b.overlay.png", "c.png")
    for name in names:
        Image.new("RGB", (20, 10), (200, 10, 10)).save(tmp_path / name)
    before = {name: (tmp_path / name).read_bytes() for name in names}
    call = f"--saved_model={exported}", f"--output_dir={tmp_path}", "--label_image=tiff"
    result = command("predict", *call, tmp_path)
    assert result.code == 2 and "2 of 5 photos are broken" in result.line
    for name, other in (("a.tif", "a.labels.tif"), ("b.png", "b.overlay.png")):
        assert f"{name}: {tmp_path}/{other} is another photo, and is not overwritten; choose another" in result.err
    assert before == {name: (tmp_path / name).read_bytes() for name in names}
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["a.labels.json", "b.overlay.json", "c.json"]


@pytest.mark.parametrize(
    "photos,names",
    [
        (["x/a.jpg", "y/a.jpg"], ["x-a.jpg", "y-a.jpg"]),
        (["x/a.jpg", "x/a.png", "x/a.jpg.gif"], ["1-a.jpg", "a.png", "a.jpg"]),
        (["x/a/b.jpg", "x/a-b.jpg", "x/b.png", "y/a-b.jpg"], ["b.jpg", "x-a-b.jpg", "b.png", "y-a-b.jpg"]),
    ],
)
def test_no_two_outputs_share_a_name(photos, names):
    assert output_names(photos) == dict(zip(photos, names))


def test_weights_without_a_recipe_are_named_before_the_network_is_built(command, tmp_path):
    """axial-convert weights makes folders with weights and without a recipe."""
    shutil.copy(ROOT / "axial" / "shipped" / "nuclei" / "weights.safetensors", tmp_path)
    result = command("predict", f"--model={tmp_path}", f"--output_dir={tmp_path}/out", PHOTO)
    assert result.code == 2 and f"{tmp_path}: these weights have no recipe (config.gin) beside them" in result.line
    assert "axial-evaluate --gin_file=RECIPE" in result.line and os.listdir(tmp_path) == ["weights.safetensors"]


def test_broken_photos_do_not_stop_the_others(command, exported, tmp_path):
    photos, out = tmp_path / "photos", tmp_path / "out"
    shutil.copytree(os.path.join(SAMPLE_DIR, "val2017"), photos)
    broken, *rest, last = sorted(photos.iterdir())
    for path in (broken, last):
        path.write_bytes(path.read_bytes()[:2000])
    result = command("predict", f"--saved_model={exported}", f"--output_dir={out}", str(photos))
    assert result.code == 2 and result.line.endswith(
        f"2 of {len(rest) + 2} photos are broken; all are listed in {out}/broken.txt"
    )
    assert (out / "broken.txt").read_text().splitlines() == [
        line for line in result.err.splitlines() if "whole" in line
    ]
    assert sorted(path.stem for path in out.glob("*.json")) == [path.stem for path in rest]
