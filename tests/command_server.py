"""Runs console commands in forks of one process that has already imported all modules."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest

SERVER = """
import json, os, signal, sys, tempfile
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import axial.recipes.configuration, axial.serving.export, axial.serving.predictor, axial.data.converters.coco
import gc, matplotlib, rich.table, tensorflow as tf  # modules that commands import late

gc.freeze()
gc.set_threshold(50_000, 10, 5)
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # see conftest.py

print("ready", flush=True)
for line in sys.stdin:
    command, arguments, environment = json.loads(line)
    out, err = tempfile.mkstemp(), tempfile.mkstemp()
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out[0], 1)
        os.dup2(err[0], 2)
        os.environ.update(environment)
        signal.alarm(1800)  # a command that hangs fails
        # A shell's background jobs ignore SIGINT, and forks inherit that. A test sends SIGINT to interrupt the command.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["axial-" + command, *arguments]
        module = __import__("axial.cli." + command, fromlist=["main"])
        code = 0
        try:
            module.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 99
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(pid, flush=True)
    _, status, usage = os.wait4(pid, 0)
    texts = [open(path).read() for _, path in (out, err)]
    for fd, path in (out, err):
        os.close(fd)
        os.unlink(path)
    used = usage.ru_maxrss / 2**20, usage.ru_utime + usage.ru_stime
    print(json.dumps([os.waitstatus_to_exitcode(status), *texts, *used]), flush=True)
"""


@dataclasses.dataclass
class Result:
    """Exit code, standard output and standard error of a finished command."""

    code: int
    out: str
    err: str
    peak: float  # largest resident memory, GiB
    seconds: float  # CPU time

    @property
    def line(self):
        """The only error line. Fails on a traceback or several lines."""
        lines = [line for line in self.err.strip().splitlines() if line.startswith("axial-")]
        assert "Traceback" not in self.err and len(lines) == 1, self.err
        return lines[0]


@pytest.fixture(scope="session")
def command(sample_dir):
    """A function that runs a command with its arguments and returns a `Result`.

    When the command has started, the function calls `meanwhile` with the command's process id. `environment` is a dict
    of further environment variables.
    """
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"

    def run(name, *arguments, meanwhile=None, environment=None):
        process.stdin.write(json.dumps([name, [str(a) for a in arguments], environment or {}]) + "\n")
        process.stdin.flush()
        pid = int(process.stdout.readline())
        try:
            if meanwhile:
                meanwhile(pid)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            process.stdout.readline()  # skips the killed command's result, so that the next call reads its own
            raise
        return Result(*json.loads(process.stdout.readline()))

    yield run
    process.stdin.close()
    process.wait(60)


@pytest.fixture(scope="session")
def succeed(command):
    """A function that runs a command, fails unless its exit code is 0, and returns its `Result`."""

    def run(*call, **options):
        result = command(*call, **options)
        assert result.code == 0, result.out + result.err
        return result

    return run


@pytest.fixture(scope="session")
def refuse(command):
    """A function that runs a command, fails unless it exits with 2 and one error line that has the `words`."""

    def run(words, *call, **options):
        result = command(*call, **options)
        assert result.code == 2 and words in result.line, result.out + result.err
        return result

    return run
