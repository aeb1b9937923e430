"""The rate of axial-predict beside the rate of its network alone. A suite of benchmark.py.

A step takes 20 shipped photos of nuclei, of 256x256 pixels each, and the shipped model. The form 'network' runs only
the network, on canvases that are in memory. 'predict' is axial-predict without its start: it reads the photos, runs the
network, groups its maps and writes all files. 'predict, in turn' does so with one thread, one photo after the other.
"""

import contextlib
import functools
import io
import os
import tempfile
import time

from axial.cli import predict
from axial.data.converters.nuclei import SAMPLE_DIR
from axial.data.files import find_photos, load_photo
from axial.data.objects import read_objects
from axial.recipes import configuration
from axial.serving.predictor import Predictor
from axial.tasks.base import by_size
from axial.weights.source import resolve
from benchmark import measure, over

PHOTOS, ROUNDS = 20, 10
THREADS = {"predict": predict.THREADS, "predict, in turn": 1}


def benchmark():
    """Returns (works, ratios) of 200 photos in each form; see `benchmark.benchmark`."""
    source = resolve("nuclei")
    task, model = configuration.restore_run(source)
    predictor = Predictor.of_task(task, model, objects=read_objects(source.folder))
    photos = find_photos([os.path.join(SAMPLE_DIR, "train", "photos")])[:PHOTOS]
    canvases = [task.example(load_photo(photo, task.spec.levels))["image"][None] for photo in photos]
    network = by_size(task.network(model))
    with tempfile.TemporaryDirectory() as folder:
        given = predict.Predict(model="nuclei", output_dir=folder)

        def run_network():
            for canvas in canvases:
                for output in network(canvas).values():
                    output.numpy()

        def run_predict(form):
            predict.THREADS = THREADS[form]
            with contextlib.redirect_stdout(io.StringIO()):
                predict._predict_photos(predictor, predict.output_names(photos), given)

        steps = {"network": run_network, **{form: functools.partial(run_predict, form) for form in THREADS}}
        works = {"photos": measure(steps, steps.get, ROUNDS)}
        ratios = {f"{form}, of the network's rate": over(works, "photos", "network", form) for form in THREADS}
        ratios["predict, processor time, of the network's"] = processor(steps["predict"]) / processor(steps["network"])
    return works, ratios


def processor(step):
    """Returns the processor time of a step in seconds, summed over all threads."""
    started = time.process_time()
    step()
    return time.process_time() - started
