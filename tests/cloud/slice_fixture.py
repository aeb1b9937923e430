"""A slice on this machine: hosts are loopback addresses; the trainer and TensorFlow's servers are stand-ins."""

import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from axial.cloud import runs

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Stand-in for axial-train. Each step changes the weights, and every second step is saved. Each line of the file "plan"
# is for one start of the trainer. For "STEP CODE", the trainer waits at the step while a file "hold" exists, and exits
# with the code; for the code -9, signal 9 ends it. For "STEP hang", it writes a file "hangs" and hangs at the step.
# Without a line, it trains to the end.
TRAINER = """#!{python}
import fcntl, json, os, signal, sys, time

flags = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
folder, steps = flags["model_dir"], int(flags.get("steps", 20))
os.makedirs(folder, exist_ok=True)
log = open(os.path.join(folder, "log"), "a", buffering=1)
lock = open(os.path.join(folder, "lock"), "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    print("TWO TRAINERS", file=log)
    sys.exit(9)
print("start", json.dumps([sys.argv[1:], {{n: v for n, v in os.environ.items() if "TPU" in n}}]), file=log)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
plan = os.path.join(folder, "plan")
lines = open(plan).read().splitlines() if os.path.exists(plan) else []
at, end = lines[0].split() if lines else (steps + 1, 0)
if lines:
    open(plan, "w").write("\\n".join(lines[1:]))
step, weights = 0, 1
if os.path.exists(os.path.join(folder, "weights")):
    step, weights = json.load(open(os.path.join(folder, "weights")))

def save():
    partial = os.path.join(folder, "weights.partial")
    json.dump([step, weights], open(partial, "w"))
    os.rename(partial, os.path.join(folder, "weights"))
    print(f'model_checkpoint_path: "ckpt-{{step}}"', file=open(os.path.join(folder, "checkpoint"), "w"))

sys.stdout.write("no end of line")
sys.stdout.flush()
while step < steps:
    if step >= int(at):
        if end == "hang":
            open(os.path.join(folder, "hangs"), "w")
        while end == "hang":
            if asked:
                save()
                sys.exit(42)
            time.sleep(0.01)
        while os.path.exists(os.path.join(folder, "hold")):
            time.sleep(0.01)
        if int(end) < 0:
            os.kill(os.getpid(), -int(end))
        sys.exit(int(end))
    step, weights = step + 1, (weights * 31 + step) % 1000003
    if step % 2 == 0 or asked:
        save()
    if asked:
        sys.exit(42)
    time.sleep(float(flags.get("pause", 0.01)))
save()
"""
# Stand-in for python3. TensorFlow's server becomes a listener at the host's address. Other calls run Python.
PYTHON = """#!/bin/sh
case "$*" in
"-m axial.cloud.server"*) exec {python} -c '
import os, socket, sys, time
port = int(sys.argv[-1].partition("=")[2])
address = os.environ["AXIAL_HOSTS"].split(",")[int(os.environ["AXIAL_HOST"])]
listener = socket.create_server((address, port))
while True:
    listener.accept()[0].close()' "$@" ;;
*) exec {python} "$@" ;;
esac
"""


class Here:
    """A slice whose hosts are processes on this machine.

    Attributes:
        folder: folder of the test.
        model: folder of the run.
        run: the `Run` that the processes execute.
    """

    def __init__(self, folder):
        self.folder, self.model, self._started = folder, folder / "model", []
        (folder / "bin").mkdir(parents=True)
        for name, text in (("axial-train", TRAINER), ("python3", PYTHON)):
            path = folder / "bin" / name
            path.write_text(text.format(python=sys.executable))
            path.chmod(0o755)
        self.run = self.describe()

    def describe(self, *arguments, hosts=1, seconds=120.0, pace=0.02, **more):
        """Sets `run` to a `Run` with short waits, and returns it."""
        port = free_port()
        values = {"name": "run", "model_dir": str(self.model), "deadline": time.time() + seconds, "port": port, **more}
        self.run = runs.Run(arguments=list(arguments), hosts=hosts, pace=pace, **values)
        return self.run

    def plan(self, *lines):
        """Sets the plan of the trainer's next starts, one line for each start."""
        self.model.mkdir(exist_ok=True)
        (self.model / "plan").write_text("\n".join(lines))

    def start(self, host=0, command=None, environment=None):
        """Starts the process of a host in a new session. The process writes its output to a file."""
        addresses = ",".join(f"127.0.0.{number + 1}" for number in range(self.run.hosts))
        values = {"AXIAL_HOST": str(host), "AXIAL_HOSTS": addresses, runs.VARIABLE: self.run.to_json()}
        path = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        with open(self.folder / f"output{host}", "ab") as output:
            process = subprocess.Popen(
                command or runs.SUPERVISOR.split(),
                env={**os.environ, **path, **values, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def output(self, host=0):
        return (self.folder / f"output{host}").read_text()

    @property
    def log(self):
        """The lines in the trainer's log."""
        path = self.model / "log"
        return path.read_text().splitlines() if path.exists() else []

    def starts(self):
        """List of (arguments, TPU variables), one for each start of the trainer."""
        return [json.loads(line.removeprefix("start ")) for line in self.log if line.startswith("start ")]

    def weights(self):
        """[step, value] of the last checkpoint."""
        return json.loads((self.model / "weights").read_text())

    def saved(self):
        """Step of the last checkpoint; 0 without one."""
        return self.weights()[0] if (self.model / "weights").exists() else 0

    def close(self):
        for process in self._started:
            kill(process)


def untouched(steps=20):
    """[step, value] at the end of an undisturbed training."""
    value = 1
    for step in range(steps):
        value = (value * 31 + step) % 1000003
    return [steps, value]


def kill(process):
    """Kills all processes of a host at once and without notice, as the kernel ends a container."""
    for pid in (process.pid, *below(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def below(pid):
    """Returns the ids of a process's children and their descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def free_port():
    """Returns a free port whose predecessor is free too. At an ephemeral port, a client could connect to itself."""
    draw = random.SystemRandom()  # Keras sets the same seed for `random` in several processes
    while True:
        port = draw.randrange(12000, 32000)
        try:
            for number in (port - 1, port):
                socket.create_server(("", number)).close()
            return port
        except OSError:
            continue


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def here(tmp_path):
    """A `Here` in the test's folder. Its processes are killed at the end of the test."""
    made = Here(tmp_path / "slice")
    yield made
    made.close()
