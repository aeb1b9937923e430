"""Every path may be of a bucket. The commands run in one process, whose ram:// is TensorFlow's remote file system.

ram:// has no POSIX files and loses what is in a folder that is renamed.
"""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import importlib, json, os, sys
import tensorflow as tf
from absl import flags

def run(name, *arguments):
    known = set(flags.FLAGS)
    module = importlib.import_module("axial.cli." + name)
    sys.argv = ["axial-" + name, *arguments]
    print("::", *sys.argv, flush=True)
    try:
        module.main()
    except SystemExit as stop:
        assert not stop.code, (name, stop.code)
    for flag in set(flags.FLAGS) - known:  # the next command may have one of the same name
        delattr(flags.FLAGS, flag)
    flags.FLAGS.unparse_flags()

tf.config.optimizer.set_experimental_options({{"disable_meta_optimizer": True}})  # see conftest.py
gfile = tf.io.gfile
run("convert", "coco", "--output_dir=ram://bucket/data")
with gfile.GFile("ram://bucket/my.gin", "w") as file:
    file.write("include 'sample/overfit.gin'\\ninclude 'tiny/panoptic.gin'\\n")
run("train", "--gin_file=ram://bucket/my.gin", "--data_dir=ram://bucket/data", "--model_dir=ram://bucket/run")
run("train", "--gin_file=ram://bucket/my.gin", "--data_dir=ram://bucket/data", "--model_dir=ram://bucket/run")
run("evaluate", "--model_dir=ram://bucket/run", "--results_dir=ram://bucket/results", "--json=ram://bucket/scores.json",
    "--report=ram://bucket/report")
run("analyze", "page", "ram://bucket/run", "--html=ram://bucket/run.html")
run("export", "--model_dir=ram://bucket/run", "--output_dir=ram://bucket/export")
photo = gfile.glob(os.path.join({sample!r}, "*.jpg"))[0]
gfile.makedirs("ram://bucket/photos")
gfile.copy(photo, "ram://bucket/photos/a.jpg")
run("predict", "ram://bucket/photos", "--saved_model=ram://bucket/export", "--output_dir=ram://bucket/out")
print(json.dumps([os.path.join(place, name) for place, _, names in gfile.walk("ram://bucket") for name in names]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The files in the bucket, and what was in the folder where the commands ran."""
    import axial

    place = tmp_path_factory.mktemp("here")
    sample = os.path.join(os.path.dirname(axial.__file__), "data", "sample", "val2017")
    root = os.path.dirname(os.path.dirname(axial.__file__))
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(sample=sample)],
        check=False,
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), os.listdir(place)


def test_the_whole_path_leaves_its_files_in_the_bucket(found):
    names = {name.removeprefix("ram://bucket/") for name in found[0]}
    for name in (
        "data/train2017.json",
        "run/config.gin",
        "run/checkpoint",
        "run/status.json",
        "run/card.json",
        "run/objects.json",
        "scores.json",
        "run.html",
        "report/val2017.html",
        "export/saved_model.pb",
        "export/assets.extra/spec.json",
        "export/assets.extra/objects.json",
        "out/a.json",
    ):
        assert name in names, (name, sorted(names))
    assert not [name for name in names if "partial" in name], sorted(names)


def test_nothing_is_left_outside_of_the_bucket(found):
    assert found[1] == []
