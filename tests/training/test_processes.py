"""Scoring processes compute the same metrics as one process, bit by bit, and end with their parent."""

import subprocess
import sys

import numpy as np
import psutil
import pytest

from axial.data.specs import COCO
from axial.data.tfrecord import read_manifest
from axial.errors import InputError, Preempted
from axial.metrics.panoptic_quality import Segments
from axial.tasks.segmentation.evaluator import PANOPTIC, PanopticMetrics
from axial.tasks.segmentation.input_pipeline import segment_map
from axial.training import processes
from axial.training.split_run import SplitRun


def shifted(examples):
    """Yields (example, prediction): the ground truth's segments, moved down by five pixels."""
    for example in examples:
        segments = np.roll(segment_map(example).numpy(), 5, 0)
        classes = example["segment/class"].numpy()
        semantic = np.concatenate([[COCO.ignore], classes])[segments]
        yield example, {"table": Segments(segments, classes, np.ones(len(classes))), "semantic": semantic}


def photos(sample_dir, shard=(0, 1), skip=0):
    return PANOPTIC.examples(sample_dir, "val2017", COCO, shard=shard, skip=skip)


@pytest.fixture(scope="module")
def whole(sample_dir):
    """(scores of all photos, list of what `PanopticMetrics.update` returns for each photo), computed by one process."""
    metrics = PanopticMetrics(COCO)
    decoded = [metrics.update(*pair) for pair in shifted(photos(sample_dir))]
    return metrics.result(), decoded


def make_run(folder, step):
    """The evaluation of the checkpoint of a step. Its state is in a folder."""
    return SplitRun(PANOPTIC, COCO, "val2017", state_dir=str(folder), identity={"step": step})


@pytest.mark.parametrize("others", [0, 2])
def test_a_stopped_evaluation_goes_on(whole, sample_dir, tmp_path, monkeypatch, others):
    """After a stop at three examples, the second run skips the scored examples. Scores equal one process's scores."""
    monkeypatch.setattr("axial.training.split_run.number_of", lambda photos: others)
    total, actual_decoded, skipped = read_manifest(sample_dir, "val2017")["examples"], [], []

    def stop(example, decoded):
        actual_decoded.append(decoded)
        if len(actual_decoded) == 3:
            raise Preempted("stop")

    def examples(shard, skip):
        skipped.append(skip)
        return photos(sample_dir, shard, skip)

    with pytest.raises(Preempted):
        make_run(tmp_path, 1).run(examples, shifted, total, stop)
    result = make_run(tmp_path, 1).run(examples, shifted, total, lambda _, decoded: actual_decoded.append(decoded))
    expected, expected_decoded = whole
    assert skipped[0] == 0 and 3 <= skipped[1] <= 3 + processes.AT_ONCE
    np.testing.assert_equal(actual_decoded, expected_decoded[:3] + expected_decoded[skipped[1] :])
    np.testing.assert_equal(result, expected)
    np.testing.assert_equal(make_run(tmp_path, 1).run(examples, shifted, total), result)
    assert len(skipped) == 2  # after a complete evaluation, no example is read
    with pytest.raises(InputError, match="its step is 1 and not 2"):
        make_run(tmp_path, 2).restore()


def test_no_process_outlives_the_one_that_was_killed(tmp_path):
    """The scoring process ends within 60 seconds after SIGKILL of its parent."""
    script = tmp_path / "script.py"  # has no `if __name__ == "__main__"`, like users' scripts
    script.write_text(
        "import functools, itertools, os, time\n"
        "from axial.training import processes\n"
        "class Scores:\n"
        "    shard = 0, 1\n"
        "    def __init__(self, shard=None): pass\n"
        "    def next_number(self): return 0\n"
        "    def merge(self, other): pass\n"
        "    def update(self, example, prediction): return os.getpid()\n"
        "    def state(self): return {}\n"
        "    def restore(self, state): pass\n"
        "pairs = (({}, {}) for _ in itertools.count())\n"
        "for chunk in processes.scored(pairs, Scores(), Scores, processes=1):\n"
        "    print(chunk[0][1], flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        scorer = psutil.Process(int(process.stdout.readline()))
        process.kill()
    scorer.wait(60)
