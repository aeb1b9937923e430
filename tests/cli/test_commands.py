"""The console commands of panoptic segmentation, from photos to scores and pictures."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from axial.data.converters.coco import SAMPLE_DIR
from tests.cli.run_fixture import TINY
from tests.cloud.slice_fixture import free_port
from tests.conftest import ROOT, reached_by
from tests.data.record_fixture import change_record, spoil

PHOTO = os.path.join(SAMPLE_DIR, "val2017", "000000000285.jpg")


def test_a_run_of_another_model_or_version_is_not_changed(refuse, trained, tmp_path):
    """axial-train refuses another model, and axial-evaluate refuses an unknown setting, before they write a file."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    before = {path.name: path.read_bytes() for path in run.glob("*.gin")}
    given = "train", *TINY, f"--model_dir={run}", "--gin_binding=MODEL = 'panoptic_deeplab_resnet_nano'"
    refuse("of another model", *given)
    assert {path.name: path.read_bytes() for path in run.glob("*.gin")} == before
    (run / "config.gin").write_text("PanopticTask.memory = 'kernel'\n")
    refuse("PanopticTask has no argument 'memory'", "evaluate", f"--model_dir={run}")
    assert (run / "config.gin").read_text() == "PanopticTask.memory = 'kernel'\n"


def test_the_gin_files_of_a_stranger_run_nothing(refuse, trained, tmp_path):
    """An include inside a string is text. If it were expanded, the string would end, and gin would call a function."""
    run, ran = tmp_path / "run", tmp_path / "RAN"
    shutil.copytree(trained, run)
    (tmp_path / "notes.gin").write_text(
        '"""\nfrom __gin__ import dynamic_registration\nimport subprocess\nimport textwrap\n'
        "import axial.training.trainer\n"
        f"subprocess.getoutput.cmd = 'touch {ran}'\n"
        "axial.training.trainer.TrainingConfig.keep = @subprocess.getoutput()\n"
        'textwrap.dedent.text = """\n'
    )
    inside = f'\nPanopticTask.data_dir = """\ninclude "{tmp_path}/notes.gin"\n"""\n'
    (run / "config.gin").write_text((run / "config.gin").read_text() + inside)
    (tmp_path / "shared.gin").write_text("include 'sample/overfit.gin'\ninclude 'tiny/panoptic.gin'" + inside)
    refuse("no such folder", "evaluate", f"--model_dir={run}", "--split=val2017")
    refuse("no such folder", "train", f"--gin_file={tmp_path}/shared.gin", f"--model_dir={tmp_path}/new")
    assert not ran.exists()


def test_a_resumed_run_goes_on_with_what_it_began_with(refuse, succeed, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    before = {path.name: path.read_bytes() for path in run.glob("*.*")}
    call = ("train", *TINY, f"--model_dir={run}", "--gin_binding=TrainingConfig.eval_interval = 1")
    others = "--gin_binding=BATCH = 4", "--gin_binding=LEARNING_RATE = 0.02"
    result = refuse("batch is 2 in the run and 4 here", *call, *others)
    assert "learning_rate.peak is 0.01 in the run and 0.02 here" in result.line
    assert {path.name: path.read_bytes() for path in run.glob("*.*")} == before
    result = succeed(*call, *others, "--change=batch,learning_rate")
    assert "goes on with another batch: batch is 2 in the run" in result.err
    changes = json.loads((run / "training.json").read_text())["changes"]
    assert [(change["step"], change["setting"]) for change in changes] == [(1, "batch"), (1, "learning_rate.peak")]


@pytest.mark.slow
def test_weights_are_scored_by_a_recipe_without_a_run(succeed, refuse, trained, sample_dir, tmp_path):
    """A run, its safetensors file and its checkpoint have the same scores. Weights with other classes are refused."""
    weights = tmp_path / "weights"
    succeed("export", f"--model_dir={trained}", f"--output_dir={weights}", "--format=safetensors")
    (checkpoint,) = (path.with_suffix("") for path in (trained / "best").glob("*.index"))
    data = f"--data_dir={sample_dir}", "--split=val2017"
    scores = succeed("evaluate", f"--model_dir={trained}", *data).out
    assert scores.splitlines()[-1].startswith("PQ=")
    assert succeed("evaluate", *TINY, *data, f"--model={weights}").out == scores
    assert succeed("evaluate", *TINY, *data, f"--model={checkpoint}").out == scores
    assert succeed("evaluate", f"--model={weights}", *data).out == scores  # with the recipe in the weights' folder
    nuclei = refuse(f"{weights}: has 133 classes, ", "evaluate", "--gin_file=nuclei/demo.gin", f"--model={weights}")
    assert nuclei.line.endswith(" has 2")


def test_evaluate_takes_all_that_load_takes(succeed, refuse, trained, exported):
    """--model takes a run, its checkpoint and an export. An export refuses flags that change its network or scales."""
    (checkpoint,) = (path.with_suffix("") for path in (trained / "best").glob("*.index"))
    models = trained, checkpoint, exported
    scores = [succeed("evaluate", f"--model={model}", "--split=val2017").out for model in models]
    assert scores[0] == scores[1] and all(text.splitlines()[-1].startswith("PQ=") for text in scores)
    for flag in ("--scales=1,2", "--multi_scale", "--gin_file=nuclei/demo.gin"):
        words = f"{flag.split('=')[0]}: {exported} is an export, which is fixed"
        refuse(words, "evaluate", f"--model={exported}", flag)
    refuse(f"{exported} is an export, which has one scale", "predict", f"--saved_model={exported}", "--flip", PHOTO)


def coco_files(folder):
    """Flags that name the results of val2017 in COCO's format in a folder."""
    return f"--results_json={folder}/panoptic_val2017.json", f"--results_dir={folder}/panoptic_val2017"


@pytest.fixture(scope="module")
def scored(succeed, trained, sample_dir, tmp_path_factory):
    """Evaluates a run twice, its stored results by `merge` and as files in COCO's format, and the ground truth.

    Returns (folder, matches, lines). The folder contains all written files. The matches at each threshold and the
    printed lines with scores are dicts, whose keys are the names of the evaluations.
    """
    folder = tmp_path_factory.mktemp("scored")
    asked, results, table = "--thresholds=0.05,0.5", folder / "results", f"--csv={folder}/scores.csv"
    run, data = [f"--model_dir={trained}", f"--results_dir={results}"], f"--data_dir={sample_dir}"
    drawn = [asked, table, f"--picture={folder}/new/a.png"]
    sources = {
        "run": [*run, *drawn, f"--report={folder}/run"],
        "again": [*run, *drawn, f"--report={folder}/again"],
        "merge": ["merge", f"--results_dir={results}"],
        "results": ["results", *coco_files(results), data, asked, table],
        "truth": ["results", *coco_files(f"{SAMPLE_DIR}/annotations"), data, asked],
    }
    matching, lines = {}, {}
    for name, source in sources.items():
        path = folder / f"{name}.json"
        result = succeed("evaluate", *source, "--split=val2017", f"--json={path}")
        lines[name] = [line for line in result.out.splitlines() if line.startswith(("things matched by IoU", "PQ="))]
        matching[name] = json.loads(path.read_text())["val2017"]["matching"]
    return folder, matching, lines


def _undated(path):
    """The bytes of a file without the minute at which a page was written."""
    return re.sub(rb"\d{4}-\d\d-\d\d \d\d:\d\d UTC", b"", path.read_bytes())


def test_stored_results_have_the_scores_and_pages_of_the_run(scored):
    folder, matching, lines = scored
    assert matching["run"] == matching["again"] == matching["results"] == matching["merge"]
    assert lines["run"] == lines["again"] == lines["results"] == lines["merge"] and len(lines["run"]) == 2
    run, again = ({p.relative_to(f): _undated(p) for p in f.rglob("*.*")} for f in (folder / "run", folder / "again"))
    assert run == again


def test_the_ground_truth_has_accuracy_1_at_each_threshold(scored):
    _, matching, lines = scored
    for at, row in matching["truth"].items():  # the run of one step has few matches
        assert row["accuracy"] == 1 and row["tp"] == matching["run"][at]["tp"] + matching["run"][at]["fn"] > 8
    assert lines["truth"][0] == "things matched by IoU, TP/(TP+FP+FN): accuracy@0.05=100.0 accuracy@0.5=100.0"


def test_the_csv_the_report_and_the_picture_show_the_scores(scored):
    folder, matching, _ = scored
    accuracy, page = matching["run"]["0.05"]["accuracy"], (folder / "run" / "val2017.html").read_text()
    assert np.asarray(Image.open(folder / "new" / "a.png")).std() > 20
    assert f"<td>accuracy at IoU 0.05</td><td>{100 * accuracy:.1f} %</td>" in page
    first, second = csv.DictReader((folder / "scores.csv").read_text().splitlines())
    assert first["pq_all"] == second["pq_all"] and float(first["accuracy@0.05"]) == round(100 * accuracy, 3)
    assert second["model"].endswith("panoptic_val2017.json") and second["photos"] == "8"


def test_each_png_of_the_results_has_the_segment_ids_of_the_json(scored):
    results = scored[0] / "results"
    content = json.loads((results / "panoptic_val2017.json").read_text())
    for annotation in content["annotations"]:
        rgb = np.asarray(Image.open(results / "panoptic_val2017" / annotation["file_name"])).astype(int)
        painted = set(np.unique(rgb @ [1, 256, 65536])) - {0}
        assert painted == {s["id"] for s in annotation["segments_info"]}


def test_stored_results_refuse_other_thresholds(refuse, trained, scored):
    given = "evaluate", f"--model_dir={trained}", f"--results_dir={scored[0]}/results", "--split=val2017"
    refuse("its thresholds is [0.05, 0.5] and not None", *given)


def test_stored_predictions_fit_a_moved_run_but_not_another_configuration(succeed, refuse, trained, tmp_path):
    stored = "--split=val2017", f"--results_dir={tmp_path}/results"
    succeed("evaluate", f"--model_dir={trained}", *stored)
    moved = shutil.copytree(trained, tmp_path / "moved")
    for binding, words in (
        ("ModelConfig.arguments = {'repeats': (1, 0, 0, 0), 'span': 9}", "network.arguments.span is 65 and not 9"),
        ("PostprocessConfig.top_k = 3", "grouping.top_k is None and not 3"),
    ):
        refuse(words, "evaluate", f"--model_dir={moved}", f"--gin_binding={binding}", *stored)


@pytest.mark.slow  # traces five networks
def test_studies_of_a_run(succeed, trained, tmp_path):
    run, path, table = f"--model_dir={trained}", tmp_path / "out.json", tmp_path / "scores.csv"
    result = succeed("evaluate", run, "--scales=0.5,1", "--flip", f"--json={path}")
    assert result.out.splitlines()[-1].startswith("PQ=")
    picture = tmp_path / "stress.png"
    succeed("evaluate", "stress", run, run, "--ratios=0.5,1", f"--json={path}", f"--picture={picture}")
    (rows,) = json.loads(path.read_text())["runs"].values()
    assert [row["canvas"] for row in rows] == [[33, 33], [65, 65]] and Image.open(picture).size > (500, 300)
    knobs = ["--knob=stuff_area=1,99999", "--knob=top_k=1,5"]
    result = succeed("evaluate", "sweep", run, "--split=val2017", *knobs, "--thresholds=0.5", f"--json={path}")
    assert "accuracy@0.5" in result.out
    (rows,) = json.loads(path.read_text()).values()
    assert all(0 <= row["accuracy@0.5"] <= 1 for row in rows)
    assert [(row["stuff_area"], row["top_k"]) for row in rows] == [(1, 1), (1, 5), (99999, 1), (99999, 5)]
    result = succeed("evaluate", "watch", run, "--timeout=1", f"--csv={table}")
    assert "scores each checkpoint, and waits up to 1 seconds" in result.err
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert row["model"].endswith("ckpt-" + row["model"].rpartition("-")[2])
    assert list(trained.glob("eval_*/events*"))


def test_a_bad_record_is_named(refuse, exported, sample_dir, tmp_path):
    shutil.copytree(sample_dir, tmp_path / "data")
    (shard,) = (tmp_path / "data").glob("val2017-*.tfrecord")
    change_record(shard, 2, "panoptic/encoded", spoil)
    data = f"--data_dir={tmp_path}/data", "--split=val2017"
    result = refuse(f"{shard}: record 2 (", "evaluate", f"--saved_model={exported}", *data)
    assert "is damaged (Invalid PNG" in result.line
    assert "unreadable" in refuse("1 error, which the tables above name", "convert", "check", *data).out


@pytest.fixture
def own_photos(tmp_path):
    """A folder with a split of three photos of 60x40 pixels and their label images. Each has a road and one car."""
    rng = np.random.default_rng(0)
    for i in range(3):
        ids = np.full([40, 60], 1, np.uint8)
        ids[10:30, 20:40] = 2
        photo = rng.integers(0, 256, [40, 60, 3], np.uint8)
        layers = {"photos": photo, "semantic": ids, "instance": (ids == 2).astype(np.uint8)}
        for layer, pixels in layers.items():
            folder = tmp_path / "mine" / "train" / layer
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "mine"


def test_label_images_alone_and_outlines_convert(succeed, own_photos, tmp_path):
    """The label images of one class need no spec, and LabelMe's outlines of the same cars give as many objects."""
    shutil.rmtree(own_photos / "train" / "semantic")
    shape = {"label": "car", "points": [[20, 10], [40, 30]], "shape_type": "rectangle"}
    (tmp_path / "lines" / "train").mkdir(parents=True)
    for i in range(3):
        shutil.copy(own_photos / "train" / "photos" / f"{i}.png", tmp_path / "lines" / "train")
        content = {"shapes": [shape], "imageHeight": 40, "imageWidth": 60}
        (tmp_path / "lines" / "train" / f"{i}.json").write_text(json.dumps(content))
    for verb, folder, flag in (("folder", "mine", "--class=car"), ("instances", "lines", "--rest=background")):
        folders = f"--input_dir={tmp_path}/{folder}", f"--output_dir={tmp_path}/{verb}", "--split=train"
        succeed("convert", verb, *folders, flag)
        result = succeed("convert", "check", f"--data_dir={tmp_path}/{verb}", "--split=train")
        assert re.search(r"car +│ yes +│ 3 +│ 3 +│ 16.67", result.out)


@pytest.mark.parametrize(
    "words,message",
    [
        ("folder", "--spec is needed: class definitions; or --class=NAME, if all objects have one class"),
        (
            "folder --class=background",
            "--class=background is the name of the other pixels; or --class=NAME, if all objects have one class",
        ),
        ("folder --class=car --spec=coco", "--class_name does not go with --spec"),
        (
            "instances",
            "--rest is needed: name of the class of pixels without an object, or none if they are unlabelled",
        ),
    ],
)
def test_the_classes_of_own_data_must_be_given(command, own_photos, words, message):
    verb, *more = words.split()
    result = command("convert", verb, f"--input_dir={own_photos}", "--output_dir=DATA", "--split=train", *more)
    assert (result.code, result.err) == (2, f"axial-convert: {message}\n")


def test_own_data_converts_and_is_checked(succeed, refuse, own_photos, tmp_path):
    """Photos of a road and a car become a split, a page, and advice on how to train."""
    spec = tmp_path / "mine.yaml"
    spec.write_text("name: mine\nclasses: [{id: 1, name: road}, {id: 2, name: car, thing: true}]\n")
    data = f"{tmp_path}/data"
    folders = (f"--input_dir={own_photos}", f"--output_dir={data}")
    result = succeed("convert", "folder", *folders, f"--spec={spec}", "--split=train")
    assert "train: 3 photos in 1 shard, 3 converted now" in result.out
    page = tmp_path / "check.html"
    result = succeed("convert", "check", f"--data_dir={data}", "--split=train", f"--html={page}")
    lines = result.out.splitlines()
    last = lines.index(f"{data}: no errors in 3 photos")
    said = " ".join(lines[last + 1 :]).replace("\\", " ")
    (training,) = re.findall(r"axial-train --gin_file=own/\S+.*--model_dir=RUN", said)
    assert "STEPS = 500" in training and "CANVAS = (65, 65)" in training and f"--data_dir={data}" in training
    assert re.search(r"about [\d.]+ (s|min|h) on this machine.s (CPU|GPU), and up to [\d.]+ GB of memory", said)
    assert "multiply-adds, as counted" in said
    assert page.read_text().count("<img ") == 3
    (tmp_path / "data" / "train-00000-of-00001.tfrecord").unlink()
    refuse("it is lost or changed", "convert", "check", f"--data_dir={data}", "--split=train")


def test_doctor(succeed):
    result = succeed("doctor", "--step")
    assert "tensorflow" in result.out and "1 CPU" in result.out
    assert "axial-train: XLA does not compile the step" in result.out
    assert "one training step of a tiny Axial-DeepLab: loss " in result.out
    assert result.out.splitlines()[-1] == "doctor: all is well"


PROFILER = """
import sys
from axial.cli import train

for port, listen in zip(sys.argv[1:], ("loopback", "all")):
    train.start_profiler(int(port), listen)
print("listens", flush=True)
sys.stdin.read()
"""


def test_the_profiler_serves_this_machine_alone_unless_a_flag_says_otherwise():
    ports = free_port(), free_port()
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with subprocess.Popen([sys.executable, "-c", PROFILER, *map(str, ports)], **pipes) as process:
        assert process.stdout.readline() == "listens\n"
        assert [reached_by(port) for port in ports] == ["this machine", "all"]
