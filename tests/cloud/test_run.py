"""The loop of axial-tpu run against stand-ins of the three APIs, through their real client libraries."""

import dataclasses
import os
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("google.cloud.tpu_v2")
pytest.importorskip("google.cloud.compute_v1")
pytest.importorskip("kubernetes")

import stand_ins
from axial.cloud import compute_engine, workers
from axial.cloud.backend import MARGIN, Request, State
from axial.cloud.calls import Calls, NoQuota, Refused, Taken
from axial.cloud.compute_engine import ComputeEngine
from axial.cloud.gke import Gke
from axial.cloud.queued_resources import QueuedResources
from axial.cloud.run import Ended, Loop, Seam
from axial.cloud.slices import find_slice
from axial.errors import InputError, Preempted
from axial.io.read import read_json
from axial.io.schemas import RunStatus
from conftest import ROOT

BACKENDS = {kind.name: kind for kind in (QueuedResources, ComputeEngine, Gke)}
POLL = 0.05
UP = ("waiting", "creating", "active")


class World:
    """A `Cloud`, a back end that talks to it, and what the loop says."""

    def __init__(self, cloud, address, folder, **options):
        self.cloud, self.said = cloud, []
        self.model_dir = f"file://{folder}/model"
        wanted = {"name": "run", "project": "p", "zone": "us-west4-a", "slice": find_slice("v5p-16")}
        limit = options.pop("limit", None)
        request = Request(**{**wanted, **options})
        calls = Calls(timeout=1.0, first_wait=POLL, tries=4, say=self.said.append)
        self.backend = BACKENDS[cloud.backend](request, calls, endpoint=address, poll=POLL)
        package = workers.Package(stand_ins.small_package(folder), "digest")
        arguments = "--gin_file=a.gin", f"--model_dir={self.model_dir}"
        self.job = workers.Job("run", arguments, package, "echo installed here")
        self.seam = Seam(read_status=self.status, say=self.said.append, poll=POLL, limit=limit)

    def status(self):
        path = f"{self.model_dir}/status.json"
        return read_json(path, RunStatus)[1] if os.path.exists(path.removeprefix("file://")) else None

    def run(self):
        Loop(self.backend, self.job, self.seam).run()


@pytest.fixture
def world(tmp_path, monkeypatch, request):
    """Function that makes a `World`: of the API that the test's parameter names, with lives and options."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    open_servers = []

    def make(api, lives, *, lag=0, **options):
        cloud = api(tmp_path, lives, lag=lag, hosts=2)
        server = stand_ins.serving(cloud)
        open_servers.append(server)
        return World(cloud, server.__enter__(), str(tmp_path), **options)

    yield make
    for server in open_servers:
        server.__exit__(None, None, None)


every_api = pytest.mark.parametrize("api", stand_ins.APIS, ids=lambda api: api.backend)


@every_api
def test_a_run_ends_when_its_last_step_is_reached(world, api, capsys):
    here = world(api, [UP])
    here.cloud.plan("100 0")
    here.run()
    (start,) = here.cloud.starts()
    addresses = ",".join(f"grpc://10.0.0.{i}:8470" for i in range(2))
    assert start == ["--strategy=tpu", f"--tpu={addresses}", "--gin_file=a.gin", f"--model_dir={here.model_dir}"]
    assert here.cloud.made == 1 and here.status().state == "done"
    assert "step 100 of 100, then 0" in capsys.readouterr().out
    # what the worker's shell had of another slice is gone
    variables = here.cloud.read("environments")
    assert "TPU_LOAD_LIBRARY=0" in variables and "TPU_WORKER_HOSTNAMES" not in variables
    # the Cloud TPU API's pod images have a server; on other images ours starts on every worker
    servers = sorted(here.cloud.read("servers").splitlines())
    wanted = [] if api is stand_ins.TpuApi else here.cloud.names()
    assert servers == [f"{name} -m axial.cloud.server --listen=all --port=8470" for name in wanted]
    for name in here.cloud.names():
        assert "installed here" in (here.cloud.root / "workers" / name / "axial-run" / "install.log").read_text()


@every_api
def test_preempted_twice_and_suspended_once(world, api):
    """Each time it is deleted before it is made again, and the trainer gets the same arguments."""
    here = world(api, [UP, ("creating", "active"), ("active",), UP], lag=2)
    here.cloud.plan("10 preempted", "20 preempted", "30 suspended", "100 0")
    here.run()
    assert here.cloud.made == 4 and here.cloud.deleted == 3
    starts = here.cloud.starts()
    assert len(starts) == 4 and all(start == starts[0] for start in starts)
    assert here.status().step == 100
    text = "\n".join(here.said)
    assert text.count("it holds its name and quota until it is deleted") == 3
    assert "waiting for the quota of the deleted slice" in text


@every_api
def test_after_a_maintenance_event_the_slice_is_made_again(world, api):
    if api is stand_ins.KubernetesApi:
        pytest.skip("a maintenance event of GKE is the end of a pod")
    here = world(api, [UP, ("active",)])
    here.cloud.plan("10 maintenance", "100 0")
    here.run()
    assert here.cloud.made == 2 and any("maintenance" in line for line in here.said)


@every_api
def test_saved_and_killed_trainers_start_again_on_the_same_slice(world, api):
    here = world(api, [("active",)])
    here.cloud.plan("10 42", "20 137", "30 1", "100 0")
    here.run()
    assert here.cloud.made == 1 and len(here.cloud.starts()) == 4


@pytest.mark.parametrize("code, words", [(2, "bad input"), (70, "a fault of axial")])
def test_what_another_start_would_not_change_ends(world, code, words):
    here = world(stand_ins.TpuApi, [("active",)])
    here.cloud.plan(f"0 {code}", "100 0")
    with pytest.raises(Ended, match=words) as found:
        here.run()
    assert found.value.code == code and len(here.cloud.starts()) == 1


def test_three_failures_without_a_new_step_end(world):
    here = world(stand_ins.TpuApi, [("active",)])
    here.cloud.plan("10 1", "20 1", "20 1", "20 42", "20 1", "100 0")
    with pytest.raises(Ended, match=r"3 times without a new step \(code 1, step 20\)"):
        here.run()
    assert len(here.cloud.starts()) == 5


@every_api
def test_faults_of_the_service_are_tried_again(world, api):
    here = world(api, [UP])
    here.cloud.faults = [("POST", 500), ("GET", 503), ("GET .*run$", "slow"), ("GET .*run$", "lost")]
    here.cloud.plan("100 0")
    here.run()
    assert not here.cloud.faults and here.cloud.made == 1


@every_api
def test_a_creation_whose_answer_is_lost_was_heard(world, api):
    here = world(api, [UP])
    here.cloud.faults = [(f"POST {api.other}$", "lost")]
    here.cloud.plan("100 0")
    here.run()
    assert here.cloud.made == 1 and here.cloud.deleted == 0


@every_api
def test_a_service_that_stays_at_fault_ends_in_one_line(world, api):
    here = world(api, [UP])
    here.cloud.faults = [("GET", 500)] * 9
    with pytest.raises(Refused, match="the service is at fault; tried 4 times"):
        here.run()


@every_api
def test_refused_quota_is_one_line_and_leaves_nothing(world, api):
    here = world(api, [("quota",)])
    with pytest.raises(NoQuota, match="no quota: POST .*[Qq]uota"):
        here.run()
    assert here.cloud.script is None


@every_api
def test_a_slice_that_cannot_be_made_is_deleted(world, api):
    message = "QUOTA_EXCEEDED Quota 'TPUS' exceeded" if api is stand_ins.ComputeApi else "the image does not exist"
    here = world(api, [("waiting", f"failed {message}")])
    with pytest.raises(Ended, match="could not be made: .*(image does not exist|Quota)"):
        here.run()
    assert here.cloud.script is None and here.cloud.deleted == 1


def test_a_failed_slice_of_before_is_made_again(world):
    here = world(stand_ins.TpuApi, [("active",)])
    here.cloud.script = ["failed of yesterday"]
    here.cloud.plan("100 0")
    here.run()
    assert here.cloud.made == 1 and here.cloud.deleted == 1


def test_quota_that_never_comes_back_ends(world):
    here = world(stand_ins.TpuApi, [("active",), ("active",)], lag=99)
    here.cloud.plan("10 preempted", "100 0")
    here.seam = Seam(here.status, say=here.said.append, poll=0.001, wait=lambda seconds: time.sleep(0.001))
    with pytest.raises(Ended, match="has not given its quota back"):
        here.run()


def test_a_slice_that_a_person_stopped_is_left_alone(world):
    here = world(stand_ins.TpuApi, [("active",), ("active",)])
    here.cloud.plan("10 stopped", "100 0")
    with pytest.raises(InputError, match="a person has stopped it"):
        here.run()
    assert here.cloud.deleted == 0


def test_a_run_finds_the_slice_and_the_trainer_of_before(world):
    here = world(stand_ins.TpuApi, [("active",)])
    here.cloud.plan("10 hang")
    stopped = []

    def stop_command():
        stand_ins.until(here.cloud.starts)
        time.sleep(0.3)
        stopped.append(True)

    class Closed(Exception):
        pass

    def say(line):
        here.said.append(line)

    def wait(seconds):
        if stopped:
            raise Closed
        time.sleep(seconds)

    thread = threading.Thread(target=stop_command, daemon=True)
    thread.start()
    here.seam = Seam(here.status, say=say, poll=POLL, wait=wait)
    with pytest.raises(Closed):
        here.run()
    thread.join()
    (pid,) = here.cloud.root.glob("workers/run-0/axial-run/trainer.pid")
    here.cloud.plan("100 0")
    ends = threading.Timer(0.5, lambda: os.kill(int(pid.read_text()), 15))
    ends.start()
    here.seam = Seam(here.status, say=say, poll=POLL)
    here.run()
    ends.join()
    # the second command has started no second trainer beside the first; the next start came after SIGTERM
    assert len(here.cloud.starts()) == 2 and here.cloud.made == 1
    assert any("the trainer ended with 42" in line for line in here.said)


@every_api
def test_the_time_limit_saves_and_deletes(world, api):
    here = world(api, [UP], limit=1.0)
    here.cloud.plan("10 hang")
    with pytest.raises(Preempted, match="--time_limit is over: run is deleted at step 10 of 100"):
        here.run()
    assert here.cloud.script is None and here.cloud.deleted == 1


@every_api
def test_the_cloud_ends_a_slice_only_after_the_loop(world, api):
    """Its own limit counts from each machine's or pod's start, and is there for a laptop that is off."""
    here = world(api, [UP], seconds=7200.0, limit=7200.0)
    here.cloud.plan("100 0")
    here.run()
    if api is stand_ins.ComputeApi:
        scheduling = here.cloud.bodies["instanceTemplates"]["properties"]["scheduling"]
        assert scheduling["maxRunDuration"] == {"seconds": str(7200 + round(MARGIN))}
        assert scheduling["instanceTerminationAction"] == "DELETE"
    if api is stand_ins.KubernetesApi:
        job = here.cloud.bodies["jobsets"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert job["template"]["spec"]["activeDeadlineSeconds"] == 7200 + MARGIN
        assert "activeDeadlineSeconds" not in job  # it would count the wait for capacity
        (container,) = job["template"]["spec"]["containers"]
        assert container["command"][0] == "bash"  # as first process it reads the codes of orphans


def test_an_operation_that_never_ends_is_one_line(world, monkeypatch):
    monkeypatch.setattr(compute_engine, "MOST_LOOKS", 3)
    here = world(stand_ins.ComputeApi, [UP])
    started = here.cloud.operation

    def never_done(place):
        found = started(place)
        here.cloud.operations[found["name"]]["status"] = "RUNNING"
        return found

    here.cloud.operation = never_done
    waits = []

    def wait(seconds):
        waits.append(seconds)
        assert len(waits) < 20

    here.backend.wait = wait
    with pytest.raises(InputError, match="--name=run: regions/us-west4/operations/operation-0 does not end"):
        here.run()


@every_api
def test_a_trainer_with_other_flags_is_left_alone(world, api):
    here = world(api, [("active",)], limit=20.0)  # a loop that follows the other trainer ends too
    here.cloud.plan("10 hang")
    found = Loop(here.backend, here.job, here.seam).bring_up()
    shell = workers.Shell(here.backend, here.said.append)
    workers.install(shell, found, here.job)
    workers.start(shell, here.backend, found, here.job)
    stand_ins.until(here.cloud.starts)
    (folder,) = here.cloud.root.glob(f"workers/{here.cloud.names()[0]}/axial-run")
    old = folder / "axial" / "old.py"  # an installation would delete it
    old.parent.mkdir()
    old.touch()
    first, package = here.job, workers.Package(here.job.package.path, "another digest")
    here.job = dataclasses.replace(first, package=package, arguments=("--gin_file=b.gin", *first.arguments[1:]))
    with pytest.raises(workers.Busy, match="--name=run: a trainer with other flags runs there"):
        here.run()
    with pytest.raises(InputError, match="trainer runs already, with another command"):
        workers.start(shell, here.backend, found, here.job)
    assert workers.is_running(shell, here.backend, found, first) and old.exists()
    assert len(here.cloud.starts()) == 1
    here.cloud.plan("100 0")
    assert shell.run(found[0], workers.stop_command(here.job)) == (0, "")
    stand_ins.until(lambda: not workers.is_running(shell, here.backend, found, first))
    here.run()
    assert "--gin_file=b.gin" in here.cloud.starts()[1] and not old.exists()


def test_a_server_of_an_earlier_command_stays(world, monkeypatch):
    here = world(stand_ins.ComputeApi, [("active",)])
    here.cloud.plan("10 hang")
    first, *_ = Loop(here.backend, here.job, here.seam).bring_up()
    shell = workers.Shell(here.backend, here.said.append)
    workers.install(shell, [first], here.job)
    assert shell.run(first, workers.server_command(here.backend, here.job))[0] == 0
    monkeypatch.setattr(workers, "SLICE_VARIABLES", ())
    code, said = shell.run(first, workers.server_command(here.backend, here.job))
    assert code == 0 and "server runs already, with another command" in said


ADOPTS = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
job = ["bash", sys.argv[1]]
subprocess.run([*job, "start", "run", "bash", "-c", "echo hello; exit 7"], check=True)
subprocess.run([*job, "follow", "run", "1"], check=True, timeout=20)
"""


def test_a_job_ends_where_nobody_reads_the_codes_of_orphans(tmp_path):
    """As in a container whose first process is sleep: the job's process stays as a zombie."""
    command = [sys.executable, "-c", ADOPTS, ROOT / "scripts" / "tpu" / "job.sh"]
    result = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == "hello\naxial-tpu: run ended with 7\n"


@every_api
def test_an_installation_that_fails_is_one_line(world, api):
    here = world(api, [("active",)])
    here.job = workers.Job("run", (), here.job.package, "echo no wheel for this Python; false")
    with pytest.raises(InputError, match=r"worker \d: the installation failed, .*no wheel for this Python"):
        here.run()


def test_a_package_replaces_the_files_of_an_earlier_one(world):
    """Its archive has no times, so what pip has built of the earlier one would count as new."""
    here = world(stand_ins.TpuApi, [UP])
    here.cloud.plan("100 0")
    here.run()
    folders = [here.cloud.root / "workers" / name / "axial-run" for name in here.cloud.names()]
    stale = [folder / path for folder in folders for path in ("axial/old.py", "build/lib/axial/old.py", "gin/old.gin")]
    for path in stale:
        path.parent.mkdir(parents=True)
        path.touch()
    found = here.backend.workers()
    workers.install(workers.Shell(here.backend), found, here.job)
    assert all(path.exists() for path in stale)  # the same package
    package = workers.Package(here.job.package.path, "another digest")
    workers.install(workers.Shell(here.backend), found, dataclasses.replace(here.job, package=package))
    assert not any(path.exists() for path in stale)
    assert all((folder / "scripts/tpu/job.sh").exists() for folder in folders)


@every_api
def test_preempted_in_the_installation(world, api):
    """The slice is made again, whatever the installation said when its worker went away."""
    here = world(api, [UP, UP])
    here.cloud.plan("100 0")
    root = here.cloud.root
    take = f"echo preempted >{root}/new; mv {root}/new {root}/taken"
    install = f"[ -e {root}/tried ] || {{ touch {root}/tried; {take}; echo lost; false; }}"
    here.job = workers.Job("run", here.job.arguments, here.job.package, install)
    here.run()
    assert here.cloud.made == 2 and here.cloud.deleted == 1 and here.status().state == "done"


@every_api
def test_a_worker_that_cannot_be_reached_is_tried_again(world, api):
    here = world(api, [("active",)])
    here.job = workers.Job("run", (), here.job.package, "exit 255")
    with pytest.raises(Ended, match=r"worker \d: the installation failed"):
        here.run()
    assert sum("trying again" in line for line in here.said) == 2


@every_api
def test_a_slice_of_another_kind_is_left_alone(world, api):
    """It has the name, and another size or other software."""
    here = world(api, [("active",)])
    here.backend.create()
    runtime = "v2-alpha-tpuv5" if api is stand_ins.TpuApi else "other"
    for changed in ({"slice": find_slice("v5p-32")}, {"runtime": runtime}):
        request = dataclasses.replace(here.backend.request, **changed)
        other = type(here.backend)(request, here.backend.calls, endpoint=here.backend._endpoint, poll=POLL)
        with pytest.raises(InputError, match="--name=run: is in use, by .* with .*; choose another name"):
            Loop(other, here.job, here.seam).bring_up()
    assert here.cloud.deleted == 0
    again = type(here.backend)(here.backend.request, here.backend.calls, endpoint=here.backend._endpoint, poll=POLL)
    assert len(Loop(again, here.job, here.seam).bring_up()) == 2


@every_api
def test_create_names_a_slice_that_is_there(world, api):
    here = world(api, [("active",), ("active",)])
    here.backend.create()
    with pytest.raises(Taken):
        here.backend.create()
    assert here.backend.status().state is State.ACTIVE
    assert [worker.address for worker in here.backend.workers()] == [f"10.0.0.{i}" for i in range(2)]
    here.backend.delete()
    here.backend.delete()  # of what is absent
    assert here.backend.status().state is State.ABSENT


@every_api
def test_a_dry_run_prints_what_a_run_sends(world, api):
    """The same methods, addresses and bodies, and no request."""
    here = world(api, [("active",)])
    here.cloud.plan("100 0")
    here.run()
    sent = list(dict.fromkeys(here.cloud.log))
    count = len(here.cloud.log)
    dry = []
    calls = Calls(dry_run=True, say=dry.append)
    backend = BACKENDS[api.backend](here.backend.request, calls, endpoint=here.backend._endpoint)
    Loop(backend, here.job, Seam(lambda: None, say=dry.append, wait=lambda seconds: None)).run()
    assert len(here.cloud.log) == count
    printed = [line.split("?")[0].split("\n")[0] for line in dry if line.startswith(("GET", "POST", "DELETE"))]
    printed = {line.replace(here.backend._endpoint, "").replace("ADDRESS", "") for line in printed}
    ours = [line for line in sent if "operations" not in line and "instances/" not in line and "listErrors" not in line]
    assert set(ours) <= printed
    commands = [line for line in dry if line.startswith("$ ")]
    assert sum("job.sh start trainer" in line for line in commands) == 1
    assert sum(" scp " in line or " cp " in line for line in commands) == 2
