"""Compares axial on a CPU with csrhddlam/axial-deeplab, the paper authors' code in PyTorch. A suite of benchmark.py.

AXIAL_TORCH is the path of a Python with PyTorch. CSRHDDLAM is the path of a checkout of csrhddlam/axial-deeplab. The
settings of their process are `SETTINGS`. Each process waits while the other runs, so each has all cores. The memory is
all memory of a process of its own, with the libraries.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys

from axial.errors import InputError
from benchmark import make_step, measure, over, report, size_of

WORKS = {
    "layer_train": ("ours", "theirs"),
    "model_train": ("ours", "theirs"),
    "model": ("ours", "folded", "theirs"),
    "model_batch1": ("ours", "folded", "theirs"),
}
ROUNDS = 7
# Freed memory stays in the process, and idle threads do not take the cores from the other process.
SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34), "OMP_WAIT_POLICY": "PASSIVE"}
# Imports what axial's commands import, runs two steps of a form and prints the process's peak memory in bytes.
OURS = """
import sys
from axial.cli import app
app.import_tensorflow()
import benchmark, torch_steps
if len(sys.argv) > 1:
    step = benchmark.make_step(*sys.argv[1:])
    step(), step()
print(torch_steps.resident("VmHWM"))
"""
FOLDER = os.path.dirname(os.path.abspath(__file__))


def benchmark():
    """Returns (works, ratios); see `benchmark.benchmark`."""
    for name, what in (
        ("AXIAL_TORCH", "a Python with PyTorch"),
        ("CSRHDDLAM", "a checkout of csrhddlam/axial-deeplab"),
    ):
        if not os.path.exists(os.environ.get(name, "")):
            raise InputError(f"{name}={os.environ.get(name, '')}: --suite=peers expects the path of {what}")
    works, ratios = {"libraries": {"ours": {"peak_bytes": _our_memory()}}}, {}
    for work, forms in WORKS.items():
        report(work)
        peaks = {form: _our_memory(work, form) for form in forms[:-1]}
        with _theirs(work, peaks) as theirs:
            works[work] = measure(forms, functools.partial(_make, work, theirs), ROUNDS)
        for form, peak in peaks.items():
            works[work][form]["peak_bytes"] = peak
        for form in forms[:-1]:
            ratios[f"{work}, {form}: times as fast"] = over(works, work, "theirs", form)
            ratios[f"{work}, {form}: memory"] = over(works, work, form, "theirs", "peak_bytes")
    return works, ratios


def _make(work, theirs, form):
    return theirs if form == "theirs" else make_step(work, form)


def _our_memory(*work_and_form):
    command = [sys.executable, "-c", OURS, *work_and_form]
    return int(subprocess.run(command, cwd=FOLDER, stdout=subprocess.PIPE, check=True).stdout)


@contextlib.contextmanager
def _theirs(work, peaks):
    """Yields a function that runs their step once and notes their peak memory in `peaks`."""
    script = os.path.join(FOLDER, "torch_steps.py")
    command = [os.environ["AXIAL_TORCH"], script, work, json.dumps(size_of(work))]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=os.environ | SETTINGS, **pipes) as process:

        def step():
            with contextlib.suppress(BrokenPipeError):
                os.write(process.stdin.fileno(), b"\n")  # a buffer would fail again when the pipe is closed
            if not (line := process.stdout.readline()):
                raise InputError(
                    f"AXIAL_TORCH={command[0]}: PyTorch's process ended before the step, for the reason above"
                )
            peaks["theirs"] = int(line)

        yield step
