"""Commands accept bucket paths everywhere. The test runs them in one process, with TensorFlow's ram:// as the bucket.

ram:// has no POSIX files, and loses the contents of a folder that is renamed.
"""

import json
import os
import subprocess
import sys

from axial.data.converters.coco import SAMPLE_DIR
from tests.conftest import ROOT

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
    for flag in set(flags.FLAGS) - known:  # the next command may define the same flag
        delattr(flags.FLAGS, flag)
    flags.FLAGS.unparse_flags()

tf.config.optimizer.set_experimental_options({{"disable_meta_optimizer": True}})  # see conftest.py
gfile = tf.io.gfile
run("convert", "coco", "--output_dir=ram://bucket/data")
with gfile.GFile("ram://bucket/my.gin", "w") as file:
    file.write("include 'sample/overfit.gin'\\ninclude 'tiny/panoptic.gin'\\n")
    file.write("MODEL = 'panoptic_deeplab_resnet_nano'\\n")
    file.write("ModelConfig.arguments = {{'repeats': (1, 0, 0, 0)}}\\n")  # one block is traced fastest
run("train", "--gin_file=ram://bucket/my.gin", "--data_dir=ram://bucket/data", "--model_dir=ram://bucket/run")
run("evaluate", "--model_dir=ram://bucket/run", "--results_dir=ram://bucket/results", "--json=ram://bucket/scores.json",
    "--report=ram://bucket/report")
run("analyze", "page", "ram://bucket/run", "--html=ram://bucket/run.html")
run("export", "--model_dir=ram://bucket/run", "--output_dir=ram://bucket/export")
photo = gfile.glob(os.path.join({sample!r}, "*.jpg"))[0]
gfile.makedirs("ram://bucket/photos")
gfile.copy(photo, "ram://bucket/photos/a.jpg")
run("predict", "ram://bucket/photos", "--saved_model=ram://bucket/export", "--output_dir=ram://bucket/out")
print(json.dumps([os.path.join(folder, name) for folder, _, names in gfile.walk("ram://bucket") for name in names]))
"""


EXPECTED = """
data/train2017.json run/config.gin run/checkpoint run/status.json run/card.json run/objects.json scores.json run.html
report/val2017.html export/saved_model.pb export/assets.extra/spec.json export/assets.extra/objects.json out/a.json
"""


def test_the_whole_path_leaves_its_files_in_the_bucket_and_none_elsewhere(tmp_path):
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-c", SCRIPT.format(sample=f"{SAMPLE_DIR}/val2017")]
    done = subprocess.run(call, check=False, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    names = {name.removeprefix("ram://bucket/") for name in json.loads(done.stdout.splitlines()[-1])}
    assert set(EXPECTED.split()) <= names and not [name for name in names if "partial" in name], sorted(names)
    assert os.listdir(tmp_path) == []
