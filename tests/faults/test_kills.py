"""A command that is killed, stopped or starved at any moment and then called again leaves the usual end state.

scripts/test.sh tests/faults                      one round of each fault
scripts/test.sh -n 0 -m slow tests/faults         all rounds; AXIAL_SEED chooses other rounds, rounds.py records them
"""

import contextlib
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import time

import psutil
import pytest
import tensorflow as tf

from tests.faults import rounds

SEED = os.environ.get("AXIAL_SEED", "0")
TRAINING = (
    *("STEPS = 4", "TrainingConfig.steps_per_loop = 2", "TrainingConfig.eval_interval = 2"),
    *("TrainingConfig.checkpoint_interval = 2", "TrainingConfig.keep = 1"),
)

NEVER_THE_SAME = ("fingerprint.pb", "checkpoint", "hashes.json", "status.json")  # these differ between any two calls
EVALUATE = "evaluate --saved_model={0}/export --data_dir={0}/data --results_dir={1}/results --split=val2017"

# === Works: functions of (`whole`, output folder) that return a list of command lines to disturb ===


def convert(whole, out):
    return [["convert", "coco", f"--output_dir={out}/data", "--shards=4"]]


def train(whole, out):
    bindings = [f"--gin_binding={binding}" for binding in TRAINING]
    return [["train", *rounds.TINY, *bindings, f"--data_dir={whole}/data", f"--model_dir={out}/run"]]


def evaluate(whole, out):
    return [[*EVALUATE.format(whole, out).split(), "--split=train2017", f"--json={out}/scores.json"]]


def shards(whole, out):
    parts = [[*EVALUATE.format(whole, out).split(), f"--shard={i}/2"] for i in (0, 1)]
    merge = ["evaluate", "merge", f"--results_dir={out}/results", "--split=val2017", f"--json={out}/scores.json"]
    return [*parts, merge]


def export(whole, out):
    return [["export", f"--model_dir={whole}/run", f"--output_dir={out}/export"]]


def predict(whole, out):
    return [["predict", f"--saved_model={whole}/export", f"--output_dir={out}/pictures", f"{whole}/photos"]]


WORKS = (convert, train, evaluate, shards, export, predict)
WEIGHTS = (6, 3, 4, 3, 3, 4)  # relative frequency of each of `WORKS`


@pytest.fixture(scope="session")
def untouched(command, tmp_path_factory):
    """A function of a work and `whole`. It returns (end state of undisturbed commands, a `Moment` of each command)."""
    endings = {}

    def find(work, whole):
        if work not in endings:
            out, moments = tmp_path_factory.mktemp(work.__name__), []
            for call in work(whole, out):
                moments.append(Moment(out))
                assert command(*call, meanwhile=moments[-1].follow).code == 0
            endings[work] = state(out), moments
        return endings[work]

    return find


def state(out):
    """Returns a dict from file names to bytes, or to a checkpoint's tensors. It skips summaries and timestamps."""
    contents = {}
    for path in sorted(pathlib.Path(out).rglob("*")):
        name = str(path.relative_to(out))
        if path.is_dir() or "tfevents" in name or path.name in NEVER_THE_SAME:
            continue
        if path.suffix == ".index":
            reader = tf.train.load_checkpoint(str(path.with_suffix("")))
            tensors = {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}
            contents[name] = {key: getattr(value, "tobytes", lambda v=value: v)() for key, value in tensors.items()}
        elif ".data-" not in name:
            contents[name] = path.read_bytes()
    return contents


# === Moments ===


class Moment:
    """Watches a process and its output until a given moment or the end of the process.

    Args:
        out: folder of the output.
        seconds: the moment, as CPU seconds of the process, or None.
        changes: the moment, as a number of changes of the files in `out`, or None.
    """

    def __init__(self, out, seconds=None, changes=None):
        self._out, self._until = out, (seconds, changes)
        self.seconds = self.changes = 0

    def follow(self, pid):
        """Waits for the moment or the end of the process. Returns whether the moment came first."""
        before = listing(self._out)
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.status() != psutil.STATUS_ZOMBIE:
                self.seconds = sum(process.cpu_times()[:2])
                if (now := listing(self._out)) != before:
                    before, self.changes = now, self.changes + 1
                progress = zip((self.seconds, self.changes), self._until)
                if any(until is not None and value >= until for value, until in progress):
                    return True
                time.sleep(0.001)
        return False


def listing(folder):
    """Returns a nested list of the paths and sizes of files below a folder."""
    entries = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if entry.is_dir():
                entries.append((entry.path, listing(entry.path)))
            else:
                entries.append((entry.path, entry.stat().st_size))
    return sorted(entries)


# === Faults: functions of (process id, disk, random generator) that disturb the process ===


def send(number):
    return lambda pid, disk, rng: os.kill(pid, number)


def stop(pid, disk, rng):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(rng.uniform(0.1, 2))
    os.kill(pid, signal.SIGCONT)


def fill(pid, disk, rng):
    used = shutil.disk_usage(disk).used
    remount(disk, f"size={max(used, 4096)}")


def read_only(pid, disk, rng):
    deadline = time.monotonic() + 20
    while remount(disk, "ro") and time.monotonic() < deadline and os.path.exists(f"/proc/{pid}"):
        time.sleep(0.001)  # the system refuses this while a file is open for writing


def no_more_files(pid, disk, rng):
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))


def no_large_files(pid, disk, rng):
    largest = rng.choice([2**12, 2**16, 2**18])
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest, largest))


def no_memory(pid, disk, rng):
    limit = psutil.Process(pid).memory_info().vms + rng.randrange(2**26)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


FAULTS = {
    "SIGKILL": send(signal.SIGKILL),
    "SIGTERM": send(signal.SIGTERM),
    "SIGSTOP": stop,
    "full disk": fill,
    "read-only folder": read_only,
    "no more files": no_more_files,
    "no large files": no_large_files,
    "out of memory": no_memory,
}
DEADLY = ("SIGKILL", "SIGTERM", "out of memory", "no more files")  # starved libraries may abort


def remount(disk, options):
    """Changes the options of a file system. Returns the exit code of mount."""
    return subprocess.call(["mount", "-o", f"remount,{options}", disk], stderr=subprocess.DEVNULL)


@pytest.fixture
def disk(tmp_path):
    """The path of a new file system in memory, which a test may fill or make read-only."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.call(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", path], stderr=subprocess.DEVNULL):
        pytest.skip("needs the right to mount file systems: full disks and read-only folders are not tried")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


# === The rounds ===


def play(command, whole, untouched, *, disk, work, kind, aim, rng):
    """Plays one round. Returns the exit code of the disturbed command.

    It disturbs one command of the work at a random moment: at a change of the output if `aim` is 'writing', else at a
    random CPU time. Then it calls the failed command again and the remaining commands. The end state must equal the end
    state of undisturbed commands.
    """
    (expected, moments), out = untouched(work, whole), disk / "out"
    out.mkdir()
    calls = work(whole, out)
    number = rng.randrange(len(calls))
    for call in calls[:number]:
        assert command(*call).code == 0
    when = {"seconds": rng.uniform(0, moments[number].seconds)}
    if aim == "writing":
        when = {"changes": rng.randint(1, max(1, moments[number].changes))}
    moment = Moment(out, **when)

    def disturb(pid):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, psutil.NoSuchProcess):
            if moment.follow(pid):
                FAULTS[kind](pid, disk, rng)

    result = command(*calls[number], meanwhile=disturb)
    remount(disk, "rw,size=256m")
    what = f"{kind} of {' '.join(map(str, calls[number]))} at {when}: exit code {result.code}\n{result.err[-3000:]}"
    allowed = {0, 42} if kind == "SIGTERM" else {0} if kind == "SIGSTOP" else {0, 2}
    assert result.code in allowed or (kind in DEADLY and result.code < 0), what
    assert "Traceback" not in result.err, what
    if result.code == 2:
        assert result.line, what
    for call in calls[number if result.code else number + 1 :]:
        again = command(*call)
        assert again.code == 0, f"{what}\nagain: exit code {again.code}\n{again.err[-3000:]}"
    actual = state(out)
    names = [name for name in sorted({*actual, *expected}) if actual.get(name) != expected.get(name)]
    assert not names, f"{what}\ndifferent: {names}"
    return result.code


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault(command, untouched, disk, kind):
    """A round of each fault disturbs a conversion. Other works need the fixture `whole`, which takes half a minute."""
    rng = random.Random(f"{SEED} {kind}")
    play(command, None, untouched, disk=disk, work=convert, kind=kind, aim="writing", rng=rng)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(200))
def test_many_faults(command, whole, untouched, disk, number):
    rng = random.Random(f"{SEED} {number}")
    kind, aim = list(FAULTS)[number % len(FAULTS)], ("writing", "any moment")[number // len(FAULTS) % 2]
    (work,) = rng.choices(WORKS, WEIGHTS)
    if rounds.done("faults", kind, number):
        pytest.skip("done before")
    code = play(command, whole, untouched, disk=disk, work=work, kind=kind, aim=aim, rng=rng)
    rounds.end("faults", kind, number, code)
