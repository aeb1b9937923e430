"""Checkpoints of a running training, in order."""

import os
import time

from axial.errors import InputError
from axial.io.show import say
from axial.weights.checkpoint import is_unfinished, run_checkpoints


def checkpoints(model_dir, last_step, timeout):
    """Yields (step, prefix) of the latest checkpoint of a run, then of every newer one in order, until its last step.

    A checkpoint that the training removes before its turn is named on standard error.

    Args:
        model_dir: folder of the run.
        last_step: function that returns the last step of its training.
        timeout: seconds to wait for the next checkpoint.
    """
    last, waiting, until = None, {}, time.monotonic() + timeout
    while True:
        there = {checkpoint_step(prefix): prefix for prefix in run_checkpoints(model_dir) if not is_unfinished(prefix)}
        for step in sorted(waiting.keys() - there.keys()):
            removed(waiting[step])
        waiting = {step: prefix for step, prefix in there.items() if last is None or step > last}
        if waiting:
            last = min(waiting) if last is not None else max(waiting)
            yield last, waiting.pop(last)
            if last >= last_step():
                return
            waiting = {step: prefix for step, prefix in waiting.items() if step > last}
            until = time.monotonic() + timeout
        elif time.monotonic() > until:
            return
        else:
            time.sleep(1)


def removed(prefix):
    """Says that a checkpoint was removed before it was evaluated."""
    say(f"{prefix}: was removed before its turn; a larger TrainingConfig.keep keeps more of them", error=True)


def checkpoint_step(prefix):
    """The step in a checkpoint's name, 'ckpt-STEP'."""
    number = os.path.basename(prefix).rpartition("-")[2]
    if not number.isdigit():
        raise InputError(f"{prefix}: a checkpoint of a training is named ckpt-STEP")
    return int(number)
