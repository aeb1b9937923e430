"""The report of a split: the chosen photos, their pictures, and the page in a real browser."""

import html.parser
import os
import pathlib
import re

import numpy as np
import pytest
from PIL import Image

from axial.data.specs import COCO
from axial.metrics.panoptic_quality import Segments
from axial.tasks.segmentation.evaluator import PANOPTIC, PanopticMetrics, true_segments
from axial.training.report import Report
from tests.browser import look
from tests.truths import shifted

COUNT = 3


@pytest.fixture(scope="module")
def page(sample_dir, tmp_path_factory):
    """(path of the page, metrics, `Report`) of shifted predictions on the sample photos."""
    folder = tmp_path_factory.mktemp("report")
    scores = PanopticMetrics(COCO)
    report = Report(PANOPTIC, COCO, str(folder), "val2017", count=COUNT)
    for example, prediction in shifted(PANOPTIC.examples(sample_dir, "val2017", COCO)):
        report.add(example, scores.update(example, prediction), scores.photos[-1])
    return report.write(scores), scores, report


def test_the_worst_and_the_best_are_shown(page):
    """The page has the three worst photos and then the three best ones, with their qualities."""
    path, scores, report = page
    ranked = sorted(quality for _, _, quality in scores.photos)
    worst, best = report.extremes(scores.photos)
    assert [p[2] for p in worst] == ranked[:COUNT] and [p[2] for p in best] == ranked[: -COUNT - 1 : -1]
    text = pathlib.Path(path).read_text()
    names = re.findall(r"<figcaption>(.+?): PQ ([\d.]+)", text)
    assert names == [(name, f"{100 * quality:.1f}") for _, name, quality in worst + best]
    assert text.index("Best photos</h2>") < text.index("Classes</h2>") < text.index("taken for")


def test_the_pictures_are_those_of_the_extremes_after_every_photo(tmp_path):
    """80 photos in random order have equal or missing qualities. A photo is drawn only if it is an extreme so far."""
    drawn, photos, rng = [], [], np.random.default_rng(0)

    class Dots:
        pictures = ("photo",)

        def draw(self, example, decoded, spec):
            drawn.append(example)
            return (np.zeros([1, 1, 3], np.uint8),)

    report = Report(Dots(), None, str(tmp_path), "val", count=COUNT)
    for number in range(80):
        quality = rng.choice([None, *np.linspace(0, 1, 9)])
        photos.append([number, f"{number}.jpg", quality])
        report.add(number, None, photos[-1])
        ranked = sorted((quality, number) for number, _, quality in photos if quality is not None)
        chosen = {number for _, number in ranked[:COUNT] + ranked[-COUNT:]}
        assert {int(path.name[:6]) for path in (tmp_path / "val").glob("*.jpg")} == chosen
        assert (number in drawn) == (number in chosen)
    assert 2 * COUNT < len(drawn) < 40


def test_every_picture_exists_and_no_other(page):
    """Every image of the page loads, and the folder of pictures has no other file."""
    path, _scores, _report = page
    sources = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tag == "img" and sources.append(dict(attrs)["src"])
    parser.feed(pathlib.Path(path).read_text())
    assert len(sources) == 2 * COUNT * len(PANOPTIC.pictures)
    folder = path.removesuffix("val2017.html")
    for source in sources:
        Image.open(folder + source).load()
    assert {f"val2017/{name}" for name in os.listdir(folder + "val2017")} == set(sources)


def test_a_match_has_the_color_of_its_object(sample_dir):
    """The prediction has the true segments in another order, and the same picture."""
    example = next(iter(PANOPTIC.examples(sample_dir, "val2017", COCO)))
    ids, classes, *_ = true_segments(example)
    moved = Segments(np.where(ids, len(classes) + 1 - ids, 0), classes[::-1])
    _, truth, prediction = PANOPTIC.draw(example, (moved,), COCO)
    np.testing.assert_array_equal(truth, prediction)


def test_in_a_browser(page, tmp_path):
    images = 2 * COUNT * len(PANOPTIC.pictures)
    assert f"<title>images={images} broken=0 level={2 * COUNT} wide=false</title>" in look(page[0], tmp_path)


def test_mistakes_are_ranked_by_their_pixels():
    """Four pixels of b predicted as a come before three pixels of a predicted as b."""
    confusion = {"a": {"a": 6, "b": 3, "void": 1}, "b": {"a": 4, "b": 0}}
    rows = PANOPTIC.mistakes({"miou": {"confusion": confusion}})[1]
    assert rows[:2] == [["b", "a", "100.0 %"], ["a", "b", "30.0 %"]]
