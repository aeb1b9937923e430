"""The start-up script that axial writes runs in bash, with stand-ins for the programs of a TPU VM."""

import re
import subprocess
import time

import pytest

from axial import slices
from axial.cloud import runs
from axial.cloud.engines import MARGIN, Gcloud, Request
from axial.errors import InputError

WHEEL = "gs://b/axial_deeplab_tf-1.0-py3-none-any.whl"


def request(**more):
    values = {"slice": slices.find_slice("v5e-16"), "project": "p", "zone": "us-west4-a", "wheel": WHEEL}
    return Request("run", **{**values, **more})


def run(engine, seconds=3600):
    values = {"name": "run", "arguments": ["--a=it's"], "model_dir": "gs://b/run", "deadline": time.time() + seconds}
    return runs.Run(**values, **engine.run_options())


@pytest.fixture
def host(tools, tmp_path):
    """A function that runs the start-up script of a request. It returns (log lines, calls of gcloud, process)."""

    def boot(codes=(), installs=True, seconds=3600, **more):
        """Boots a host. `codes` are the supervisor's exit codes in order. `installs`: whether install.sh succeeds."""
        engine = Gcloud(request(**more))
        root = tmp_path / "root"
        root.mkdir(exist_ok=True)
        (tmp_path / "codes").write_text("\n".join(map(str, codes)))
        programs = {
            "curl": 'case "$*" in *agent-worker-number) echo 2 ;; '
            "*) echo unknown:unknown:10.0.0.1,unknown:unknown:10.0.0.2,x:x:10.0.0.3,x:x:10.0.0.4 ;; esac",
            "sleep": f'echo "sleep $*" >>{tmp_path}/log',
            "python3": f"""case "$*" in
"-m zipfile"*) mkdir -p files/axial/scripts/tpu
  echo 'echo installs >>{tmp_path}/log; {"" if installs else "exit 1"}' >files/axial/scripts/tpu/install.sh ;;
*) echo "host $AXIAL_HOST of $AXIAL_HOSTS, $AXIAL_RUN" >>{tmp_path}/log
  code=$(head -n 1 {tmp_path}/codes); sed -i 1d {tmp_path}/codes
  if [ "$code" = hang ]; then exec /bin/sleep 60; fi
  exit "${{code:-0}}" ;;
esac""",
        }
        for name, does in programs.items():
            path = tmp_path / "tools" / "bin" / name
            path.write_text(f"#!/bin/bash\n{does}\n")
            path.chmod(0o755)
        text = engine.text(run(engine, seconds)).replace("HOME=/root", f"HOME={root}")
        done = subprocess.run(["bash"], input=text, capture_output=True, text=True, check=True, timeout=60)
        log = tmp_path / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines, tools.calls(), done

    return boot


DELETE = "gcloud compute tpus queued-resources delete run --project=p --zone=us-west4-a --force --async --quiet"


def test_a_run_from_boot_to_deletion(host):
    lines, calls, done = host()
    assert lines[0] == "installs" and len(lines) == 2
    assert lines[1].startswith('host 2 of 10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4, {"name":"run","arguments":["--a=it\'s"]')
    assert calls == [f"gcloud storage cp {WHEEL} .", DELETE] and "ended with 0; the slice is deleted" in done.stdout
    lines, _, _ = host([42, 0])  # the second boot does not install again
    assert [line[:7] for line in lines] == ["host 2 ", "sleep 3", "host 2 "]


@pytest.mark.parametrize("codes, starts", [((42, 42, 0), 3), ((42, 2), 2), ((137,), 1)])
def test_42_starts_again_and_every_other_end_deletes(host, codes, starts):
    lines, calls, done = host(codes, slice=slices.find_slice("v5e-8"))
    assert [line[:7] for line in lines] == ["install", *["host  o", "sleep 3"] * (starts - 1), "host  o"]
    assert calls[-1] == DELETE and f"ended with {codes[-1]};" in done.stdout


def test_what_cannot_run_is_deleted(host):
    lines, calls, _ = host(seconds=-MARGIN - 1)  # the host boots after the deadline
    assert lines == [] and calls == [DELETE]
    lines, calls, _ = host(installs=False)
    assert lines == ["installs"] and calls[-1] == DELETE


def test_what_hangs_is_ended_and_deleted(host):
    began = time.monotonic()
    _, calls, done = host(["hang"], seconds=3 - MARGIN)
    assert time.monotonic() - began < 30 and calls[-1] == DELETE and "ended with 124" in done.stdout


def test_a_deletion_that_fails_is_tried_again(host, tools):
    tools.answers("gcloud", "queued-resources delete", f"[ $(grep -c delete {tools._folder}/calls) -gt 2 ]")
    lines, calls, _ = host()
    assert calls.count(DELETE) == 3 and lines.count("sleep 60") == 2


def test_the_queued_resource():
    engine = Gcloud(request(provisioning="spot", service_account="s@p", network="n"))
    words = engine.launch("startup.sh", run(engine))
    assert words[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "run"]
    for word in (
        *("--node-id=run", "--project=p", "--zone=us-west4-a", "--accelerator-type=v5litepod-16", "--spot"),
        *("--runtime-version=tpu-vm-tf-2.18.0-pod-pjrt", "--metadata-from-file=startup-script=startup.sh", "--async"),
        *("--scopes=https://www.googleapis.com/auth/cloud-platform", "--service-account=s@p", "--network=n"),
    ):
        assert word in words
    assert any(re.fullmatch(r"--valid-until-time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", word) for word in words)


def test_states_and_refusals():
    """The states are from https://docs.cloud.google.com/tpu/docs/queued-resources, the errors from code.proto."""
    engine = Gcloud(request())
    assert engine.describe("ACTIVE\n") == ("active", True) and engine.describe("FAILED\n") == ("failed", False)
    assert engine.describe("SUSPENDED\n")[1] and engine.describe("WAITING_FOR_RESOURCES\n")[1]
    head = "ERROR: (gcloud.compute.tpus.queued-resources.create)"
    for said, meaning in (
        (f"{head} ALREADY_EXISTS: Resource 'run' already exists", "--name=run: is in use; axial-tpu delete"),
        (f"{head} NOT_FOUND: Resource 'run' was not found", "--name=run: there is no such queued resource in us-west4"),
        (f"{head} You do not currently have an active account selected.", "no credentials: gcloud auth login"),
        (f"API enabled\n{head} RESOURCE_EXHAUSTED: Quota limit", "gcloud: ERROR: (gcloud.compute.tpus.queued-resourc"),
    ):
        error = engine.explain(said)
        assert isinstance(error, InputError) and meaning in str(error)
