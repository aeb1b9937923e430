"""The supervisor that runs on each host of a slice: exit codes, deadline, lease, lost hosts."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from axial.cloud import runs
from axial.cloud.lease import FILE, Lease
from axial.errors import InputError
from tests.cloud.slice_fixture import below, kill, until, untouched


def finish(process):
    return process.wait(30)


@pytest.mark.parametrize(
    "plan, code, starts",
    [
        ((), 0, 1),
        (("4 2",), 2, 1),
        (("4 1", "8 -9", "9 -11"), 0, 4),  # a new checkpoint each time
        (("5 1", "5 1", "5 -9"), 137, 3),
    ],
)
def test_ends_of_the_trainer(here, plan, code, starts):
    """The stand-in for the trainer prints an incomplete last line, as if it were killed while printing."""
    here.plan(*plan)
    assert finish(here.start()) == code
    assert len(here.starts()) == starts and f"ends with {code}" in here.output()
    assert "TWO TRAINERS" not in here.log and not (here.model / FILE).exists()
    if code == 0:
        assert here.weights() == untouched()


def test_the_trainer_gets_the_run_of_one_host(here):
    here.describe("--gin_file=a.gin", "--steps=2", gin="STEPS = 3\n", generation="v5e", environment={"TPU_X": "1"})
    environment = {"TPU_NAME": "another", "TF_CONFIG": "{}", "TPU_WORKER_ID": "0", "TPU_LOAD_LIBRARY": "0"}
    assert finish(here.start(environment=environment)) == 0
    ((arguments, variables),) = here.starts()
    assert arguments[:3] == ["--strategy=tpu", "--tpu=local", f"--model_dir={here.model}"]
    assert arguments[3].startswith("--gin_file=/") and arguments[4:] == ["--gin_file=a.gin", "--steps=2"]
    assert variables.items() >= {"TPU_WORKER_ID": "0", "TPU_X": "1", "AXIAL_TPU": "v5e"}.items()
    assert not {"TPU_NAME", "TPU_LOAD_LIBRARY"} & set(variables)


CONTAINER = "unshare --user --map-root-user --pid --fork --mount-proc --kill-child".split()


@pytest.mark.parametrize("inside", [[], CONTAINER], ids=["host", "container"])
def test_a_request_to_stop_reaches_the_trainer(here, inside):
    """The supervisor needs a handler: the kernel drops signals that process 1 of a container does not handle."""
    if subprocess.run([*inside, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine makes no process namespaces")
    here.plan("4 hang")
    process = here.start(command=[*inside, *runs.SUPERVISOR.split()])
    until(lambda: here.saved() == 4)
    os.kill(below(process.pid)[0] if inside else process.pid, signal.SIGTERM)
    assert finish(process) == 42 and len(here.starts()) == 1 and here.saved() == 4
    assert finish(here.start()) == 0 and here.weights() == untouched()


def test_the_deadline_ends_what_runs_and_no_restart_renews_it(here):
    here.describe("--steps=100000", "--pause=0.05", seconds=6)
    assert finish(here.start()) == 124
    steps = here.weights()[0]
    assert 0 < steps < 100000  # the trainer saved before its end
    assert finish(here.start()) == 124
    assert len(here.starts()) == 1 and here.weights()[0] == steps


def test_two_runs_in_one_folder_never_train_at_the_same_time(here):
    """The second run waits longer than a lease of 3 s, and exits with code 2, because the first run continues."""
    here.describe("--steps=100000", "--pause=0.02", pace=0.05)
    first = here.start(0)
    until(here.starts)
    here.describe("--steps=100000", pace=0.05, name="other")
    impatient = "from axial.cloud import supervisor; supervisor.PATIENCE = 80; raise SystemExit(supervisor.main())"
    assert finish(here.start(0, command=[sys.executable, "-c", impatient])) == 2
    assert "run trains there, on" in here.output()
    assert len(here.starts()) == 1 and first.poll() is None
    first.send_signal(signal.SIGTERM)
    assert finish(first) == 42


def test_a_run_waits_for_the_lease_of_one_that_was_killed(here):
    """If only the supervisor is killed, its trainer ends too."""
    here.plan("4 hang")
    process = here.start()
    until((here.model / "weights").exists)
    process.kill()
    assert finish(process) and (here.model / FILE).exists()
    assert finish(here.start()) == 0 and here.weights() == untouched()
    assert "waits for the lease" in here.output() and "TWO TRAINERS" not in here.log


def test_a_lease_that_another_has_taken_ends_the_trainer(here):
    here.describe("--steps=100000", "--pause=0.02", pace=0.05)
    process = here.start()
    until(here.starts)
    until(lambda: json.loads((here.model / FILE).read_text())["beat"] == 2)  # the lease has just been renewed
    (here.model / FILE).write_text('{"token": "x", "beat": 1, "run": "other", "host": "h"}')
    assert finish(process) == 42 and "the lease of the folder is lost" in here.output()
    assert "other" in (here.model / FILE).read_text()


def test_leases_of_two_who_start_at_once(tmp_path):
    """If two runs write their leases at once, the last writer gets the lease."""
    first, second = (Lease(str(tmp_path), name, 1.0) for name in ("a", "b"))
    write = first._write
    first._write = lambda: (write(), second._write())
    assert not first.take(9.0) and not first._thread.is_alive()
    assert second._read().run == "b"


def test_a_damaged_lease_is_taken_as_one_of_a_silent_holder(tmp_path):
    (tmp_path / FILE).write_text("{")
    lease = Lease(str(tmp_path), "a", 0.5)
    assert not lease.take(9.0)
    until(lambda: lease.take(9.0))
    (tmp_path / FILE).write_text("{")
    until(lambda: lease._read().run == "a", 5)  # the next renewal repairs the file
    assert not lease.lost.is_set()
    lease.release()


def test_a_lease_in_a_bucket(tmp_path):
    import tensorflow as tf

    folder = f"ram://{tmp_path.name}"
    lease, other = Lease(folder, "a", 2.0), Lease(folder, "b", 2.0)
    assert lease.take(9.0) and not other.take(9.0)
    time.sleep(3.0)
    assert not other.take(9.0) and not lease.lost.is_set()  # the first holder renews its lease
    with pytest.raises(InputError, match="a trains there, on .*"):
        until(lambda: other.take(0.5) or time.sleep(0.1), 5)
    lease.release()
    assert not tf.io.gfile.exists(f"{folder}/{FILE}") and Lease(folder, "b", 0.6).take(9.0)


def test_a_description_that_is_none_is_one_line(monkeypatch):
    for variables, said in (
        ({runs.VARIABLE: "{}"}, "AXIAL_RUN: not the description of a run"),
        ({"AXIAL_HOST": "1"}, "AXIAL_HOST=1"),
        ({"AXIAL_HOSTS": "a,b"}, "expected one of 1 hosts"),
    ):
        run = runs.Run(name="run", arguments=[], model_dir="m", deadline=0.0)
        for name, value in {runs.VARIABLE: run.to_json(), "AXIAL_HOST": "0", "AXIAL_HOSTS": "", **variables}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=said):
            runs.from_environment()


# === Several hosts ===


def together(here, **options):
    """Starts the processes of a slice with three hosts."""
    here.describe(hosts=3, **options)
    return [here.start(host) for host in range(3)]


def test_all_hosts_end_with_the_code_of_the_first(here):
    here.plan("4 1", "6 2")
    assert [finish(process) for process in together(here)] == [2] * 3
    arguments, variables = here.starts()[0]
    tpu = ",".join(f"grpc://127.0.0.{host}:{here.run.port}" for host in (1, 2, 3))
    assert arguments[1] == f"--tpu={tpu}" and variables["TPU_LOAD_LIBRARY"] == "0"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_ends_the_others_with_42(here, lost):
    here.plan("4 hang")
    processes = together(here)
    until((here.model / "weights").exists)
    kill(processes[lost])
    assert [finish(processes[host]) for host in range(3) if host != lost] == [42, 42]
    processes = [here.start(host) for host in range(3)]
    assert [finish(process) for process in processes] == [0, 0, 0]
    assert here.weights() == untouched() and "TWO TRAINERS" not in here.log


def test_a_trainer_that_fails_for_a_lost_host_is_no_bad_input(here):
    """If a server dies, TensorFlow raises an error, and axial-train exits with 2. The supervisors exit with 42."""
    here.plan("8 2")
    (here.model / "hold").touch()
    here.describe(hosts=3)
    processes = [here.start(host) for host in range(3)]
    until(lambda: here.saved() == 8)
    processes[2].send_signal(signal.SIGSTOP)  # the stopped host's connection stays open
    (server,) = below(processes[2].pid)
    os.kill(server, signal.SIGKILL)
    (here.model / "hold").unlink()
    assert [finish(process) for process in processes[:2]] == [42, 42]
    assert "a host is lost, the trainer has ended with 2" in here.output()
    processes[2].send_signal(signal.SIGCONT)
    assert finish(processes[2]) == 42


def test_a_host_that_shall_stop_lets_the_trainer_save(here):
    here.plan("5 hang")
    processes = together(here)
    until((here.model / "hangs").exists)
    processes[2].send_signal(signal.SIGTERM)
    assert [finish(process) for process in processes] == [42, 42, 42]
    assert here.weights()[0] == 5  # the last regular save was at step 4


def test_hosts_that_do_not_come_are_not_waited_for(here):
    here.describe(hosts=2, pace=0.001)
    assert finish(here.start(0)) == 42 and "some hosts do not come" in here.output(0)
    assert finish(here.start(1)) == 42 and "the first host does not come" in here.output(1)
    assert not here.starts()
