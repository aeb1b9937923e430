"""Photos of other magnifications are predicted at the training's magnification, and results have the photo's size."""

import numpy as np
import pytest
from scipy import ndimage

from axial.data.objects import Objects
from axial.data.specs import NUCLEI
from axial.errors import InputError
from axial.serving.result import Result
from axial.serving.zoom import Zoomed
from axial.tasks.segmentation.evaluator import PANOPTIC


class Discs:
    """Segments bright objects like a network that is trained on discs of 20 pixels and cuts large discs in pieces."""

    spec, evaluator, scale, objects = NUCLEI, PANOPTIC, 1.5, Objects(3, 30, (10, 20, 40), (0, 5, 20))

    def __call__(self, image):
        bright = image[..., 0] > 100
        labels, count = ndimage.label(bright)
        areas = np.bincount(labels.ravel())
        rows, columns = (x // 20 for x in np.indices(bright.shape))
        pieces = count + 1 + rows * (columns.max() + 1) + columns
        cut = np.where(areas[labels] > np.pi / 4 * 60**2, pieces, labels)
        areas = np.bincount(cut.ravel())
        instance = np.where(bright & (areas[cut] >= 4), cut, 0)
        instance = np.unique(instance, return_inverse=True)[1].reshape(bright.shape)
        panoptic = np.where(instance > 0, NUCLEI.label_divisor + instance, 0)
        return {
            "panoptic": panoptic.astype(np.int32),
            "semantic": (instance > 0).astype(np.int32),
            "instance": instance.astype(np.int32),
            "score": np.ones(instance.max()),
            "dropped": np.int32(0),
        }


def photo_of(diameter, background=0):
    """Returns (photo of 4x5 discs, uint8 [h, w, 3]; number of each pixel's disc, int [h, w], 0 for background)."""
    step = 2 * diameter
    rows, columns = (x[: 4 * step, : 5 * step] for x in np.indices([4 * step, 5 * step]))
    inside = np.hypot(rows % step - diameter + 0.5, columns % step - diameter + 0.5) <= diameter / 2
    truth = np.where(inside, rows // step * 5 + columns // step + 1, 0)
    return np.repeat(np.where(truth, 220, background).astype(np.uint8)[..., None], 3, 2), truth


def disc_ious(result, truth):
    """Returns the list of each true disc's IoU with the segment at the disc's centre. Asserts that segments differ."""
    centers = ndimage.center_of_mass(truth > 0, truth, range(1, truth.max() + 1))
    ids = [int(result.panoptic[int(y), int(x)]) for y, x in centers]
    assert len(set(ids)) == truth.max()
    masks = [(result.panoptic == i, truth == n) for n, i in enumerate(ids, 1)]
    return [(a & b).sum() / (a | b).sum() for a, b in masks]


@pytest.mark.parametrize("diameter", [6, 40, 150])
def test_objects_are_found_at_every_magnification(diameter):
    """All 20 discs of 6, 40 and 150 pixels are found, with a given and with an automatic diameter.

    Zoom, IoUs, areas and boxes fit the discs. Areas and boxes are in pixels of the photo.
    """
    photo, truth = photo_of(diameter)
    for given in ("auto", diameter, str(diameter)):
        result = Result.of(Zoomed(Discs(), given), photo)
        things = [segment for segment in result.segments if segment["thing"]]
        assert len(things) == 20 and result.panoptic.shape == truth.shape and not result.warnings
        assert min(disc_ious(result, truth)) > (0.6 if diameter < 10 else 0.85)
        expected = min(20 / diameter, 2) if given == "auto" else 20 / diameter
        assert expected / 1.25 < result.json()["zoom"] < expected * 1.25
        assert all(0.7 < segment["area"] / (np.pi / 4 * diameter**2) < 1.4 for segment in things)
        assert all(abs(segment["box"][2] - diameter) <= max(2, diameter / 10) for segment in things)


def test_what_is_far_from_the_training_is_noted():
    """Much smaller discs, much larger discs, a bright background and an empty photo each give a warning."""

    def warnings(diameter, background=0, given=None):
        predictor = Discs() if given is None else Zoomed(Discs(), given)
        return Result.of(predictor, photo_of(diameter, background)[0]).warnings

    assert warnings(20) == warnings(40) == []
    for diameter in (6, 56):
        text = f"its objects are {diameter} pixels wide at the median, the training's 20 (10 to 40)"
        assert warnings(diameter) == [f"{text}: try --diameter=auto"]
    assert warnings(20, background=99) == [
        "its median grey level is 99, the median of the training's photos 5 (0 to 20): try --diameter=auto"
    ]
    assert "at the zoom 0.25, the training's 20" in warnings(20, given=80)[0]
    empty = Result.of(Discs(), np.zeros([50, 60, 3], np.uint8))
    assert empty.json()["warnings"] == empty.warnings == ["no object is found: try --diameter=auto"]
    old = Discs()
    old.objects = None
    assert Result.of(old, np.zeros([50, 60, 3], np.uint8)).warnings == []


@pytest.mark.parametrize("diameter", [0, -3, "x", "", "nan", float("inf"), None, True, [1, 2], "20px", "Auto"])
def test_values_that_are_no_diameter(diameter):
    with pytest.raises(InputError, match=r"^diameter=.*: expected the diameter of the photos' objects in pixels"):
        Zoomed(Discs(), diameter)


def test_photos_and_models_that_have_no_zoom():
    """Extreme diameters and models without `objects` raise InputError. Tiny photos get a prediction."""
    for diameter in (1e9, 1e-9):
        with pytest.raises(InputError, match=r"^200x160 pixels become \d+x\d+ at the zoom .*; expected 1 to 268435456"):
            Zoomed(Discs(), diameter)(photo_of(20)[0])
    for size in ([1, 1], [1, 400], [3, 3]):
        assert Zoomed(Discs(), "auto")(np.zeros([*size, 3], np.uint8))["panoptic"].shape == tuple(size)
    predictor = Discs()
    predictor.objects = None
    with pytest.raises(InputError, match="diameter=auto: the model does panoptic and does not tell the size"):
        Zoomed(predictor, "auto")
