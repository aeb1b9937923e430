"""Cityscapes' official scores for files of `CityscapesPredictionWriter`, computed by cityscapesscripts.

The evaluators of cityscapesscripts print, fork, set module-wide arguments and expect NumPy 1. So they run in a separate
process, without TensorFlow:

    python -m axial.tasks.segmentation.cityscapes_scores CITYSCAPES FILES val
"""

import argparse
import contextlib
import glob
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

from axial.errors import InputError, check_installed
from axial.io.paths import inside
from axial.io.show import say


def cityscapes_scores(tree, results, split):
    """dict of cityscapesscripts' scores: 'ap', 'ap50', 'miou', 'iiou', and 'pq_all', 'sq_things', ...

    Args:
        tree: Cityscapes folder, with gtFine/SPLIT/CITY/*_instanceIds.png and *_labelIds.png.
        results: folder that a `CityscapesPredictionWriter` has completed.
        split: name of the split.

    Raises:
        InputError: see `check_cityscapes`, or cityscapesscripts fails.
    """
    check_cityscapes(tree, split)
    command = [sys.executable, "-m", __name__, tree, results, split]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"cityscapesscripts on {results}: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    return json.loads(done.stdout)


def check_cityscapes(tree, split):
    """Raises InputError unless cityscapesscripts is installed and `tree` has the ground truth of `split`."""
    check_installed("Cityscapes' own scores want", "cityscapes", "cityscapesscripts")
    for kind in ("instanceIds", "labelIds"):
        if not _truth(tree, split, kind):
            raise InputError(f"{tree}: no gtFine/{split}/CITY/*_{kind}.png")


def _truth(tree, split, kind):
    folder = inside(tree, f"gtFine/{split}", "--split")
    return sorted(glob.glob(os.path.join(glob.escape(folder), "*", f"*_{kind}.png")))


def _write_nothing(*_):
    pass


def _score(tree, results, split, work):
    from cityscapesscripts.evaluation import evalInstanceLevelSemanticLabeling as instance_level
    from cityscapesscripts.evaluation import evalPanopticSemanticLabeling as panoptic_level
    from cityscapesscripts.evaluation import evalPixelLevelSemanticLabeling as pixel_level
    from cityscapesscripts.preparation.createPanopticImgs import convert2panoptic

    np.in1d = np.isin  # cityscapesscripts uses the name from NumPy 1
    convert2panoptic(os.path.join(tree, "gtFine"), work, setNames=[split])
    title = f"cityscapes_panoptic_{split}"
    truth, files = (inside(folder, title, "--split") for folder in (work, os.path.join(results, "panoptic")))
    scores = os.path.join(work, "panoptic_scores.json")
    panoptic = panoptic_level.evaluatePanoptic(f"{truth}.json", truth, f"{files}.json", files, resultsFile=scores)
    instance_level.writeDict2JSON = _write_nothing  # its cache has counts that JSON cannot hold
    quiet = {"JSONOutput": False, "quiet": True, "predictionWalk": None}
    quiet |= {"gtInstancesFile": os.path.join(work, "instances.json")}
    options = {**quiet, "predictionPath": os.path.join(results, "instance")}
    paths, args = _truth(tree, split, "instanceIds"), argparse.Namespace(**vars(instance_level.args) | options)
    predictions = [instance_level.getPrediction(path, args) for path in paths]
    instance = instance_level.evaluateImgLists(predictions, paths, args)["averages"]
    options = {**quiet, "predictionPath": os.path.join(results, "semantic")}
    paths, args = _truth(tree, split, "labelIds"), argparse.Namespace(**vars(pixel_level.args) | options)
    predictions = [pixel_level.getPrediction(args, path) for path in paths]
    pixel = pixel_level.evaluateImgLists(predictions, paths, args)
    return {
        **{f"{q}_{kind}": panoptic[kind.title()][q] for kind in ("all", "things", "stuff") for q in ("pq", "sq", "rq")},
        "ap": instance["allAp"],
        "ap50": instance["allAp50%"],
        "miou": pixel["averageScoreClasses"],
        "iiou": pixel["averageScoreInstClasses"],
    }


def _main(tree, results, split):
    tree, results = os.path.abspath(tree), os.path.abspath(results)
    with tempfile.TemporaryDirectory() as work, contextlib.redirect_stdout(sys.stderr):
        os.chdir(work)
        scores = _score(tree, results, split, work)
    say(json.dumps({name: float(score) for name, score in scores.items()}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
