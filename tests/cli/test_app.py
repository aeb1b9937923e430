"""Behaviour that all commands share: exit codes, accepted names, and text from outside in their output."""

import csv
import html.parser
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import yaml
from PIL import Image

from axial.cli.evaluate_verbs import append_scores
from axial.io.show import plain
from tests.cloud.slice_fixture import free_port
from tests.conftest import ROOT
from tests.hostile import NAMES

COMMANDS = ("train", "evaluate", "export", "predict", "convert", "analyze", "doctor", "tpu", "data_service")
MAIN = "import sys\nsys.argv[0] = 'axial-{0}'\nfrom axial.cli.{0} import main\nmain()"
DRY_RUN = ("status", "--dry_run", "--engine=gcloud", "--name=a", "--project=p", "--zone=us-west4-a")


def process_of(name, *arguments):
    """The argument list that runs a command in its own process."""
    return [sys.executable, "-c", MAIN.format(name), *arguments]


def lines_of(result):
    """Returns the lines on standard error. Asserts that there is no traceback."""
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr, result.stderr
    return result.stderr.splitlines()


# === Ends ===


@pytest.fixture
def gone():
    """The writing end of a pipe whose reader is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("call", [("convert", "--help"), ("train", "--version"), ("tpu", *DRY_RUN)])
def test_a_reader_that_has_gone_ends_a_command(call, gone):
    """The exit code is 141 without a message, as for axial-train --help | true, or axial-tpu status | head -1."""
    result = subprocess.run(process_of(*call), check=False, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 141 and lines_of(result) == []


def test_an_output_that_is_full_is_one_line():
    with open("/dev/full", "w") as full:
        call = process_of("train", "--help")
        result = subprocess.run(call, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 2
    assert lines_of(result) == ["axial-train: No space left on device; what was finished is kept"]


@pytest.mark.parametrize("closed,code", [(">&-", 0), ("2>&-", 2)])
def test_streams_that_are_closed_before_the_start(closed, code):
    call = process_of("train", "--help" if code == 0 else "--x")
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *call]
    result = subprocess.run(shell, check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode == code and result.stdout + result.stderr == ""


def test_ctrl_c_while_a_command_waits(command):
    """A worker waits a minute for a dispatcher that never answers. SIGINT may come at any moment of this minute."""

    def interrupt(pid):
        with pathlib.Path(f"/proc/{pid}/wchan").open() as file:
            until = time.monotonic() + 40
            while "nanosleep" not in (file.seek(0), file.read())[1] and time.monotonic() < until:
                time.sleep(0.02)
        os.kill(pid, signal.SIGINT)

    address = f"--dispatcher=grpc://localhost:{free_port()}"
    result = command("data_service", "worker", address, "--wait=60", meanwhile=interrupt)
    assert result.code == 130 and result.line == "axial-data_service: interrupted"


def test_the_package_lists_its_commands():
    call = [sys.executable, "-m", "axial"]
    lines = subprocess.run(call, check=True, capture_output=True, text=True, timeout=60, cwd=ROOT).stdout.splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  axial-")]
    assert names == sorted(f"axial-{name.replace('_', '-')}" for name in COMMANDS)
    assert "  axial-train         Trains a model." in lines and max(map(len, lines)) <= 80


# === Names ===


def test_no_docstrings():
    """Python -OO drops docstrings. The help works, because it is read from the file. TensorFlow cannot be imported."""
    command = "import sys; sys.argv[0] = 'axial-predict'; from axial.cli import predict; predict.main()"
    for code, argument, expected, last in (
        (command, "--help", 0, ""),
        (command, "photo.png", 2, "axial-predict: python -OO"),
        ("from axial.layers import Conv", "", 1, "axial.errors.InputError: python -OO"),
    ):
        call = [sys.executable, "-OO", "-c", code, argument]
        done = subprocess.run(call, check=False, capture_output=True, text=True)
        assert done.returncode == expected and ["", *done.stderr.splitlines()][-1].startswith(last), done.stderr


CONVERT = "--input_dir={0} --output_dir={0}/out --split=val"
# dict from each call to the folder whose files the command lists, relative to the test's folder.
LISTED = {
    f"convert coco {CONVERT}": "annotations",
    f"convert folder {CONVERT} --spec=coco": "val/photos",
    "predict --saved_model=x {0}": "",
    "evaluate merge --results_dir={0} --split=val": "",
    "convert weights --source=deeplab2 --input={0} --output={0}/out": "",
}


@pytest.mark.parametrize("call", LISTED)
def test_a_name_in_a_folder_that_is_not_utf_8_is_named(refuse, tmp_path, call):
    folder = tmp_path / LISTED[call]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / os.fsdecode(b"panoptic_caf\xe9.json")).touch()
    assert "not UTF-8" in refuse(r"panoptic_caf\xe9.json: ", *call.format(tmp_path).split()).line


def test_a_path_of_an_unknown_file_system_is_one_line(refuse, tmp_path):
    refuse("File system scheme 's3' not implemented", "train", "--model_dir=s3://a/b")
    assert not os.listdir(tmp_path)


# === Text from outside, from a spec to every output ===

SHOWN = [name for name in NAMES if not re.search("[\ud800-\udfff]", name)]
STEMS = [name for name in SHOWN if not re.search("[/\x00]", name)][::4]  # file names of photos, without suffix


TAGS = {*"html head meta title style body header nav a main h1 h2 p table tr th td i figure figcaption img div".split()}
ATTRIBUTES = set("lang charset http-equiv name content style class id href src alt title".split())


class Page(html.parser.HTMLParser):
    """Collects the tags, the names of attributes and the text of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""
        self.feed(path.read_bytes().decode())

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def hostile(succeed, tmp_path_factory):
    """A folder with data whose classes and photos have hostile names, and with wrong panoptic results for this data.

    mine/val has a photo for each of `STEMS`, and masks with 20 rows and four columns per class. data/ has the TFRecords
    of mine/val. results.json and results/ are in COCO's panoptic format.
    """
    root = tmp_path_factory.mktemp("hostile")
    rows = [{"id": i, "name": name, "thing": i % 2 == 0} for i, name in enumerate(SHOWN, 1)]
    (root / "spec.yaml").write_text(yaml.safe_dump({"name": "<b>[mine]</b> $x_$", "classes": rows}))
    ids = np.repeat(np.arange(1, len(rows) + 1, dtype=np.uint8), 4)[None].repeat(20, 0)
    folder, results = root / "mine" / "val", root / "results"
    results.mkdir()
    annotations = []
    for layer in ("photos", "semantic", "instance"):
        (folder / layer).mkdir(parents=True)
    for number, stem in enumerate(STEMS):
        photo = np.random.default_rng(number).integers(0, 256, [*ids.shape, 3], np.uint8)
        for layer, pixels in (("photos", photo), ("semantic", ids), ("instance", (ids % 2 == 0).astype(np.uint8))):
            Image.fromarray(pixels).save(folder / layer / f"{stem}.png")
        wrong = np.roll(ids, 4 * number, 1)  # shifts the classes, so that the results are wrong
        Image.fromarray(np.stack([wrong, 0 * wrong, 0 * wrong], -1)).save(results / f"{number}.png")
        segments = [{"id": i, "category_id": i} for i in range(1, len(rows) + 1)]
        annotations.append({"image_id": number, "file_name": f"{number}.png", "segments_info": segments})
    (root / "results.json").write_text(json.dumps({"annotations": annotations}))
    folders = f"--input_dir={root}/mine", f"--output_dir={root}/data"
    succeed("convert", "folder", *folders, "--split=val", f"--spec={root}/spec.yaml")
    return root


def check_streams(result, names):
    """Asserts that standard output and error have every name and no control character."""
    for text in (result.out, result.err):
        assert not set(text.replace("\n", "").replace("\r", "")) & {*map(chr, range(32)), "\x7f", "\x9b", "\u202e"}
    assert not [name for name in names if plain(name).strip() not in result.out]


def check_page(path, names):
    """Asserts that a page has every name as text, and only the tags and attributes that axial writes."""
    page = Page(path)
    assert page.tags <= TAGS and page.attributes <= ATTRIBUTES
    assert not [name for name in names if in_html(name) not in page.text]


def in_html(name):
    """Returns a name as it appears in the text of a page, which keeps line ends and tabs."""
    return "".join(text if text in "\n\r\t" else plain(text) for text in re.split("([\n\r\t])", name))


def test_a_check_shows_names_as_they_are(succeed, hostile, tmp_path):
    page = tmp_path / "check.html"
    result = succeed("convert", "check", f"--data_dir={hostile}/data", "--split=val", f"--html={page}")
    check_streams(result, SHOWN)
    check_page(page, [*SHOWN, *(f"{stem}.png" for stem in STEMS), "<b>[mine]</b> $x_$"])


def test_an_evaluation_shows_names_as_they_are(succeed, hostile, tmp_path):
    results = f"--results_json={hostile}/results.json", f"--results_dir={hostile}/results"
    given = *results, f"--data_dir={hostile}/data", "--split=val"
    outputs = f"--csv={tmp_path}/a.csv", f"--report={tmp_path}/report", f"--picture={tmp_path}/a.png"
    result = succeed("evaluate", "results", *given, *outputs, f"--json={tmp_path}/a.json")
    check_streams(result, SHOWN)
    check_page(tmp_path / "report" / "val.html", [*SHOWN, *(f"{stem}.png" for stem in STEMS)])
    assert np.asarray(Image.open(tmp_path / "a.png")).std() > 5
    (row,) = csv.DictReader((tmp_path / "a.csv").read_text().splitlines())
    assert float(row["pq_all"]) < 100 and row["photos"] == str(len(STEMS))


def test_a_row_of_a_csv_is_no_formula_and_is_not_written_twice(tmp_path):
    evaluator = types.SimpleNamespace(columns=dict)
    scores = {"bleu": -0.25, "tokenized_bleu": float("nan"), "chrf": 0.5}
    path = tmp_path / "a.csv"
    columns = {"model": "=cmd|' /C calc'!A0", "split": "@a", "shard": None, "photos": -3}
    for _ in range(2):
        append_scores(str(path), evaluator, scores, columns)
    (row,) = csv.DictReader(path.read_text().splitlines())
    assert row["model"] == "'=cmd|' /C calc'!A0" and row["split"] == "'@a" and row["shard"] == ""
    assert (row["bleu"], row["tokenized_bleu"], row["photos"]) == ("-25.0", "", "-3")
