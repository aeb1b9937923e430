"""The console commands' answers to bad input: one line, and exit code 2."""

import os
import pathlib
import shutil

import pytest
from PIL import Image

from axial.data.converters.coco import SAMPLE_DIR
from tests.cli.run_fixture import TINY
from tests.io.image_fixture import png

FOLDER = pathlib.Path(__file__).parent
PHOTO = os.path.join(SAMPLE_DIR, "val2017", "000000000285.jpg")


BAD = {
    "misspelled flag": ("train", ["--modeldir=x"], "did you mean 'model_dir'"),
    "wrong choice": ("train", ["--strategy=gpu"], "--strategy=gpu"),
    "no model_dir": ("train", [], "--model_dir is needed"),
    "wrong value": (
        "train",
        ["--model_dir=RUN", "--gin_binding=STEPS = 'many'"],
        "TrainingConfig.steps = 'many': expected int, got str (TrainingConfig.steps is the macro STEPS)",
    ),
    "values of two macros": (
        "train",
        ["--model_dir=RUN", *TINY, "--gin_binding=STEPS = %BATCH", "--gin_binding=BATCH = 'x'"],
        "is the macro BATCH",
    ),
    "word for a number": (
        "train",
        ["--model_dir=RUN", "--gin_binding=TrainingConfig.steps = three"],
        "--gin_binding: three is no value; expected a number, True, False, None, text in quotes like 'nuclei'",
    ),
    "macro without its sign": (
        "train",
        ["--model_dir=RUN", "--gin_binding=TrainingConfig.steps = STEPS"],
        "--gin_binding: STEPS is no value (did you mean '%STEPS'?)",
    ),
    "no initial weights": (
        "train",
        ["--model_dir=RUN", *TINY, "--gin_binding=INIT = '/nowhere'"],
        "/nowhere: no such checkpoint",
    ),
    "no file of initial weights": (
        "train",
        ["--model_dir=RUN", *TINY, "--gin_binding=INIT = '/nowhere.safetensors'"],
        "/nowhere.safetensors: no such checkpoint",
    ),
    "no folder of an export": (
        "analyze",
        ["attention", "--saved_model=/nowhere", f"--image={PHOTO}", "--output_dir=OUT"],
        "/nowhere: no such folder; an export of axial-export is expected",
    ),
    "pattern of a run": (
        "train",
        ["--model_dir=OUT/neu [y]"],
        "neu [y]: TensorFlow takes [ in this path for a pattern",
    ),
    "pattern of an export": (
        "export",
        ["--model_dir=RUN", "--output_dir=OUT/a*"],
        "/out/a*: TensorFlow takes * in this",
    ),
    "a model of a target": ("convert", ["weights", "--target=a", "--model=b"], "--model does not go with --target"),
    "no TPU": ("train", ["--model_dir=RUN", "--strategy=tpu"], "no TPU was found"),
    "no GPU": ("train", ["--model_dir=RUN", "--strategy=mirrored"], "no GPU was found"),
    "nothing to evaluate": ("evaluate", [], "one of --model and --model_dir is needed"),
    "recipe of a run": ("evaluate", ["--model_dir=RUN", "--gin_file=x"], "--gin_file does not go with --model_dir"),
    "checkpoint of weights": (
        "evaluate",
        ["--model=x", "--gin_file=y", "--checkpoint=z"],
        "--checkpoint needs --model_dir",
    ),
    "picture": ("evaluate", ["--model_dir=RUN", "--picture=a.bmp"], "must end in .png or .jpg"),
    "average of weights": ("evaluate", ["--model=x", "--average=2"], "--average needs --model_dir"),
    "no output": ("export", ["--model_dir=RUN"], "--output_dir is needed"),
    "scales": ("evaluate", ["--model_dir=RUN", "--scales=0,1"], "--scales=0,1: expected positive numbers"),
    "no diameter": ("predict", ["--model=x", "--diameter=0", "x.png"], "--diameter=0: expected the diameter"),
    "diameter of a text": ("predict", ["--model=x", "--diameter=auto", "--text=a"], "--diameter=auto: a text has no"),
    "diameter NaN": ("evaluate", ["--model=x", "--diameter=nan"], "--diameter=nan: expected the diameter"),
    "photos of tensors": (
        "export",
        ["--model_dir=RUN", "--output_dir=OUT", "--format=safetensors", f"--data_dir={FOLDER}"],
        "--data_dir does not go with --format=safetensors",
    ),
    "flag of another verb": ("evaluate", ["--model_dir=RUN", "--knob=top_k=1"], "--knob: axial-evaluate run does not"),
    "no flag of its own": ("doctor", ["--model_dir=x"], "unknown flag --model_dir"),
    "surplus argument": ("train", ["--model_dir=RUN", "coco"], "takes no argument: got 'coco'"),
    "surplus verb": ("analyze", ["models", "x"], "axial-analyze models takes no argument: got 'x'"),
    "misspelled verb": ("evaluate", ["swep", "--model_dir=RUN"], "did you mean 'sweep'"),
    "knob": ("evaluate", ["sweep", "--model_dir=RUN"], "--knob is needed"),
    "ratios": ("evaluate", ["stress", "--model_dir=RUN", "--ratios=0"], "--ratios=0: expected positive numbers"),
    "no thresholds": ("evaluate", ["--model_dir=RUN", "--thresholds="], "--thresholds=: expected different IoUs"),
    "threshold 0": ("evaluate", ["--saved_model=x", "--thresholds=0"], "--thresholds=0: expected different IoUs"),
    "threshold NaN": ("evaluate", ["--model_dir=RUN", "--thresholds=nan"], "--thresholds=nan: expected different"),
    "threshold above 1": (
        "evaluate",
        ["results", "--results_json=x", "--split=a", "--thresholds=0.5,50"],
        "--thresholds=0.5,50: expected different IoUs, above 0 and at most 1, as in 0.5,0.75",
    ),
    "threshold twice": (
        "evaluate",
        ["sweep", "--model_dir=RUN", "--knob=top_k=1", "--thresholds=0.5,0.50"],
        "--thresholds=0.5,0.50: expected different IoUs",
    ),
    "thresholds of shards": ("evaluate", ["merge", "--thresholds=0.5"], "--thresholds: axial-evaluate merge does not"),
    "shard": ("evaluate", ["--model_dir=RUN", "--results_dir=OUT", "--shard=4/4"], "--shard=4/4: expected i/n"),
    "shard's folder": ("evaluate", ["--model_dir=RUN", "--shard=0/4"], "--shard needs --results_dir"),
    "no shards": ("evaluate", ["merge", f"--results_dir={FOLDER}", "--split=val2017"], "no shard of 'val2017'"),
    "two forms of results": (
        "evaluate",
        ["--model_dir=RUN", "--results_dir=OUT/x", "--submission_dir=OUT/y"],
        "do not go together",
    ),
    "cityscapes' bucket": (
        "evaluate",
        ["--model_dir=RUN", "--cityscapes_dir=x", "--submission_dir=gs://x"],
        "local folders only",
    ),
    "cityscapes' truth": (
        "evaluate",
        ["--model_dir=RUN", "--cityscapes_dir=x"],
        "--cityscapes_dir needs --submission_dir",
    ),
    "device as a photo": (
        "analyze",
        ["attention", "--checkpoint=x", "--image=/dev/zero", "--output_dir=OUT"],
        "/dev/zero: a pipe, device or socket, a file is expected",
    ),
    "text as a photo": (
        "analyze",
        ["attention", "--checkpoint=x", f"--image={__file__}", "--output_dir=OUT"],
        "not an image, or not a whole one; expected JPEG, MPO, PNG, WebP, BMP, GIF or TIFF",
    ),
    "device as a recipe": ("train", ["--model_dir=RUN", "--gin_file=/dev/zero"], "/dev/zero: a pipe, device or socket"),
    "three runs": ("evaluate", ["--model_dir=RUN"] * 3, "--model_dir: one run"),
    "whose results": ("evaluate", ["results", f"--results_json={__file__}", "--split=a"], "--data_dir is needed"),
    "no model": ("predict", ["photo.jpg"], "--model=nuclei, which comes with axial"),
    "data set": ("convert", ["cocco"], "did you mean 'coco'"),
    "split": ("convert", ["coco", "--output_dir=OUT", "--split=train2071"], "did you mean 'train2017'"),
    "not a split of nuclei": ("convert", ["nuclei", "--output_dir=OUT", "--split=trian"], "did you mean 'train'"),
    "no split": ("convert", ["cityscapes", "--output_dir=OUT", f"--input_dir={FOLDER}"], "--split is needed"),
    "no spec": ("convert", ["folder", "--output_dir=OUT", f"--input_dir={FOLDER}", "--split=a"], "--spec is needed"),
    "spec": (
        "convert",
        ["folder", "--output_dir=OUT", f"--input_dir={FOLDER}", "--split=a", "--spec=cityscape"],
        "did you mean 'cityscapes'",
    ),
    "nothing to check": ("convert", ["check"], "--data_dir is needed"),
    "nothing to zip": ("convert", ["zip", "--split=a"], "--input_dir is needed"),
    "attention of nothing": ("analyze", ["attention", f"--image={PHOTO}", "--output_dir=OUT"], "one of them"),
    "attention over nothing": ("analyze", ["attention", "--checkpoint=x", "--output_dir=OUT"], "--image is needed"),
    "no figure": ("analyze", ["curves", "/nowhere"], "--figure=FILE.png"),
    "a server of nothing": ("train", ["--model_dir=RUN", "--listen=all"], "--listen needs --profiler_port"),
    "small image": ("analyze", ["model", "axial_deeplab_nano", "--height=8"], "the least size is 16 x 16"),
    "folder for a file": ("evaluate", ["--saved_model=x", f"--json={FOLDER}"], "a folder, a file is expected"),
    "file for a folder": ("evaluate", ["--saved_model=x", f"--report={__file__}"], "a file, a folder is expected"),
    "name too long": ("evaluate", ["--saved_model=x", f"--csv=OUT{300 * 'a'}"], "cannot be written"),
    "unwritable folder": (
        "predict",
        ["--saved_model=x", "--output_dir=/proc/x", __file__],
        "/proc/x: cannot be written",
    ),
    "run below a file": ("train", [f"--model_dir={__file__}/run"], "--model_dir="),
    "data below a file": ("convert", ["coco", f"--output_dir={__file__}/data"], "--output_dir="),
    "export below a file": ("export", ["--model_dir=RUN", f"--output_dir={__file__}/x"], "--output_dir="),
    "a device as output": ("analyze", ["zoo", "--json=/dev/null"], "a pipe or a device, a file is expected"),
    "split of another folder": ("convert", ["coco", "--output_dir=OUT", "--split=a/../../x"], "leaves its folder"),
    "evaluation split of another folder": (
        "train",
        [
            "--model_dir=RUN",
            *TINY,
            "--gin_binding=EVAL_SPLIT = '../x'",
            "--gin_binding=TrainingConfig.eval_interval = 1",
        ],
        "'../x.json': leaves its folder",
    ),
    "maps of two sizes": (
        "evaluate",
        ["--model_dir=RUN", "--image_size=129,193", "--outputs_dir=OUT"],
        "--outputs_dir: keeps maps of one size, and --image_size has 2",
    ),
    "a name with control characters": ("convert", ["a\x1b[31m"], r"got 'a\x1b[31m'"),
}


@pytest.mark.parametrize("name,arguments,words", BAD.values(), ids=BAD)
def test_bad_input_is_one_line(command, tmp_path, name, arguments, words):
    arguments = [a.replace("RUN", str(tmp_path / "run")).replace("OUT", str(tmp_path / "out")) for a in arguments]
    result = command(name, *arguments, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert result.code == 2, result.err
    assert words in result.line
    assert os.listdir(tmp_path) == []  # a command that fails leaves no folder


def test_a_photo_of_too_many_pixels_is_one_line(command, tmp_path):
    """Pillow's own warning of a "DOS attack" does not show."""
    (tmp_path / "large.png").write_bytes(png(24_000, 24_000))
    image = f"--image={tmp_path}/large.png"
    result = command("analyze", "attention", "--checkpoint=x", image, f"--output_dir={tmp_path}/out")
    assert result.code == 2 and "24000x24000 pixels, at most" in result.line
    assert result.err.splitlines() == [result.line]


def test_a_run_and_an_export_in_a_path_that_tensorflow_takes_for_a_pattern(command, trained, exported, tmp_path):
    for folder in (trained, exported):
        model = shutil.copytree(folder, tmp_path / f"{folder.name} [v1]")
        result = command("predict", f"--model={model}", f"--output_dir={tmp_path}", PHOTO)
        assert result.code == 2 and f"{model}: TensorFlow takes [ in this path for a pattern" in result.line


def test_links_in_the_folder_of_a_stranger_are_not_followed(command, trained, exported, tmp_path):
    """A file takes the place of a link. A folder that leads out is refused before anything is written."""
    home, file, run, out = (tmp_path / name for name in ("home", "file", "run", "out"))
    home.mkdir()
    file.write_text("mine")
    shutil.copytree(trained, run)
    shutil.rmtree(run / "best")
    (run / "best").symlink_to(home)
    (run / "ckpt-99_temp").symlink_to(home)
    (run / ".lock").symlink_to(file)
    (out / "results").mkdir(parents=True)
    (out / "results" / "panoptic_val2017").symlink_to(home)
    (out / "report").mkdir()
    (out / "report" / "val2017").symlink_to(home)
    for ending in ("json", "panoptic.png", "semantic.png", "overlay.png"):
        (out / f".partial.000000000285.{ending}").symlink_to(file)
    before = {path: path.lstat().st_mtime_ns for path in run.rglob("*")}
    for called, place in {
        ("train", *TINY, f"--model_dir={run}", "--gin_binding=STEPS = 9", "--change=learning_rate"): run / "best",
        ("evaluate", f"--saved_model={exported}", f"--results_dir={out}/results"): out / "results" / "panoptic_val2017",
        ("evaluate", f"--saved_model={exported}", f"--report={out}/report"): out / "report" / "val2017",
    }.items():
        result = command(*called)
        assert result.code == 2 and f"{place}: a link that leads out of {place.parent}" in result.line, result.err
    before.pop(run / ".lock")
    assert {path: path.lstat().st_mtime_ns for path in run.rglob("*")} == before
    result = command("predict", f"--saved_model={exported}", f"--output_dir={out}", PHOTO)
    assert result.code == 0 and Image.open(out / "000000000285.overlay.png").size == Image.open(PHOTO).size, result.err
    assert not os.listdir(home) and file.read_text() == "mine"


def test_a_wrong_split_is_named_before_the_weights_are_looked_for(command, trained, tmp_path):
    for name in ("config.gin", "spec.json"):
        shutil.copy(trained / name, tmp_path)
    result = command("evaluate", f"--model_dir={tmp_path}", "--split=val2071")
    assert result.code == 2 and "no split 'val2071'" in result.line, result.err
    result = command("evaluate", f"--model_dir={tmp_path}")
    assert result.code == 2 and f"{tmp_path}: no checkpoint here" in result.line, result.err


@pytest.mark.parametrize("kind", ["exists", "truncated", "another model", "another spec"])
def test_runs_and_exports_that_do_not_fit(command, trained, exported, tmp_path, kind):
    if kind == "exists":
        before = sorted(os.listdir(exported))
        result = command("export", f"--model_dir={trained}", f"--output_dir={exported}")
        assert "never overwritten" in result.line and sorted(os.listdir(exported)) == before
    elif kind == "truncated":
        photo = tmp_path / "cut.jpg"
        whole = pathlib.Path(SAMPLE_DIR, "train2017", "000000000030.jpg").read_bytes()
        photo.write_bytes(whole[: len(whole) // 2])
        result = command("predict", f"--saved_model={exported}", f"--output_dir={tmp_path}", photo)
        assert "cut.jpg: not a whole image" in result.line
        assert not list(tmp_path.glob("cut*.png"))
    elif kind == "another model":
        result = command("evaluate", f"--model_dir={trained}", "--gin_binding=MODEL = 'axial_deeplab_w025'")
        assert "of another model" in result.line
    else:
        text = (trained / "spec.json").read_text()
        other = tmp_path / "run"
        other.mkdir()
        for name in os.listdir(trained):
            if os.path.isfile(trained / name):
                (other / name).write_bytes((trained / name).read_bytes())
        (other / "spec.json").write_text(text.replace('"coco"', '"mine"').replace('"person"', '"people"'))
        result = command("evaluate", f"--model_dir={other}")
        assert "converted for another spec: its class_names[0] is 'person', not 'people'" in result.line
    assert result.code == 2
