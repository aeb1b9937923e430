"""Monitoring of a training: the status file, requests to stop, hanging steps and the profiler trace."""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import tensorflow as tf

import axial
from axial.errors import InputError, Preempted
from axial.io import schemas
from axial.io.read import read_json
from axial.training import monitor
from tests.cloud.slice_fixture import until


def test_a_status_has_percentiles_of_the_loops(tmp_path, monkeypatch):
    """100 loops take 1 to 100 seconds per step, a quarter of it for data. status.json has their statistics."""
    status = monitor.Status(str(tmp_path), steps=300, batch=8)
    status.write("training", 0)
    assert read_json(str(tmp_path / "status.json"), schemas.RunStatus)[1].seconds_per_step is None
    assert status.speed() == {}
    for seconds in range(1, 101):
        status.add_loop(2, 2 * seconds, waited=0.5 * seconds)
    monkeypatch.setattr(monitor.Status, "SECONDS", 0)
    status.write("training", 200)
    written = read_json(str(tmp_path / "status.json"), schemas.RunStatus)[1]
    assert (written.state, written.step, written.steps) == ("training", 200, 300)
    times = written.seconds_per_step, written.seconds_per_step_p90, written.seconds_per_step_p99
    assert times == pytest.approx((50.5, 90.1, 99.01))
    assert written.images_per_second == pytest.approx(8 / 50.5)
    assert written.input_bound == pytest.approx(0.25)
    assert "CPU" in written.machine["devices"] and written.machine["tensorflow"] == tf.__version__


def test_a_status_is_written_now_and_then_and_ends_nothing(tmp_path, monkeypatch, capfd):
    """A write within 15 seconds of the last one is skipped unless the state changes. A failed write only prints."""
    tried, errors = [], [None, OSError(5, "?"), None, tf.errors.UnknownError(None, None, "Stale file handle")]

    def failing(path, value):
        tried.append(value["step"])
        if error := errors.pop(0):
            raise error

    monkeypatch.setattr(monitor, "write_json", failing)
    times = iter((100, 110, 115, 120, 130, 131))
    monkeypatch.setattr(monitor, "time", types.SimpleNamespace(monotonic=times.__next__))
    status = monitor.Status(str(tmp_path), steps=300, batch=8)
    for step, state in enumerate((*["training"] * 5, "preempted"), 1):
        status.write(state, step)
    assert tried == [1, 3, 5, 6]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith(f"{tmp_path}/status.json: not written (") for line in lines)


def test_a_notice_of_maintenance_is_seen(monkeypatch):
    """The third read of the metadata returns a notice of maintenance, which becomes the reason to stop."""
    notices = iter(("", "", "maintenance-event TERMINATE"))
    monkeypatch.setattr(monitor.metadata, "host", lambda: "here")
    monkeypatch.setattr(monitor.metadata, "notice", notices.__next__)
    monkeypatch.setattr(monitor.StopRequests, "SECONDS", 0.01)
    with monitor.StopRequests() as requests:
        assert not requests.reason
        until(lambda: requests.reason)
    with pytest.raises(Preempted, match="^maintenance-event TERMINATE: saved at step 7; the same command resumes"):
        requests.stop(7)


HANGING = """
import sys
import tensorflow as tf
from axial.training.monitor import StopRequests
with StopRequests() as requests:
    print("hangs", flush=True)
    try:
        tf.queue.FIFOQueue(1, tf.int32).dequeue()  # blocks like a step that waits for another host
    finally:
        print("went on", flush=True)
"""


def test_a_second_interrupt_ends_a_step_that_hangs():
    """The first SIGINT prints a line. The second one ends the process with exit code 130 while TensorFlow blocks."""
    env = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(axial.__file__))}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", HANGING], env=env, **pipes) as process:
        try:
            assert process.stdout.readline() == "hangs\n"
            process.send_signal(signal.SIGTERM)  # SIGTERM never ends a process at once
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == "\n"
            assert "SIGINT: saves after this step" in process.stderr.readline()
            time.sleep(0.5)
            assert process.poll() is None
            asked = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and "SIGINT: ends at once" in err and "went on" not in out, (out, err)
    assert time.monotonic() - asked < 10


def test_requests_leave_nothing_behind():
    """After three contexts, the process has no more open files than before, and no wakeup descriptor."""
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with monitor.StopRequests() as requests:
            signal.raise_signal(signal.SIGINT)
            assert requests.reason == "SIGINT"
    until(lambda: len(os.listdir("/proc/self/fd")) <= files)
    assert signal.set_wakeup_fd(-1) == -1


def test_a_step_that_hangs_shows_every_thread(capfd):
    """If no call comes within the limit, all threads' stacks are printed. Calls within the limit print nothing."""

    def hang_here():
        time.sleep(0.8)

    thread = threading.Thread(target=hang_here)
    with contextlib.ExitStack() as stack:
        stack.callback(faulthandler.cancel_dump_traceback_later)
        monitor.show_hangs(0.3)
        thread.start()
        thread.join()
        errors = capfd.readouterr().err
        assert "Timeout" in errors
        assert "hang_here" in errors and "test_a_step_that_hangs_shows_every_thread" in errors
        for _ in range(8):
            monitor.show_hangs(2.0)  # far more than the pause below, also on a busy machine
            time.sleep(0.3)
        monitor.show_hangs(1e30)  # effectively never
        assert "Timeout" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "folder,steps,calls",
    [
        ("run", [90, 98], []),
        ("run", [90, 99, 105, 110, 120], ["run", "stop"]),
        ("run", [105, 107], ["run", "stop"]),  # the training resumes and stops within the trace
        (None, [99, 110], []),  # a worker that is not the chief
    ],
)
def test_a_trace_has_the_steps_that_are_asked_for(tmp_path, monkeypatch, folder, steps, calls):
    """A trace of steps 100 to 110 starts after step 99 and stops after step 110. Loops end at these two steps."""
    called = []
    monkeypatch.setattr(tf.profiler.experimental, "start", called.append)
    monkeypatch.setattr(tf.profiler.experimental, "stop", lambda: called.append("stop"))
    monkeypatch.chdir(tmp_path)
    with monitor.Profile(folder, (100, 110)) as profile:
        assert [profile.bound(step, step + 25) for step in (50, 90, 99, 105, 110)] == [75, 99, 110, 110, 135]
        for step in steps:
            profile.at(step)
    assert called == calls


def test_a_profile_is_not_written_through_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plugins").symlink_to(tmp_path)
    refused = pytest.raises(InputError, match="plugins/profile: a link that leads out of")
    with refused, monitor.Profile(str(tmp_path / "run"), (1, 2)):
        pass
    with monitor.Profile(str(tmp_path / "run"), None):
        pass
