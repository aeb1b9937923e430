"""A process of its own for what takes much memory."""

import os
import signal
import subprocess
import sys
import time

import pytest

from axial.errors import InputError
from axial.tpu_compiler import compile as tpu_compile


def killed_between():
    """Dies with the first half of its answer sent, as one that runs out of memory."""
    from multiprocessing.connection import Connection

    whole = Connection._send

    def half(self, buffer, *rest):
        whole(self, buffer[: len(buffer) // 2], *rest)
        os.kill(os.getpid(), signal.SIGKILL)

    Connection._send = half
    return bytes(2**20)


def stays():
    print("here", flush=True)
    time.sleep(600)


def refused():
    raise InputError("a.gin: no such recipe")


def test_a_process_of_its_own_gives_its_result():
    assert tpu_compile.alone(divmod, 7, 2) == (3, 1)


def test_a_killed_process_is_a_lack_of_memory():
    with pytest.raises(MemoryError, match="was killed"):
        tpu_compile.alone(killed_between)


def test_an_error_of_the_process_has_the_lines_that_raised_it():
    with pytest.raises(InputError, match="a.gin: no such recipe") as caught:
        tpu_compile.alone(refused)
    assert "in refused" in str(caught.value.__cause__)


@pytest.mark.slow
def test_a_process_ends_with_a_parent_that_is_killed():
    code = "import test_compile; from axial.tpu_compiler.compile import alone; alone(test_compile.stays)"
    paths = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=paths)) as parent:
        assert parent.stdout.readline() == b"here\n"
        parent.kill()
        assert parent.communicate(timeout=60) == (b"", None)  # once nobody has its output open
