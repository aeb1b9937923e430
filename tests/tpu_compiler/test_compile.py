"""A process of its own for what takes much memory."""

import os
import signal

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


def refused():
    raise InputError("a.gin: no such recipe")


def test_a_killed_process_is_a_lack_of_memory():
    with pytest.raises(MemoryError, match="was killed"):
        tpu_compile.alone(killed_between)


@pytest.mark.slow
def test_an_error_of_the_process_has_the_lines_that_raised_it():
    with pytest.raises(InputError, match="a.gin: no such recipe") as caught:
        tpu_compile.alone(refused)
    assert "in refused" in str(caught.value.__cause__)
