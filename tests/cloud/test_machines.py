"""Programs that run on the workers: the server, reading metadata, describing a node, and the installation script."""

import json
import os
import re
import subprocess
import sys

import pytest

from axial.cli import doctor
from axial.errors import InputError
from tests.cloud.slice_fixture import free_port
from tests.conftest import ROOT, reached_by
from tests.io.web_fixture import answering

SCRIPTS = ROOT / "scripts" / "tpu"


# google/rpc/code.proto and https://cloud.google.com/apis/design/errors
NOT_FOUND = json.dumps({"error": {"code": 404, "message": "Resource 'n' was not found", "status": "NOT_FOUND"}})


def test_doctor_names_an_image_that_does_not_fit():
    for image, slice_, tensorflow, said in (
        ("v2-alpha-tpuv6e", "v6e-16", "2.20.0", None),
        ("tpu-vm-tf-2.18.0-pod-pjrt", "v4-32", "2.18.0", None),
        ("tpu-vm-tf-2.18.0-pod-pjrt", "v4-32", "2.20.0", "TensorFlow 2.20.0 is installed on tpu-vm-tf-2.18.0-pod-pjrt"),
        ("tpu-vm-tf-2.18.0-pjrt", "v4-32", "2.18.1", "image tpu-vm-tf-2.18.0-pjrt: v4-32 has 4 hosts"),
        ("tpu-vm-tf-2.12.0-pjrt", "v4-8", "2.12.0", "2.18 to 2.20"),
    ):
        problems = doctor.image_problems({"RUNTIME_VERSION": image, "ACCELERATOR_TYPE": slice_}, tensorflow)
        assert problems == [] if said is None else len(problems) == 1 and said in problems[0]


READY = {
    "state": "READY",
    "health": "HEALTHY",
    "acceleratorType": "v4-16",
    "tensorflowVersion": "tpu-vm-tf-2.18.0-pod-pjrt",
    "networkEndpoints": [{"ipAddress": "10.0.0.1", "port": 8470}, {"ipAddress": "10.0.0.2", "port": 8470}],
}


def test_a_node_as_cloud_tpu_client_tells_it():
    """A local server stands in for version 1 of the Cloud TPU API, which cloud-tpu-client calls."""
    from axial.cloud.node import describe

    states = [{**READY, "health": "TIMEOUT", "state": "REPAIRING"}] * 3 + [READY]

    def node():
        return json.dumps(states.pop(0) if len(states) > 1 else states[0])

    answers = {"/v1/projects/p/locations/us-west4-a/nodes/n": node}
    with answering(answers, NOT_FOUND) as address:
        endpoint = {"endpoint": f"http://{address}", "poll": 0.01}
        text = "\n".join(describe("n", "p", "us-west4-a", wait=True, **endpoint))
        assert "node n: READY, HEALTHY" in text and "v4-16, software tpu-vm-tf-2.18.0-pod-pjrt" in text
        assert "recoverable: yes" in text
        assert "--tpu=grpc://10.0.0.1:8470,grpc://10.0.0.2:8470" in text
        states[:] = [{**READY, "state": "PREEMPTED"}]
        assert "recoverable: no; delete it" in "\n".join(describe("n", "p", "us-west4-a", **endpoint))
        with pytest.raises(InputError, match="--node=x: .*not found"):
            list(describe("x", "p", "us-west4-a", **endpoint))


def test_no_credentials_for_a_node_are_one_line(monkeypatch, tmp_path):
    from axial.cloud.node import make_client

    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(InputError, match="no credentials: gcloud auth application-default login"):
        make_client("n", "p", "us-west4-a")


CLIENT = """
import os, sys
import tensorflow as tf
resolver = tf.distribute.cluster_resolver.TPUClusterResolver(sys.argv[1])
tf.config.experimental_connect_to_cluster(resolver, protocol="grpc")
for task in range(2):
    with tf.device(f"/job:worker/task:{task}/device:CPU:0"):
        total = tf.reduce_sum(tf.range(4) + task)
    print(task, total.device.split("/device")[0], int(total))
if sys.argv[2:]:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_trainer_and_the_next_one_reach_the_servers_of_two_hosts():
    """On CPUs, TensorFlow's resolver accepts the addresses, and ops run in the servers' processes."""
    ports = free_port(), free_port()
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "axial.cloud.server"]
    servers = [
        subprocess.Popen([*command, *flags, f"--port={port}"], stdout=subprocess.PIPE, text=True, env=environment)
        for port, flags in zip(ports, ([], ["--listen=all"]))
    ]
    try:
        for server, port, where in zip(servers, ports, ("loopback", "all addresses")):
            assert server.stdout.readline().endswith(f"listens on {where}, port {port}\n")
        assert [reached_by(port) for port in ports] == ["this machine", "all"]
        addresses = ",".join(f"grpc://127.0.0.1:{port}" for port in ports)
        client = [sys.executable, "-c", CLIENT, addresses]
        died = subprocess.run([*client, "die"], check=False, env=environment, timeout=300)
        assert died.returncode == -9  # like a trainer that the supervisor restarts
        done = subprocess.run(client, check=False, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        lines = re.findall(r"^(\d) \S+task:(\d) (\d+)$", done.stdout, re.MULTILINE)
        assert lines == [("0", "0", "6"), ("1", "1", "10")]
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def image(folder, version=None):
    """Makes a folder with python3 and pip of an image whose only package is TensorFlow, like 'tensorflow-2.18.1'."""
    (folder / "bin").mkdir(parents=True)
    for program in ("python3", "pip"):
        path = folder / "bin" / program
        path.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} -S "$@"\n')
        path.chmod(0o755)
    if version:
        name, _, number = version.rpartition("-")
        (folder / f"{version}.dist-info").mkdir()
        metadata_of = folder / f"{version}.dist-info" / "METADATA"
        metadata_of.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    return folder / "bin"


def install(programs, **variables):
    """Runs scripts/tpu/install.sh, which prints pip's commands. Returns the finished process."""
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "AXIAL_PRINT": "1", **variables}
    command = ["bash", SCRIPTS / "install.sh"]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("version, minor", [("tensorflow-2.18.1", 18), ("tensorflow_tpu-2.20.0", 20), (None, 20)])
def test_the_installation_follows_the_tensorflow_of_the_image(tmp_path, version, minor):
    """The script prints the pip commands for an image."""
    result = install(image(tmp_path / "image", version))
    assert result.returncode == 0, result.stderr
    pip, first, *rest = result.stdout.splitlines()
    assert pip == "pip install pip>=25"
    if version is None:
        with_kernels = sys.version_info >= (3, 11)
        tpu_packages = "libtpu==0.0.24 jax==0.7.2" if with_kernels else "libtpu==0.0.14"
        assert first == f"pip install tensorflow-tpu==2.20.0 {tpu_packages}"
        (first,) = rest
    else:
        assert not rest
    assert f"tf-keras>=2.{minor}.0,<2.{minor + 1}" in first and f"tf-models-official>=2.{minor}.0" in first


def test_an_image_with_an_old_tensorflow_is_refused(tmp_path):
    result = install(image(tmp_path / "image", "tensorflow-2.12.0"))
    assert result.returncode == 2 and "TensorFlow 2.18 to 2.20" in result.stderr
