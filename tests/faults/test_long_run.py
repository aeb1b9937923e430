"""3,000 steps of the tiny model: memory does not grow, and the folder has no superfluous files.

scripts/test.sh -n 0 -m slow tests/faults/test_long_run.py    prints the figures

`test_kills.py` kills trainings and resumes them.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import time

import numpy as np
import psutil
import pytest

from tests.faults.rounds import TINY

STEPS, WARM, KEEP, EVALUATES = 3000, 500, 3, 250
BINDINGS = {
    "STEPS": STEPS,
    "TrainingConfig.steps_per_loop": 2,  # shorter loops than usual, to show memory that a loop does not free
    "TrainingConfig.checkpoint_interval": 50,
    "TrainingConfig.eval_interval": EVALUATES,
    "TrainingConfig.keep": KEEP,
}
MB = 1e6


def size(paths):
    """Returns the total size of files in MB."""
    return sum(path.stat().st_size for path in paths if path.is_file()) / MB


def memory_of_training(data_dir, run, log):
    """Trains in another process. Returns a dict from steps to the process's resident memory in MB."""
    # By default, every thread has its own heap, which keeps freed memory. Resident memory then varies by 20 MB, which
    # would hide a leak.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
    bindings = [f"--gin_binding={name} = {value}" for name, value in BINDINGS.items()]
    script = os.path.join(sysconfig.get_path("scripts"), "axial-train")
    command = [sys.executable, script, *TINY, *bindings, f"--data_dir={data_dir}", f"--model_dir={run}"]
    memory = {}
    with open(log, "wb") as file, psutil.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment) as one:
        while one.poll() is None:
            status = run / "status.json"
            step = json.loads(status.read_text())["step"] if status.exists() else 0
            memory[step] = one.memory_info().rss / MB  # one value per step, so that slow steps have no larger weight
            assert len(list(run.glob("ckpt-*.index"))) <= KEEP + 1  # a save removes the oldest one last
            time.sleep(0.5)
    assert one.returncode == 0, log.read_text(errors="replace")[-3000:]
    return {step: resident for step, resident in memory.items() if resident}


@pytest.mark.slow
def test_a_long_run(sample_dir, tmp_path):
    run = tmp_path / "run"
    memory = memory_of_training(sample_dir, run, tmp_path / "log")
    steps, resident = np.array([item for item in sorted(memory.items()) if item[0] > WARM]).T
    slope = 1000 * np.polyfit(steps, resident, 1)[0]
    print(
        f"{slope:.3f} MB for 1,000 steps, at most {max(memory.values()):.0f} MB, folder {size(run.rglob('*')):.1f} MB"
    )
    assert slope < 1
    for pattern, number in {"ckpt-*.index": KEEP, "ckpt-*.data*": KEEP, "best/*.index": 1, "best/*.data*": 1}.items():
        assert len(list(run.glob(pattern))) == number, pattern
    assert not [path for path in run.rglob("*") if re.search(r"temp|\.partial\.|\.lock$", path.name)]
    events = list(run.glob("events*"))
    assert len(events) == 1 and size(events) < 2 * STEPS / EVALUATES
    assert size(run.rglob("*")) < size(events) + 1.4 * size(run.glob("ckpt-*")) + 1
