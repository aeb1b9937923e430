"""The HTML page of a training run, also in a real browser."""

import html
import re

import numpy as np
import pytest
import tensorflow as tf

from axial.analysis.run_page import draw_curves, read_events, write_page
from axial.errors import InputError
from axial.io import schemas
from axial.io.page import in_words
from axial.io.write import write_json
from tests.browser import look
from tests.hostile import NAMES


@pytest.fixture
def run(tmp_path):
    """Folder of a run with summaries of losses, speed and scores, and with a picture."""
    folder = tmp_path / "a <run>"
    with tf.summary.create_file_writer(str(folder)).as_default():
        for step in (10, 20, 30):
            tf.summary.scalar("total", 3.0 / step, step)
            tf.summary.scalar("images_per_second", 5.0, step)
        tf.summary.scalar("eval/miou", 0.625, 30)
        tf.summary.image("photo", np.full([1, 20, 30, 3], 0.5), 30)
    (folder / "config.gin").write_text("STEPS = 30 # <&>\n")
    return folder


def status(**changed):
    return {"state": "training", "step": 20, "steps": 30, "machine": {"devices": "1 CPU"}, **changed}


def test_a_page_has_what_the_run_wrote(run, tmp_path):
    write_json(str(run / schemas.STATUS), status())
    write_page(str(run), str(tmp_path / "run.html"))
    text = (tmp_path / "run.html").read_text()
    for snippet in (
        "a &lt;run&gt;",
        "20 of 30",
        "images per second: 5 at step 30",
        "mean IoU: 0.625 at step 30",
        "photo at step 30",
        "STEPS = 30 # &lt;&amp;&gt;",
    ):
        assert snippet in text, snippet
    assert "http:" not in text and "https:" not in text  # the page needs no network


def test_in_a_browser(run, tmp_path):
    write_page(str(run), str(tmp_path / "run.html"))
    document = look(tmp_path / "run.html", tmp_path / "profile")
    # The images show losses, scores, speed and the photo.
    assert "<title>images=4 broken=0 level=0 wide=false</title>" in document


@pytest.mark.filterwarnings("ignore:Glyph")  # warnings about letters that the font lacks
def test_names_of_a_run_of_a_stranger_are_shown_as_they_are(tmp_path):
    """Scalars, pictures, the folder and the machine have hostile names."""
    names = [name for name in NAMES if name.isprintable()]
    folder = tmp_path / "<b> $x_$ [a]"
    with tf.summary.create_file_writer(str(folder)).as_default():
        for name in names:
            tf.summary.scalar(name.replace("/", "|"), 3.0, 1)
            tf.summary.image(f"eval/{name}", np.full([1, 20, 30, 3], 0.5), 30)
    (folder / "config.gin").write_text("STEPS = 30 # </pre><script>alert(1)</script>\n")
    write_json(str(folder / schemas.STATUS), status(host="<script>", machine={name: name for name in names}))
    write_page(str(folder), str(tmp_path / "run.html"))
    text = (tmp_path / "run.html").read_text()
    assert not set(re.findall(r"<(\w+)", text)) & {"script", "b", "svg"} and "onerror='" not in text
    curves, pictures = read_events(str(folder))
    assert len(curves) == len(pictures) == len(names)
    for name in names:
        assert html.escape(name) in text and html.escape(in_words(f"eval/{name}")) in text, name
    names = "$x_$", r"costs $5, and $6 \frac", "_a"
    runs = {name: {"total": (np.arange(3), np.ones(3))} for name in names}
    draw_curves(runs, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(InputError, match="config.gin: no such file; a run of axial-train is expected"):
        write_page(str(tmp_path), str(tmp_path / "run.html"))
    (tmp_path / "config.gin").write_text("")
    with pytest.raises(InputError, match="no summaries yet"):
        write_page(str(tmp_path), str(tmp_path / "run.html"))
    assert not (tmp_path / "run.html").exists()
