"""What watches a training: status, requests to stop, hanging steps, the length of loops; and saves that try again."""

import http.server
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
from axial.errors import InputError
from axial.io import metadata as server
from axial.io import schemas
from axial.io.read import read_json
from axial.training import monitor


def test_a_status_has_percentiles_of_the_loops(tmp_path, monkeypatch):
    status = monitor.Status(str(tmp_path), steps=300, batch=8)
    status.write("training", 0)
    assert read_json(str(tmp_path / "status.json"), schemas.RunStatus)[1].seconds_per_step is None
    status.add_loop(1, 1000.0)  # compiles
    assert status.speed() == {}
    for seconds in range(1, 101):
        status.add_loop(2, 2 * seconds, waited=0.5 * seconds)
    monkeypatch.setattr(monitor.Status, "SECONDS", 0)
    status.write("training", 200)
    found = read_json(str(tmp_path / "status.json"), schemas.RunStatus)[1]
    assert (found.state, found.step, found.steps) == ("training", 200, 300)
    times = found.seconds_per_step, found.seconds_per_step_p90, found.seconds_per_step_p99
    assert times == pytest.approx((50.5, 90.1, 99.01))
    assert found.images_per_second == pytest.approx(8 / 50.5)
    assert found.input_bound == pytest.approx(0.25)
    assert "CPU" in found.machine["devices"] and found.machine["tensorflow"] == tf.__version__


def test_a_status_is_written_now_and_then_or_when_the_state_is_new(tmp_path, monkeypatch):
    times, found = iter((100, 110, 115, 116)), []
    monkeypatch.setattr(monitor, "time", types.SimpleNamespace(monotonic=times.__next__))
    status = monitor.Status(str(tmp_path), steps=300, batch=8)
    for state, step in (("training", 1), ("training", 2), ("training", 3), ("preempted", 4)):
        status.write(state, step)
        found.append(read_json(str(tmp_path / "status.json"), schemas.RunStatus)[1].step)
    assert found == [1, 1, 3, 4]


@pytest.mark.parametrize(
    "error", [tf.errors.UnknownError(None, None, "Stale file handle"), InputError("no"), OSError(5, "?")]
)
def test_a_status_that_cannot_be_written_ends_nothing(tmp_path, monkeypatch, capfd, error):
    tried = []

    def failing(path, value):
        tried.append(value["step"])
        raise error

    monkeypatch.setattr(monitor, "write_json", failing)
    times = iter((100, 120, 399, 400, 401))
    monkeypatch.setattr(monitor, "time", types.SimpleNamespace(monotonic=times.__next__))
    status = monitor.Status(str(tmp_path), steps=300, batch=8)
    for step, state in enumerate(("training", "training", "training", "training", "preempted"), 1):
        status.write(state, step)
    assert tried == [1, 4, 5]  # after a failure it is left alone for a while
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith(f"{tmp_path}/status.json: not written (") for line in lines)


def test_loops_are_bounded_in_seconds():
    length = monitor.LoopLength(most=100, seconds=10)
    assert length.steps == 1
    length.add_loop(1, 120.0)  # compiles
    assert length.steps == 1
    for steps, seconds, expected in ((1, 0.01, 2), (2, 0.02, 4), (4, 8.0, 5), (5, 30.0, 1), (1, 60.0, 1)):
        length.add_loop(steps, seconds)
        assert length.steps == expected
    for _ in range(10):
        length.add_loop(length.steps, length.steps * 0.001)
    assert length.steps == 100


NOTICE = "TERMINATE_ON_HOST_MAINTENANCE"


class _Metadata(http.server.BaseHTTPRequestHandler):
    """Google Cloud's metadata server."""

    maintenance, flavors, asked, answer = "NONE", set(), None, None

    def do_GET(self):
        self.flavors.add(self.headers["Metadata-Flavor"])
        if self.asked:
            self.asked.set()
            self.answer.wait()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"FALSE" if "preempted" in self.path else self.maintenance.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata(monkeypatch):
    """A metadata server's class, whose `maintenance` is what it says."""
    answers = type("Metadata", (_Metadata,), {})
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), answers)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{found.server_port}")
    yield answers
    found.shutdown()
    found.server_close()


def test_a_notice_of_maintenance_is_seen(metadata, monkeypatch):
    monkeypatch.setattr(monitor.StopRequests, "SECONDS", 0.05)
    with monitor.StopRequests() as requests:
        time.sleep(0.3)
        assert not requests.reason
        metadata.maintenance = NOTICE
        for _ in range(200):
            if requests.reason:
                break
            time.sleep(0.05)
    assert requests.reason == f"maintenance-event {NOTICE}"
    assert metadata.flavors == {"Google"}


def test_a_signal_while_the_metadata_are_asked_for_is_not_forgotten(metadata, monkeypatch):
    monkeypatch.setattr(monitor.StopRequests, "SECONDS", 0.01)
    metadata.asked, metadata.answer = threading.Event(), threading.Event()
    with monitor.StopRequests() as requests:
        assert metadata.asked.wait(60)
        signal.raise_signal(signal.SIGTERM)
        metadata.answer.set()
        for _ in range(20):  # until the answers are there
            assert requests.reason == "SIGTERM"
            time.sleep(0.02)


HANGING = """
import sys
import tensorflow as tf
from axial.training.monitor import StopRequests
with StopRequests() as requests:
    print("hangs", flush=True)
    try:
        tf.queue.FIFOQueue(1, tf.int32).dequeue()  # as a step that waits for another host
    finally:
        print("went on", flush=True)
"""


def test_a_second_interrupt_ends_a_step_that_hangs():
    env = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(axial.__file__))}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", HANGING], env=env, **pipes) as process:
        try:
            assert process.stdout.readline() == "hangs\n"
            process.send_signal(signal.SIGTERM)  # which no number of times ends it so
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
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with monitor.StopRequests() as requests:
            signal.raise_signal(signal.SIGINT)
            assert requests.reason == "SIGINT"
    for _ in range(100):
        if threading.active_count() <= threads and len(os.listdir("/proc/self/fd")) <= files:
            break
        time.sleep(0.05)
    assert threading.active_count() <= threads and len(os.listdir("/proc/self/fd")) <= files
    assert signal.set_wakeup_fd(-1) == -1


def test_no_metadata_server_is_asked_elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    product = tmp_path / "product_name"
    monkeypatch.setattr(server, "PRODUCT_FILE", str(product))
    assert server.host() is None
    product.write_text("Standard PC\n")
    assert server.host() is None
    product.write_text("Google Compute Engine\n")
    assert server.host() == "metadata.google.internal"


def test_a_step_that_hangs_shows_every_thread(capfd):
    def hang_here():
        time.sleep(0.8)

    thread = threading.Thread(target=hang_here)
    with monitor.Watchdog(0.3):
        thread.start()
        thread.join()
    found = capfd.readouterr().err
    assert "Timeout" in found
    assert "hang_here" in found and "test_a_step_that_hangs_shows_every_thread" in found
    with monitor.Watchdog(3.0) as watchdog:  # far more than a pause, also on a busy machine
        for _ in range(8):
            time.sleep(0.4)
            watchdog.reset()
    with monitor.Watchdog(1e30):  # as good as never
        pass
    with monitor.Watchdog(0.3) as watchdog, watchdog.paused():  # as long as another worker evaluates
        time.sleep(0.8)
    assert "Timeout" not in capfd.readouterr().err


@pytest.fixture
def traces(monkeypatch):
    """The calls of TensorFlow's profiler."""
    calls = []
    monkeypatch.setattr(tf.profiler.experimental, "start", calls.append)
    monkeypatch.setattr(tf.profiler.experimental, "stop", lambda: calls.append("stop"))
    return calls


def test_a_trace_has_the_steps_that_are_asked_for(traces):
    profile = monitor.Profile("run", (100, 110))
    assert [profile.bound(step, step + 25) for step in (50, 90, 99, 105, 110)] == [75, 99, 110, 110, 135]
    both = ["run", "stop"]
    for begin, end, calls in ((90, 99, []), (99, 105, ["run"]), (105, 110, both), (110, 120, both)):
        profile.before(begin)
        profile.after(end)
        assert traces == calls
    profile.close()
    assert traces == both


def test_a_trace_that_fails_ends_nothing(monkeypatch, capfd):
    def failing(*_):
        raise tf.errors.AlreadyExistsError(None, None, "Another profiler is running.")

    monkeypatch.setattr(tf.profiler.experimental, "start", failing)
    profile = monitor.Profile("run", (100, 110))
    profile.before(99)
    monkeypatch.setattr(tf.profiler.experimental, "start", lambda _: None)
    monkeypatch.setattr(tf.profiler.experimental, "stop", failing)
    profile.before(105)
    profile.close()
    assert capfd.readouterr().err.count("the trace: not written (Another profiler is running.)") == 2


def test_a_run_that_resumes_or_ends_in_a_trace_writes_it(traces):
    first, second, third = (monitor.Profile("run", (100, 110)) for _ in range(3))
    first.before(99)
    first.after(105)
    first.close()  # the run was stopped
    assert traces == ["run", "stop"]
    second.before(105)
    second.after(110)
    second.close()
    assert traces == ["run", "stop"] * 2
    third.before(110)
    third.after(120)
    third.close()
    assert traces == ["run", "stop"] * 2


def test_workers_end_their_loops_together_and_one_writes_the_trace(traces):
    other = monitor.Profile(None, (100, 110))
    assert other.bound(90, 115) == monitor.Profile("run", (100, 110)).bound(90, 115) == 99
    other.before(99)
    other.after(110)
    other.close()
    assert not traces


def test_a_profile_is_not_written_through_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plugins").symlink_to(tmp_path)
    with pytest.raises(InputError, match="plugins/profile: a link that leads out of"):
        monitor.Profile(str(tmp_path / "run"), (1, 2))
    monitor.Profile(str(tmp_path / "run"), None)
