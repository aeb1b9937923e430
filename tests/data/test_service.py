"""The tf.data service: each example arrives exactly once, unless the worker that holds it dies."""

import collections
import concurrent.futures
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

from axial.data import service as service_module
from axial.data.service import Service, Tickets, served
from axial.data.tfrecord import write_shard
from axial.models.registry import ModelConfig
from axial.tasks.classification.task import ClassificationData, ClassificationTask
from tests.cloud.slice_fixture import free_port
from tests.conftest import reached_by

SHARDS, A_SHARD = 12, 40
RECORDS = SHARDS * A_SHARD


@pytest.fixture(scope="module")
def address():
    """The address of a dispatcher with three workers, which all run in this process."""
    api = tf.data.experimental.service
    dispatcher = api.DispatchServer(api.DispatcherConfig(port=0))
    where = dispatcher.target.removeprefix("grpc://")
    workers = [api.WorkerServer(api.WorkerConfig(where, heartbeat_interval_ms=1000)) for _ in range(3)]
    yield dispatcher.target
    for server in (*workers, dispatcher):
        server._stop()


@pytest.fixture(scope="module")
def numbers_dir(tmp_path_factory):
    """(folder, manifest) of shards. The content of each record is the record's number."""
    folder = tmp_path_factory.mktemp("numbers")
    shards = []
    for shard in range(SHARDS):
        texts = [str(number).encode() for number in range(A_SHARD * shard, A_SHARD * (shard + 1))]
        write_shard(str(folder / f"{shard}.tfrecord"), texts)
        shards.append([f"{shard}.tfrecord", len(texts), (folder / f"{shard}.tfrecord").stat().st_size])
    return str(folder), {"shards": shards}


def batches_of_numbers(records):
    """Returns batches of four records: (numbers, contents)."""
    return records.batch(4)


def arrived(dataset, after=None, then=None):
    """Returns a Counter of the numbers in a stream. Calls `then` after the batch with the index `after`."""
    counter = collections.Counter()
    for position, (numbers, texts) in enumerate(dataset):
        assert [number % RECORDS for number in numbers.numpy()] == [int(text) for text in texts.numpy()]
        counter.update(numbers.numpy().tolist())
        if position == after:
            then()
    return counter


# === Tickets ===


@pytest.mark.parametrize("shuffle,tickets", [(0, 1), (200, 24)])
def test_tickets_are_every_record_of_an_epoch_once(numbers_dir, shuffle, tickets, monkeypatch):
    monkeypatch.setattr(service_module, "TICKETS", tickets)
    made = Tickets(*numbers_dir, seed=3, shuffle=shuffle)
    assert made.an_epoch == SHARDS * -(-tickets // SHARDS)
    epochs = []
    for epoch in (0, 5):
        first = epoch * made.an_epoch
        pairs = [(int(n), int(t)) for n, t in made.dataset(first, first + made.an_epoch).as_numpy_iterator()]
        assert all(number == epoch * RECORDS + text for number, text in pairs)
        epochs.append([text for _, text in pairs])
        assert sorted(epochs[-1]) == list(range(RECORDS))
    assert (epochs[0] != epochs[1]) == bool(shuffle)


@pytest.mark.parametrize("used", [0, 3 * RECORDS + 450])
def test_a_resumed_job_leaves_out_the_tickets_that_are_used_up(numbers_dir, used):
    tickets = Tickets(*numbers_dir, seed=1, shuffle=8)
    left = list(tickets.dataset(tickets.after(used), (used // RECORDS + 1) * tickets.an_epoch).as_numpy_iterator())
    largest = -(-A_SHARD // (tickets.an_epoch // SHARDS))
    assert 0 <= len(left) - (RECORDS - used % RECORDS) < largest


# === With workers ===


def test_each_example_arrives_once_an_epoch_at_one_of_the_hosts(address, numbers_dir):
    both = threading.Barrier(2, timeout=60)  # otherwise one host could get all examples before the other begins
    service = Service(address, "hosts")

    def host(_):
        batches = served(batches_of_numbers, Tickets(*numbers_dir, seed=0, shuffle=100), service, used=0, epochs=2)
        return arrived(batches, after=0, then=both.wait)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(host, range(2))
    assert first and second
    assert sorted([*first.elements(), *second.elements()]) == list(range(2 * RECORDS))


def test_a_task_has_the_same_batches_with_a_service(address, colours_dir):
    data = ClassificationData("train", "val", (32, 32), mixup=0.2)
    task = ClassificationTask(ModelConfig("axial_resnet_nano"), data, colours_dir)
    local, remote = task.train_dataset(4, seed=0), task.train_dataset(4, seed=0, service=Service(address, "run"))
    assert remote.element_spec == local.element_spec
    for dataset in (local, remote, task.eval_dataset()):
        assert not dataset.options().autotune.enabled  # the autotuning thread may take a minute to end
    for name, x in next(iter(remote)).items():
        assert x.shape == local.element_spec[name].shape and np.isfinite(x).all(), name


# === The commands ===


class Server:
    """A process that runs axial-data-service."""

    def __init__(self, name, *arguments):
        code = "import axial.cli.data_service as command; command.main()"
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen([sys.executable, "-c", code, name, *arguments], env=environment, **pipes)
        self.said = self.process.stdout.readline()
        self.address = self.said.split()[-1]
        self.port = int(self.address.rsplit(":", 1)[1])

    def end(self, number):
        """Sends a signal. Returns the exit code and the output after the first line."""
        self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture
def begin():
    """Starts `Server`s, and kills them at the end."""
    made = []

    def begin(*arguments):
        made.append(Server(*arguments))
        return made[-1]

    yield begin
    for server in made:
        server.process.kill()
        server.process.communicate()


def test_servers_are_reached_by_this_machine_alone_and_end_with_sigterm(begin):
    dispatcher = begin("dispatcher")
    assert re.fullmatch(r"dispatcher at grpc://localhost:\d+\n", dispatcher.said)
    worker = begin("worker", f"--dispatcher={dispatcher.address}")
    assert re.fullmatch(r"worker at grpc://127.0.0.1:\d+\n", worker.said)
    for name, server in (("worker", worker), ("dispatcher", dispatcher)):
        assert reached_by(server.port) == "this machine"
        assert server.end(signal.SIGTERM) == (0, f"{name} ended\n")


@pytest.mark.slow  # two processes
def test_servers_are_reached_by_all_if_a_flag_says_so(begin):
    dispatcher = begin("dispatcher", "--listen=all")
    assert dispatcher.address == f"grpc://{socket.gethostname()}:{dispatcher.port}"
    worker = begin("worker", "--listen=all", f"--dispatcher=grpc://localhost:{dispatcher.port}")
    assert reached_by(dispatcher.port) == reached_by(worker.port) == "all"


def test_what_the_commands_are_given_is_checked(refuse, address):
    port = address.rsplit(":", 1)[1]
    cases = [
        (["dispatcher", f"--port={port}"], f"--port={port}: cannot be listened at"),
        (["worker"], "--dispatcher is needed"),
        (["worker", "--dispatcher=grpc://localhost:1", "--wait=0"], "no dispatcher answers there"),
    ]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # a UDP connect sends nothing
        try:
            probe.connect(("192.0.2.200", 9))
            public_address = probe.getsockname()[0]
        except OSError:  # this machine has no public address
            public_address = None
    with socket.create_server((public_address or "127.0.0.1", 0)) as server:
        if public_address:
            other = f"grpc://{public_address}:{server.getsockname()[1]}"
            cases.append((["worker", f"--dispatcher={other}"], f"--dispatcher={other}: serves other machines"))
        for arguments, words in cases:
            refuse(words, "data_service", *arguments)


# === Servers that die ===


class Servers:
    """A dispatcher and three workers, in separate processes."""

    def __init__(self, begin, folder):
        self.dispatcher = begin("dispatcher", f"--port={free_port()}", f"--work_dir={folder / 'work'}")
        self.workers = [begin("worker", f"--dispatcher={self.dispatcher.address}") for _ in range(3)]


@pytest.mark.slow  # four processes
def test_a_killed_worker_loses_its_open_tickets_and_no_example_comes_twice(begin, numbers_dir, tmp_path):
    for after in (30, 60, 120, 240, 480, 960):  # a killed worker may hold no examples
        folder = tmp_path / str(after)
        folder.mkdir()
        if kill_a_worker(Servers(begin, folder), numbers_dir, after=after):
            break
    else:
        raise AssertionError("nothing was lost six times")


def kill_a_worker(servers, numbers_dir, after):
    """Kills a worker after some batches of 11 epochs. Returns the number of lost examples, without the last epochs."""
    service = Service(servers.dispatcher.address, "killed")
    stream = served(batches_of_numbers, Tickets(*numbers_dir, seed=0, shuffle=100), service, used=0)
    first = itertools.islice(stream, 11 * RECORDS // 4)
    counter = arrived(first, after=after, then=lambda: servers.workers[1].end(signal.SIGKILL))
    assert set(counter.values()) == {1}
    lost = 9 * RECORDS - sum(number < 9 * RECORDS for number in counter)
    assert 0 <= lost <= 3 * service_module.OPEN * A_SHARD
    return lost


@pytest.mark.slow  # two trainings
def test_a_training_with_a_service_resumes(succeed, address, sample_dir, tmp_path):
    tiny = "--gin_file=sample/overfit.gin", "--gin_file=tiny/panoptic.gin"
    options = f"--data_dir={sample_dir}", f"--model_dir={tmp_path}/run", f"--data_service={address}"
    for steps in (1, 2):
        succeed("train", *tiny, *options, f"--gin_binding=TrainingConfig.steps = {steps}")
