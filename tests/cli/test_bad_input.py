"""On bad input, the console commands print one line and exit with code 2."""

import os
import pathlib
import re
import shlex
import shutil

import pytest
from PIL import Image

from axial.data.converters.coco import SAMPLE_DIR
from tests.cli.run_fixture import TINY

FOLDER = pathlib.Path(__file__).parent
PHOTO = os.path.join(SAMPLE_DIR, "val2017", "000000000285.jpg")


# Calls with placeholders for paths, and words of the error line of each call.
BAD = {
    "evaluate --model_dir=RUN --scales=0.5 --multi_scale": "--scales does not go with --multi_scale",
    "train --modeldir=x": "did you mean 'model_dir'",
    "train": "--model_dir is needed",
    "train --model_dir=RUN --gin_binding=STEPS=\"'many'\"": "expected int, got str (TrainingConfig.steps is the macro",
    "train --model_dir=RUN --gin_binding=TrainingConfig.steps=three": "three is no value; expected a number, True",
    "train --model_dir=RUN TINY --gin_binding=INIT=\"'/nowhere'\"": "/nowhere: no such checkpoint",
    "train '--model_dir=OUT/neu [y]'": "neu [y]: TensorFlow reads [ in this path as a pattern",
    "train --model_dir=RUN --strategy=tpu": "no TPU was found",
    "evaluate": "one of --model and --model_dir is needed",
    "export --model_dir=RUN --output_dir=OUT --format=safetensors --data_dir=HERE": "--data_dir does not go",
    "evaluate --model_dir=RUN --knob=top_k=1": "--knob: axial-evaluate run does not",
    "train --model_dir=RUN coco": "takes no argument: got 'coco'",
    "evaluate --saved_model=x --thresholds=0": "--thresholds=0: expected different IoUs",
    "evaluate --model_dir=RUN --results_dir=OUT --shard=4/4": "--shard=4/4: expected i/n",
    "evaluate merge --results_dir=HERE --split=val2017": "no shard of 'val2017'",
    "evaluate --model_dir=RUN --cityscapes_dir=x --submission_dir=gs://x": "local folders only",
    "analyze attention --checkpoint=x --image=/dev/zero --output_dir=OUT": "/dev/zero: a pipe, device or socket",
    "evaluate --model_dir=RUN --model_dir=RUN --model_dir=RUN": "--model_dir: one run",
    "predict photo.jpg": "--model=nuclei, which comes with axial",
    "train --model_dir=RUN --listen=all": "--listen needs --profiler_port",
    "analyze model axial_deeplab_nano --height=8": "height 8: 'axial_deeplab_nano' takes at least its output stride",
    "evaluate --model=nuclei --json=/dev/null": "a pipe, device or socket; expected a file",
    "convert coco --output_dir=OUT --split=a/../../x": "leaves its folder",
    "train --model_dir=RUN TINY --gin_binding=EVAL_SPLIT=\"'../x'\" "
    "--gin_binding=TrainingConfig.eval_interval=1": "'../x.json': leaves its folder",
    "convert 'a\x1b[31m'": "got 'a\\x1b[31m'",
}


@pytest.mark.parametrize("call,words", BAD.items(), ids=BAD)
def test_bad_input_is_one_line(refuse, tmp_path, call, words):
    paths = {"RUN": f"{tmp_path}/run", "OUT": f"{tmp_path}/out", "PHOTO": PHOTO, "HERE": str(FOLDER), "PY": __file__}
    for placeholder, path in {**paths, "TINY": shlex.join(TINY)}.items():
        call = re.sub(rf"\b{placeholder}\b", path, call)
    refuse(words, *shlex.split(call), environment={"CUDA_VISIBLE_DEVICES": ""})
    assert os.listdir(tmp_path) == []  # a command that fails leaves no folder


def test_no_file_is_written_through_links_in_a_run_or_in_results(refuse, trained, exported, tmp_path):
    """A link to a folder outside the run or the results is refused before any write. The lock file replaces a link."""
    home, file, run, out = (tmp_path / name for name in ("home", "file", "run", "out"))
    home.mkdir()
    file.write_text("mine")
    shutil.copytree(trained, run)
    shutil.rmtree(run / "best")
    results, report = out / "results" / "panoptic_val2017", out / "report" / "val2017"
    for link in (run / "best", run / "ckpt-99_temp", results, report):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(home)
    (run / ".lock").symlink_to(file)
    before = {path: path.lstat().st_mtime_ns for path in run.rglob("*")}
    for called, folder in {
        ("train", *TINY, f"--model_dir={run}", "--gin_binding=STEPS = 9", "--change=learning_rate"): run / "best",
        ("evaluate", f"--saved_model={exported}", f"--results_dir={out}/results"): results,
        ("evaluate", f"--saved_model={exported}", f"--report={out}/report"): report,
    }.items():
        refuse(f"{folder}: a link that leads out of {folder.parent}", *called)
    before.pop(run / ".lock")
    assert {path: path.lstat().st_mtime_ns for path in run.rglob("*")} == before
    assert not os.listdir(home) and file.read_text() == "mine"


def test_axial_predict_replaces_links_and_keeps_their_targets(succeed, exported, tmp_path):
    """The folder has links with the names of the temporary files. They are replaced, and not followed."""
    file, out = tmp_path / "file", tmp_path / "out"
    file.write_text("mine")
    out.mkdir()
    for ending in ("json", "panoptic.png", "semantic.png", "overlay.png"):
        (out / f".partial.000000000285.{ending}").symlink_to(file)
    succeed("predict", f"--saved_model={exported}", f"--output_dir={out}", PHOTO)
    assert Image.open(out / "000000000285.overlay.png").size == Image.open(PHOTO).size
    assert file.read_text() == "mine"


def test_a_wrong_split_is_named_before_a_missing_checkpoint(refuse, trained, tmp_path):
    for name in ("config.gin", "spec.json"):
        shutil.copy(trained / name, tmp_path)
    refuse("no split 'val2071'", "evaluate", f"--model_dir={tmp_path}", "--split=val2071")
    refuse(f"{tmp_path}: no checkpoint here", "evaluate", f"--model_dir={tmp_path}")


def test_runs_and_exports_that_do_not_fit(refuse, trained, exported, tmp_path):
    before = sorted(os.listdir(exported))
    refuse("never overwritten", "export", f"--model_dir={trained}", f"--output_dir={exported}")
    assert sorted(os.listdir(exported)) == before
    refuse("of another model", "evaluate", f"--model_dir={trained}", "--gin_binding=MODEL = 'axial_deeplab_w025'")
    shutil.copytree(trained, tmp_path / "run")
    text = (trained / "spec.json").read_text()
    (tmp_path / "run" / "spec.json").write_text(text.replace('"coco"', '"mine"').replace('"person"', '"people"'))
    words = "converted for another spec: its class_names[0] is 'person', not 'people'"
    refuse(words, "evaluate", f"--model_dir={tmp_path}/run")
