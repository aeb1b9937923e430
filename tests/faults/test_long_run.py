"""5,000 steps of the tiny model, killed 20 times, while a second process evaluates its checkpoints.

scripts/test.sh -n 0 -m slow tests/faults/test_long_run.py    AXIAL_SEED chooses other moments of the kills

The first process trains for 3,000 steps. The slope of its memory is fitted from step 500 on. It is the first to be
killed. The others are killed while they start, between two steps, or while they write a checkpoint. If AXIAL_REPORT
names a file, the figures are written there as JSON.
"""

import os
import re
import subprocess
import sys
import sysconfig

import psutil

SEED = int(os.environ.get("AXIAL_SEED", "0"))
STEPS, STRETCH, WARM = 5000, 3000, 500
RESTARTS, KEEP, EVAL_INTERVAL = 20, 3, 250
BINDINGS = {
    "STEPS": STEPS,
    "TrainingConfig.steps_per_loop": 10,
    "TrainingConfig.checkpoint_interval": 50,
    "TrainingConfig.eval_interval": EVAL_INTERVAL,
    "TrainingConfig.keep": KEEP,
}
MB = 1e6


class Command:
    """A process of an axial command. Its standard error goes to a file, from which its step is read."""

    def __init__(self, name, arguments, log):
        self.log, self.memory, self.peak = log, {}, 0
        path = os.path.join(sysconfig.get_path("scripts"), f"axial-{name}")
        with open(log, "wb") as file:
            call = [sys.executable, path, *map(str, arguments)]
            self.process = psutil.Popen(call, stdout=file, stderr=subprocess.STDOUT)

    def steps(self):
        """(first, last) step of the progress bar; None before it appears."""
        with open(self.log, "rb") as file:
            start = file.read(2**16)
            file.seek(max(0, os.path.getsize(self.log) - 2**12))
            texts = start, file.read()
        found = [re.findall(rb"train: +\d+%.*?\| (\d+)/%d " % STEPS, text) for text in texts]
        return (int(found[0][0]), int(found[1][-1])) if all(found) else None

    def is_alive(self):
        """Whether the process still runs. If it does, notes its memory for the step."""
        alive = self.process.poll() is None
        try:
            resident = self.process.memory_info().rss / MB if alive else 0
        except psutil.Error:
            resident = 0
        if resident:  # a process that has just ended has none
            self.memory[(self.steps() or (0, 0))[1]] = resident
            self.peak = max(self.peak, resident)
        return alive

    def end(self):
        """Exit code of a process that is about to end, and what it has printed."""
        code = self.process.wait(300)
        with open(self.log, encoding="utf-8") as file:
            return code, file.read()[-3000:]
