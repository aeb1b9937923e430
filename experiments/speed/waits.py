"""Measures what a person waits for, by whole processes: a prediction, a folder of photos, a first training step.

%s                      medians of five processes in turn; --rounds=1 is quick

'import TensorFlow' to 'first photo' are the parts of the process that predicts one photo. 'first photo' traces and
compiles the network and the grouping, and runs them once; 'next photo' only runs them.
"""

import collections
import glob
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from axial.cli import app
from axial.cli.flags import Flag, Flags
from axial.data.converters.nuclei import SAMPLE_DIR
from axial.io import show

PHOTOS = sorted(glob.glob(os.path.join(SAMPLE_DIR, "*", "photos", "*")))  # 130 photos
# Prints the seconds of each part of a prediction as JSON.
PARTS = """
import json, sys, time
seconds, last = {}, time.perf_counter()
def part(name):
    global last
    seconds[name], last = time.perf_counter() - last, time.perf_counter()
from axial.cli import app
app.import_tensorflow()
part("import TensorFlow")
from axial.data.objects import read_objects
from axial.recipes import configuration
from axial.serving.predictor import Predictor
from axial.serving.result import Result
from axial.weights.source import resolve
part("import axial")
source = resolve("nuclei")
task, model = configuration.restore_run(source)
predictor = Predictor.of_task(task, model, objects=read_objects(source.folder))
part("build the network, read its weights")
from axial.data.files import read_photo
for name in ("first photo", "next photo"):
    image, stored = read_photo(sys.argv[1], predictor.spec.levels)
    result = Result.of(predictor, image, sys.argv[1], stored)
    part(name)
result.write(sys.argv[2])
part("draw and write")
print(json.dumps(seconds))
"""
# Prints the seconds of a training's first and second step as JSON.
STEPS = """
import json, sys, time
from axial.cli import app
app.import_tensorflow()
from axial.cli import train
from axial.training.train_step import TrainStep
seconds, run = [], TrainStep.run
def timed(self, count):
    started = time.perf_counter()
    result = run(self, count)
    seconds.append(time.perf_counter() - started)
    return result
TrainStep.run = timed
try:
    train.main()
finally:
    print(json.dumps(dict(zip(("first step", "second step"), seconds))))
"""
TRAINING = ["--gin_file=nuclei/demo.gin", "--gin_binding=STEPS = 2"]


class Waits(Flags):
    rounds = Flag(int, "number of processes of each kind.", 5, least=1, most=100)


def run(call):
    """Runs a process. Returns its seconds, and its last line of output."""
    started = time.perf_counter()
    done = subprocess.run(
        call, check=True, capture_output=True, text=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    )
    return time.perf_counter() - started, done.stdout.splitlines()[-1]


def main(given):
    seconds = collections.defaultdict(list)
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            predict = ["axial-predict", "--model=nuclei", f"--output_dir={folder}"]
            seconds["axial-predict, one photo"].append(run([*predict, PHOTOS[0]])[0])
            seconds[f"axial-predict, {len(PHOTOS)} photos"].append(run([*predict, *PHOTOS])[0])
            parts = run([sys.executable, "-c", PARTS, PHOTOS[0], os.path.join(folder, "photo")])[1]
            steps = run([sys.executable, "-c", STEPS, *TRAINING, f"--model_dir={folder}/run"])[1]
            for name, value in {**json.loads(parts), **json.loads(steps)}.items():
                seconds[name].append(value)
    rows = [(name, f"{statistics.median(values):.1f}") for name, values in seconds.items()]
    show.say(*show.markdown_table(("wait", "seconds"), rows))


if __name__ == "__main__":
    app.run({"": (Waits, main)})
