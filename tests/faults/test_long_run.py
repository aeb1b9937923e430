"""5,000 steps of the tiny model, killed 20 times, while a second process evaluates its checkpoints.

scripts/test.sh -n 0 -m slow tests/faults/test_long_run.py    AXIAL_SEED chooses other moments of the kills

The first process trains for 3,000 steps before it is killed. The slope of its memory is fitted to these. The later ones
are killed while they start, between two steps, or while they write a checkpoint. If AXIAL_REPORT names a file, the
figures are written there as JSON.
"""

import collections
import csv
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import sysconfig
import time
import typing

import numpy as np
import psutil
import pytest
import tensorflow as tf

from axial.cli.app import PREEMPTED

SEED = int(os.environ.get("AXIAL_SEED", "0"))
STEPS, STRETCH, WARM, RESTARTS = 5000, 3000, 500, 20
KEEP, SAVES, EVALUATES = 3, 50, 250
BINDINGS = {
    "STEPS": STEPS,
    "TrainingConfig.steps_per_loop": 2,  # more often than usual, so that it shows what a loop leaves behind
    "TrainingConfig.checkpoint_interval": SAVES,
    "TrainingConfig.eval_interval": EVALUATES,
    "TrainingConfig.keep": KEEP,
}
WARM_EVALUATIONS = 10
SIGNALS = signal.SIGKILL, signal.SIGTERM
MB = 1e6


class Kill(typing.NamedTuple):
    """A signal and its moment: `when` is 'start', 'step' or 'save', and `seconds` pass after `steps` steps."""

    when: str
    steps: int
    seconds: float
    signal: signal.Signals

    def is_due(self, span):
        """Whether a process has done the steps. `span` is of `Training.steps`."""
        return self.when == "start" or (span is not None and span[1] - span[0] >= self.steps)


def draw_kill(rng):
    """A `Kill` after so few steps that no process comes to the end of the training."""
    when = rng.choice(["start", "step", "step", "save"])
    if when == "start":
        return Kill(when, 0, rng.uniform(0, 20), rng.choice(SIGNALS))
    return Kill(when, rng.randrange(1, SAVES), rng.uniform(0, 1), rng.choice(SIGNALS))


class Command:
    """A process of an axial command, and its memory in MB by its progress."""

    def __init__(self, name, arguments, log):
        self.log, self.memory, self.peak = log, {}, 0
        script = os.path.join(sysconfig.get_path("scripts"), f"axial-{name}")
        # By default every thread takes memory from a heap of its own, which keeps what is freed. So resident memory
        # wanders by 20 MB and hides a leak.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
        with open(log, "wb") as file:
            call = [sys.executable, script, *map(str, arguments)]
            self.process = psutil.Popen(call, stdout=file, stderr=subprocess.STDOUT, env=environment)

    def note(self, progress):
        """Notes the memory. Returns whether the process still runs."""
        alive = self.process.poll() is None
        try:
            resident = self.process.memory_info().rss / MB if alive else 0
        except psutil.Error:
            resident = 0
        if resident:  # a process that is just ending has none
            self.memory[progress] = resident  # the last of each step, so that evaluations do not weigh more
            self.peak = max(self.peak, resident)
        return alive

    def end(self):
        """(exit code, last output) of a process that ends."""
        code = self.process.wait(600)
        return code, self.log.read_bytes()[-3000:].decode(errors="replace")

    def slope(self, warm):
        """Growth of the memory in MB for each 1,000 of progress, without the first `warm`."""
        progress, memory = np.array([item for item in sorted(self.memory.items()) if item[0] > warm]).T
        return 1000 * np.polyfit(progress, memory, 1)[0]


class Watch(Command):
    """A process that evaluates the checkpoints of a run as they appear."""

    def __init__(self, run, data_dir, folder):
        self.table = folder / "scores.csv"
        self.arguments = [f"--model_dir={run}", f"--data_dir={data_dir}", "--split=val2017", f"--csv={self.table}"]
        super().__init__("evaluate", ["watch", *self.arguments], folder / "watch.log")

    def checkpoints(self):
        """Names of the checkpoints that it has evaluated."""
        if not self.table.exists():
            return []
        with open(self.table, encoding="utf-8", newline="") as file:
            return [os.path.basename(row["model"]) for row in csv.DictReader(file)]

    def look(self):
        return self.note(len(self.checkpoints()))


class Training(Command):
    """A process that trains in a folder until it is killed."""

    def __init__(self, run, data_dir, log, watch):
        self.run, self.watch, self.latest, self.most = run, watch, latest_step(run), 0
        bindings = [f"--gin_binding={name} = {value}" for name, value in BINDINGS.items()]
        files = ["--gin_file=sample/overfit.gin", "--gin_file=tiny/panoptic.gin"]
        super().__init__("train", [*files, *bindings, f"--data_dir={data_dir}", f"--model_dir={run}"], log)

    def steps(self):
        """(first, last) step of the progress bar, or None before there is one."""
        with open(self.log, "rb") as file:
            head = file.read(2**14)
            file.seek(max(0, os.path.getsize(self.log) - 2**14))
            steps = [re.findall(rb"\| (\d+)/%d \[" % STEPS, text) for text in (head, file.read())]
        return (int(steps[0][0]), int(steps[1][-1])) if all(steps) else None

    def look(self):
        """Notes memory and checkpoints. Returns whether both processes still run."""
        self.most = max(self.most, len(list(self.run.glob("ckpt-*.index"))))
        return self.note((self.steps() or (0, 0))[1]) and self.watch.look()

    def live(self, kill):
        """Follows the process to its moment and kills it, or to its end. Checks that it ends as it should."""
        while self.look() and not (kill and kill.is_due(self.steps())):
            time.sleep(0.1)
        if kill:
            time.sleep(kill.seconds)
            while kill.when == "save" and self.process.poll() is None and not list(self.run.glob("*_temp")):
                time.sleep(0.001)
            assert self.process.poll() is None, self.end()
            self.process.send_signal(kill.signal)
        was_starting = self.steps() is None
        code, output = self.end()
        wanted = {None: {0}, signal.SIGKILL: {-signal.SIGKILL}, signal.SIGTERM: {PREEMPTED}}[kill and kill.signal]
        if was_starting and code == -signal.SIGTERM:  # there was nothing to save
            wanted = {-kill.signal}
        assert code in wanted and "Traceback" not in output, f"{kill}: exit code {code}\n{output}"


def latest_step(run):
    """The step of a run's latest checkpoint; 0 without one."""
    return int((tf.train.latest_checkpoint(str(run)) or "ckpt-0").rpartition("-")[2])


def size(paths):
    """MB of files."""
    return sum(path.stat().st_size for path in paths if path.is_file()) / MB


def train_and_watch(data_dir, run):
    """Trains to the end through all kills. Returns the `Training`s, their `Kill`s and the `Watch`."""
    rng = random.Random(SEED)
    first = Kill("step", STRETCH, 0, signal.SIGKILL)
    kills, lives = [first, *(draw_kill(rng) for _ in range(RESTARTS - 1)), None], []
    run.mkdir()
    watch = Watch(run, data_dir, run.parent)
    try:
        for number, kill in enumerate(kills):
            lives.append(Training(run, data_dir, run.parent / f"{number}.log", watch))
            lives[-1].live(kill)
        code, output = watch.end()
    finally:
        for command in (watch, *lives):
            if command.process.poll() is None:
                command.process.kill()
    assert code == 0 and "Traceback" not in output, output
    return lives, kills, watch


def figures(lives, kills, watch, run):
    """What a table of results says of the run."""
    events, scores = sorted(run.glob("events*")), sorted(run.glob("eval_*/events*"))
    spans = [life.steps() for life in lives if life.steps()]
    at = {step: round(lives[0].memory[max(m for m in lives[0].memory if m <= step)]) for step in (WARM, STRETCH)}
    return {
        "seed": SEED,
        "slope_mb_per_1000_steps": round(lives[0].slope(WARM), 3),
        "memory_mb_at_step": at,
        "peak_mb": round(max(life.peak for life in lives)),
        "restarts": len(lives) - 1,
        "kills": collections.Counter(f"{kill.when} {kill.signal.name}" for kill in kills if kill),
        "steps_done": sum(last - first for first, last in spans),
        "evaluated_beside": len(watch.checkpoints()),
        "evaluator_mb_per_1000_checkpoints": round(watch.slope(WARM_EVALUATIONS), 1),
        "evaluator_peak_mb": round(watch.peak),
        "most_checkpoints": max(life.most for life in lives),
        "checkpoint_mb": round(size(run.glob("ckpt-*")) / KEEP, 1),
        "event_files": len(events),
        "event_mb": round(size(events), 1),
        "event_files_beside": len(scores),
        "event_mb_beside": round(size(scores), 3),
        "folder_mb": round(size(run.rglob("*")), 1),
    }


@pytest.mark.slow
def test_a_long_run(sample_dir, tmp_path):
    start, run = time.monotonic(), tmp_path / "run"
    lives, kills, watch = train_and_watch(sample_dir, run)
    report = figures(lives, kills, watch, run)
    report["minutes"] = round((time.monotonic() - start) / 60, 1)
    if os.environ.get("AXIAL_REPORT"):
        with open(os.environ["AXIAL_REPORT"], "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    print(json.dumps(report, indent=1))
    check_resuming(lives, run)
    check_files(lives, run, report)
    assert watch.checkpoints()[-1] == f"ckpt-{STEPS}"
    assert report["slope_mb_per_1000_steps"] < 1, report


def check_resuming(lives, run):
    """Each process begins at the latest checkpoint. None of these is ever lost."""
    for before, life in itertools.pairwise(lives):
        assert life.latest >= before.latest
        assert life.steps() is None or life.steps()[0] == life.latest
    assert latest_step(run) == STEPS and lives[-1].steps()[1] == STEPS


def check_files(lives, run, report):
    """Files grow by one of events for each process, and by what it writes there."""
    assert report["most_checkpoints"] <= KEEP + 1, report  # the oldest goes when the newest is whole
    for pattern, number in {"ckpt-*.index": KEEP, "ckpt-*.data*": KEEP, "best/*.index": 1, "best/*.data*": 1}.items():
        assert len(list(run.glob(pattern))) == number, pattern
    left = [path for pattern in ("*temp*", ".partial.*", ".lock") for path in run.rglob(pattern)]
    assert not left
    wrote = [int(path.name.split(".")[-3]) for path in run.glob("events*")]
    assert len(wrote) == len(set(wrote)) and set(wrote) <= {life.process.pid for life in lives}
    assert {life.process.pid for life in lives if life.steps() and len(set(life.steps())) == 2} <= set(wrote)
    assert report["event_files_beside"] == 1
    assert report["event_mb"] < 2 * (STEPS / EVALUATES + RESTARTS)
    assert report["folder_mb"] < report["event_mb"] + (KEEP + 1) * report["checkpoint_mb"] + 1
