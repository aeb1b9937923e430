"""A tf.data service of real processes: each example arrives once, none twice, what dies with a worker is counted."""

import collections
import concurrent.futures
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from axial.data import service as service_module
from axial.data.service import Service, Tickets, arrival_lines, check_answer, connect, read_arrivals, served
from axial.data.streams import training_stream
from axial.data.tfrecord import read_manifest, write_shard
from axial.errors import InputError
from axial.models.registry import ModelConfig
from axial.tasks.classification.task import ClassificationTask
from axial.tasks.detection.task import DetectionTask
from axial.tasks.translation.task import TranslationTask
from tests.cloud.slice_fixture import free_port
from tests.conftest import make_task, reached_by
from tests.data.labels_fixture import convert_labels, label_of, uniform_classes

# Forks axial-data-service's processes from one that has imported TensorFlow: only the first import takes long.
FORKS = """
import json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import axial.data.service, axial.io.lock
from axial.cli import data_service

print("ready", flush=True)
for line in sys.stdin:
    what, value = json.loads(line)
    if what == "wait":
        print(os.waitstatus_to_exitcode(os.waitpid(value, 0)[1]), flush=True)
        continue
    pid = os.fork()
    if not pid:
        os.dup2(os.open(what, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.argv = ["axial-data-service", *value]
        code = 99
        try:
            data_service.main()
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(pid, flush=True)
"""


class Process:
    """A process of axial-data-service, a real one, on loopback."""

    def __init__(self, ask, path, arguments):
        self._ask, self._path = ask, path
        self.pid = ask([str(path), arguments])
        self.code = None

    def line(self, begins, seconds=60):
        """The line of the output that begins so, as soon as it is there."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            text = self._path.read_text() if self._path.exists() else ""
            found = re.search(rf"^{begins}.*\n", text, re.MULTILINE)
            if found:
                return found[0].strip()
            time.sleep(0.05)
        raise AssertionError(f"no line {begins!r} in {text!r}")

    def end(self, number):
        """Sends a signal, and returns the exit code."""
        if self.code is None:
            os.kill(self.pid, number)
            self.code = self._ask(["wait", self.pid])
        return self.code


class Servers:
    """A dispatcher and three workers."""

    def __init__(self, begin, folder):
        port = free_port()  # a fixed one, so that the dispatcher can be started again
        self.address = f"grpc://localhost:{port}"
        self._begin_dispatcher = lambda: begin(
            "dispatcher", f"--port={port}", f"--work_dir={folder / 'work'}", "--host=localhost"
        )
        self.dispatcher = self._begin_dispatcher()
        assert self.dispatcher.line("dispatcher") == f"dispatcher at {self.address}"
        self.workers = [begin("worker", f"--dispatcher={self.address}") for _ in range(3)]
        for worker in self.workers:
            assert re.fullmatch(r"worker at grpc://127.0.0.1:\d+", worker.line("worker"))

    def restart_dispatcher(self):
        self.dispatcher.end(signal.SIGKILL)
        self.dispatcher = self._begin_dispatcher()
        assert self.dispatcher.line("dispatcher") == f"dispatcher at {self.address}"


@pytest.fixture(scope="module")
def begin(tmp_path_factory):
    """Function of a command's arguments that starts a `Process`. All are killed in the end."""
    folder, made = tmp_path_factory.mktemp("output"), []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    forks = subprocess.Popen([sys.executable, "-c", FORKS], **pipes)
    assert forks.stdout.readline() == "ready\n"

    def ask(what):
        forks.stdin.write(json.dumps(what) + "\n")
        forks.stdin.flush()
        return int(forks.stdout.readline())

    def begin(*arguments):
        made.append(Process(ask, folder / str(len(made)), arguments))
        return made[-1]

    yield begin
    for process in made:
        process.end(signal.SIGKILL)
    forks.stdin.close()
    forks.wait(60)


@pytest.fixture(scope="module")
def servers(begin, tmp_path_factory):
    return Servers(begin, tmp_path_factory.mktemp("service"))


SHARDS, A_SHARD = 12, 100
RECORDS = SHARDS * A_SHARD


@pytest.fixture(scope="module")
def numbers_dir(tmp_path_factory):
    """Shards whose records are their own numbers, and a manifest of them."""
    folder = tmp_path_factory.mktemp("numbers")
    shards = []
    for shard in range(SHARDS):
        texts = [str(number).encode() for number in range(A_SHARD * shard, A_SHARD * (shard + 1))]
        write_shard(str(folder / f"{shard}.tfrecord"), texts)
        shards.append([f"{shard}.tfrecord", len(texts), (folder / f"{shard}.tfrecord").stat().st_size])
    return str(folder), {"shards": shards}


def batches_of_numbers(records):
    """Batches of four numbers and what the records say."""
    return records.batch(4).map(lambda numbers, texts: (numbers, (numbers, texts)))


def arrived(dataset, after=None, then=None):
    """Counter of the numbers of a stream. `then` is called when `after` batches have come."""
    counter = collections.Counter()
    for place, (numbers, texts) in enumerate(dataset):
        assert [number % RECORDS for number in numbers.numpy()] == [int(text) for text in texts.numpy()]
        counter.update(numbers.numpy().tolist())
        if place == after:
            then()
    return counter


# === Tickets ===


@pytest.mark.parametrize("shuffle", [0, 200])
@pytest.mark.parametrize("tickets", [1, 64])
def test_tickets_are_every_record_of_an_epoch_once(numbers_dir, shuffle, tickets, monkeypatch):
    monkeypatch.setattr(service_module, "TICKETS", tickets)
    found = Tickets(*numbers_dir, seed=3, shuffle=shuffle)
    assert found.an_epoch == SHARDS * -(-tickets // SHARDS)
    epochs = []
    for epoch in (0, 5):
        first = epoch * found.an_epoch
        pairs = [(int(n), int(t)) for n, t in found.dataset(first, first + found.an_epoch).as_numpy_iterator()]
        assert all(number == epoch * RECORDS + text for number, text in pairs)
        epochs.append([text for _, text in pairs])
        assert sorted(epochs[-1]) == list(range(RECORDS))
    assert (epochs[0] != epochs[1]) == bool(shuffle)


@pytest.mark.parametrize("used", [0, 1, 137, RECORDS - 1, RECORDS, 3 * RECORDS + 450])
def test_a_resumed_job_leaves_out_the_tickets_that_are_used_up(numbers_dir, used):
    wanted = np.arange(RECORDS) % 3 > 0
    tickets = Tickets(*numbers_dir, seed=1, shuffle=8, wanted=wanted)
    first, skipped = tickets.after(used)
    epoch = used // RECORDS
    left = list(tickets.dataset(first, (epoch + 1) * tickets.an_epoch).as_numpy_iterator())
    largest = -(-A_SHARD // (tickets.an_epoch // SHARDS))
    assert 0 <= len(left) - (RECORDS - used % RECORDS) < largest
    assert skipped == wanted.sum() - sum(wanted[int(text)] for _, text in left)


# === With workers ===


def test_each_example_arrives_once_an_epoch(servers, numbers_dir, tmp_path):
    tickets = Tickets(*numbers_dir, seed=0, shuffle=100)
    service = Service(servers.address, "once", str(tmp_path), seconds=0)
    counter = arrived(served(batches_of_numbers, tickets, service, used=0, epochs=2))
    assert sorted(counter) == list(range(2 * RECORDS)) and set(counter.values()) == {1}
    (line,) = arrival_lines(str(tmp_path))
    assert line.endswith(f"2 whole epochs of {2 * RECORDS} examples: {2 * RECORDS} arrived, 0 did not, 0 came twice")


def test_batches_are_as_mixed_as_those_of_a_uniform_shuffle(servers, tmp_path):
    """A data set in the order of its classes, a thousand of them: batches of 128, of three workers."""
    classes = np.repeat(np.arange(1000), 16)
    convert_labels(tmp_path, classes, 64)
    spec = read_manifest(str(tmp_path), "train")["spec"]
    options = dict(batch=128, shuffle=1024, labels="class", service=Service(servers.address, "mixed"))
    batches = training_stream(str(tmp_path), "train", spec, label_of, **options).take(100)
    found = [len(np.unique(batch["class"])) for batch in batches.as_numpy_iterator()]
    assert len(found) == 100 and np.mean(found) == pytest.approx(uniform_classes(classes, 128), rel=0.05)


def test_the_hosts_of_a_training_share_a_job(servers, numbers_dir, tmp_path):
    """Each example arrives at one of them, and their reports are summed."""
    both = threading.Barrier(2, timeout=60)  # else one could take all before the other one has begun
    service = Service(servers.address, "hosts", str(tmp_path), seconds=0)

    def host(number):
        tickets = Tickets(*numbers_dir, seed=0, shuffle=100)
        context = tf.distribute.InputContext(2, number, 2)
        batches = served(batches_of_numbers, tickets, service, used=0, context=context, epochs=2)
        return arrived(batches, after=0, then=both.wait)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(host, range(2))
    assert first and second
    assert sorted([*first.elements(), *second.elements()]) == list(range(2 * RECORDS))
    (rows,) = read_arrivals(str(tmp_path)).values()
    assert [(row["arrived"], row["again"], row["open"]) for row in rows] == [(RECORDS, 0, False)] * 2


def test_a_killed_worker_loses_examples_that_are_counted_and_none_comes_twice(begin, numbers_dir, tmp_path, capfd):
    for after in (30, 60, 120, 240, 480, 960):  # a worker may be killed just when it holds nothing
        folder = tmp_path / str(after)
        folder.mkdir()
        if kill_a_worker(Servers(begin, folder), numbers_dir, folder, after=after):
            break
    else:
        raise AssertionError("nothing was lost six times")
    assert re.search(r"input: epochs \[0.*\] examples of each that did not arrive: \[\d+", capfd.readouterr().err)


def kill_a_worker(servers, numbers_dir, tmp_path, after):
    """Kills a worker of a stream after some batches, and checks the report. Returns how many examples were lost."""
    tickets = Tickets(*numbers_dir, seed=0, shuffle=100)
    service = Service(servers.address, "killed", str(tmp_path / "reports"), seconds=0)
    epochs = service_module.IN_FLIGHT // RECORDS + 3  # so many that the first ones are closed
    stream = iter(served(batches_of_numbers, tickets, service, used=0))
    first = itertools.islice(stream, epochs * RECORDS // 4)
    counter = arrived(first, after=after, then=lambda: servers.workers[1].end(signal.SIGKILL))
    # The report also counts batches that were fetched in advance. The stream goes on, and writes later reports.
    report = str(shutil.copytree(tmp_path / "reports", tmp_path / "report"))
    (rows,) = read_arrivals(report).values()
    counted = sum(row["arrived"] + row["again"] for row in rows)
    counter += arrived(itertools.islice(stream, (counted - counter.total()) // 4))
    assert set(counter.values()) == {1} and counter.total() == counted
    of_epochs = collections.Counter(number // RECORDS for number in counter)
    for row in rows:
        assert (row["arrived"], row["examples"], row["again"]) == (of_epochs[row["epoch"]], RECORDS, 0)
    closed = [row for row in rows if not row["open"]]
    assert [row["epoch"] for row in closed] == list(range(len(closed))) and len(closed) >= 3
    lost = sum(row["examples"] - row["arrived"] for row in closed)
    assert 0 <= lost <= 3 * service_module.OPEN * A_SHARD
    text = arrival_lines(report)
    assert f"{lost} did not, 0 came twice" in text[0]
    assert not lost or re.fullmatch(r"  epoch \d+: \d+ of 1200 missing", text[1])
    return lost


@pytest.mark.slow  # the client waits for the dispatcher for half a minute
def test_a_dispatcher_that_is_started_again_goes_on(begin, numbers_dir, tmp_path):
    servers = Servers(begin, tmp_path)
    tickets = Tickets(*numbers_dir, seed=0, shuffle=100)
    service = Service(servers.address, "again", str(tmp_path / "reports"), seconds=0)
    stream = served(batches_of_numbers, tickets, service, used=0, epochs=6)
    counter = arrived(stream, after=30, then=servers.restart_dispatcher)
    assert sorted(counter) == list(range(6 * RECORDS)) and set(counter.values()) == {1}


def test_the_workers_agree_on_the_augmentation(servers, colours_dir):
    """Two jobs draw the same numbers for the same example of an epoch, in whatever order they come."""
    spec = read_manifest(colours_dir, "train")["spec"]

    def draws(job, seed=4):
        def example(record, key):
            return {"id": record["image/id"], "draw": tf.random.stateless_uniform([], key)}

        stream = training_stream(
            *(colours_dir, "train", spec, example),
            **dict(batch=2, shuffle=8, labels="class", seed=seed, service=Service(servers.address, job)),
        )
        return ((int(i), float(x)) for batch in stream for i, x in zip(batch["id"], batch["draw"]))

    some, other = (list(itertools.islice(found, 24)) for found in (draws("some"), draws("other", seed=5)))
    assert len(set(some)) == 24 and not set(some) & set(other)
    missing, until = set(some), time.monotonic() + 60  # one of the workers may be far behind the others
    for draw in draws("more"):
        missing.discard(draw)
        if not missing:
            break
        assert time.monotonic() < until, missing


def tasks(texts, colours, sample):
    from axial.tasks.classification.feed import ClassificationData
    from axial.tasks.detection.feed import DetectionData
    from axial.tasks.translation.feed import TextData

    yield make_task(sample)
    data = ClassificationData("train", "val", (32, 32), mixup=0.2, policy="randaugment")
    yield ClassificationTask(ModelConfig("axial_resnet_nano"), data, colours)
    data = DetectionData("train2017", "val2017", (64, 64), (64, 64))
    yield DetectionTask(ModelConfig("faster_rcnn_resnet_nano"), data, sample)
    yield TranslationTask(ModelConfig("transformer_nano"), TextData("train", "val", (16, 32)), texts)


def test_every_task_has_the_same_batches_with_a_service(servers, texts_dir, colours_dir, sample_dir):
    for task in tasks(texts_dir, colours_dir, sample_dir):
        batch = getattr(task.data, "lengths", (4,))[-1]  # photos, or the tokens of a row
        own = task.train_dataset(batch, seed=0)
        service = Service(servers.address, type(task).__name__)
        found = task.train_dataset(batch, seed=0, service=service)
        assert found.element_spec == own.element_spec
        for dataset in (own, found, task.eval_dataset()):
            assert not dataset.options().autotune.enabled  # the thread that tunes may not end for a minute
        for batch in found.take(2):
            for name, x in batch.items():
                assert x.shape == own.element_spec[name].shape and np.isfinite(np.asarray(x, np.float64)).all(), name


def test_pairs_come_once_an_epoch_in_the_buckets_of_their_lengths(texts_dir):
    """Of every pair both sides are in one batch of its bucket, but for those whose bucket is not full in the end."""
    from axial.tasks.translation.feed import Sentences, TextData, bucket_batches

    manifest = read_manifest(texts_dir, "train")
    data = TextData("train", "val", (8, 16, 64))
    sentences = Sentences(texts_dir, data, manifest["spec"])
    tickets = Tickets(texts_dir, manifest, seed=0, shuffle=8, wanted=sentences.buckets < 3)
    records = tickets.dataset(0, 4 * tickets.an_epoch)
    seen = collections.Counter()
    for numbers, batch in bucket_batches(records, data=data, spec=manifest["spec"], rows=2):
        (bucket,) = set(batch["bucket"].numpy())
        assert len(numbers) == 2 * 64 // data.lengths[bucket]
        assert (sentences.buckets[numbers.numpy() % tickets.records] == bucket).all()
        expected = sentences.batch(bucket, numbers.numpy() % tickets.records, 2)
        for side in ("source", "target"):
            np.testing.assert_array_equal(batch[side], expected[side])
        seen.update(numbers.numpy().tolist())
    assert set(seen.values()) == {1}
    assert tickets.examples() * 4 - len(seen) < 2 * 64 // 8 + 2 * 64 // 16 + 2


# === The commands ===


def test_sigterm_ends_the_commands_and_what_they_are_given_is_checked(begin, servers, tmp_path):
    worker = begin("worker", f"--dispatcher={servers.address}")
    worker.line("worker at")
    assert worker.end(signal.SIGTERM) == 0 and worker.line("worker ended")
    port = servers.address.rsplit(":", 1)[1]
    for arguments, wanted in (
        (["dispatcher", f"--port={port}"], f"--port={port}: cannot be listened at"),
        (["worker"], "--dispatcher is needed"),
        (["worker", "--dispatcher=localhost:5050"], "expected the address of a dispatcher, grpc://HOST:PORT"),
        (["worker", "--dispatcher=grpc://localhost:1", "--wait=0"], "no dispatcher answers there"),
        (["arrivals", f"--model_dir={tmp_path}"], "no reports of arrivals"),
    ):
        process = begin(*arguments)
        assert wanted in process.line("axial-data-service: ") and process.end(0) == 2


def port_of(process, name):
    return int(process.line(f"{name} at").rsplit(":", 1)[1])


def test_servers_are_reached_by_this_machine_alone_unless_a_flag_says_otherwise(begin, servers):
    assert reached_by(servers.address.rsplit(":", 1)[1]) == "this machine"
    assert {reached_by(port_of(worker, "worker")) for worker in servers.workers} == {"this machine"}
    dispatcher = begin("dispatcher", "--listen=all")
    address = dispatcher.line("dispatcher at").split()[-1]
    assert address == f"grpc://{socket.gethostname()}:{port_of(dispatcher, 'dispatcher')}"
    assert reached_by(port_of(dispatcher, "dispatcher")) == "all"
    worker = begin("worker", "--listen=all", f"--dispatcher=grpc://localhost:{port_of(dispatcher, 'dispatcher')}")
    assert reached_by(port_of(worker, "worker")) == "all"
    alone = begin("dispatcher")
    assert alone.line("dispatcher at") == f"dispatcher at grpc://localhost:{port_of(alone, 'dispatcher')}"
    named = begin("dispatcher", "--host=trainer-7")
    assert "--host=trainer-7: others cannot reach" in named.line("axial-data-service: ") and named.end(0) == 2


def test_a_worker_on_loopback_serves_no_dispatcher_of_other_machines(begin):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect(("192.0.2.200", 9))
        except OSError:
            pytest.skip("this machine has no address for others")
        own = probe.getsockname()[0]
    with socket.create_server((own, 0)) as dispatcher:
        address = f"grpc://{own}:{dispatcher.getsockname()[1]}"
        worker = begin("worker", f"--dispatcher={address}")
        assert f"--dispatcher={address}: serves other machines" in worker.line("axial-data-service: ")
        assert worker.end(0) == 2


@pytest.mark.parametrize(
    "address", ["localhost:5050", "grpc://localhost", "grpc://a b:1", "grpc://h:0", "grpc://h:99999"]
)
def test_an_address_is_checked(address):
    with pytest.raises(InputError, match="--data_service=.*expected the address of a dispatcher"):
        connect(address)


def test_a_dispatcher_that_does_not_answer_is_named(servers):
    with pytest.raises(InputError, match="no dispatcher answers there .*axial-data-service"):
        connect("grpc://localhost:1")
    assert check_answer("data_service", servers.address) == "127.0.0.1"
    first, second = (connect(servers.address) for _ in range(2))
    assert first.job != second.job


@pytest.mark.slow  # two trainings
def test_a_training_with_a_service_counts_what_arrived_and_resumes(command, servers, sample_dir, tmp_path):
    tiny = "--gin_file=sample/overfit.gin", "--gin_file=tiny/panoptic.gin"
    options = f"--data_dir={sample_dir}", f"--model_dir={tmp_path}/run", f"--data_service={servers.address}"
    for steps in (1, 2):
        done = command("train", *tiny, *options, f"--gin_binding=STEPS = {steps}")
        assert done.code == 0, done.err
        assert len(re.findall(r"axial-\S+ from example \d+: .* 0 came twice", done.err)) == steps
    shown = command("data_service", "arrivals", f"--model_dir={tmp_path}/run")
    assert shown.code == 0 and shown.out.count("came twice") == 2
