"""What runs on a slice's workers: the installation, a TensorFlow server where one is needed, and the trainer.

All of it is shell commands through `Shell`. They start in a worker's home folder (a pod's working folder) and work in
`axial-NAME`. `scripts/tpu/install.sh` and `scripts/tpu/job.sh` travel with the package, which is a checkout or, from an
installed axial, a wheel.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile

import axial
from axial.cloud.backend import GRPC_PORT
from axial.errors import InputError
from axial.io import show

# Variables by which a process takes itself for a part of some slice. One that a shell or an image has left hangs a
# start on another slice (https://github.com/ray-project/ray/issues/62893). TensorFlow reads those of the first row
# (tensorflow/python/tpu/client/client.py), libtpu those of the others.
SLICE_VARIABLES = (
    *("TPU_NAME", "TPU_CONFIG", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_API_DISCOVERY_URL", "TF_CONFIG"),
    *("CLOUD_TPU_TASK_ID", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY"),
    *("TPU_HOST_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS"),
    *("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "TPU_SKIP_MDS_QUERY"),
    *("TPU_MESH_CONTROLLER_ADDRESS", "TPU_MESH_CONTROLLER_PORT", "TPU_HOSTNAME_OVERRIDE", "TPU_LOAD_LIBRARY"),
    *("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_PORT"),
)
NO_CONNECTION = 255  # exit code of ssh
TRAINER, SERVER = "trainer", "server"
INSTALL = "AXIAL_VENV=venv bash scripts/tpu/install.sh"
_ENDED = re.compile(rf"^axial-tpu: {TRAINER} ended with (\d+)$")
_SCRIPTS = os.path.join("scripts", "tpu")  # of a checkout; an installed axial has them inside the package
_SOURCES = ("setup.py", "README.md", "LICENSE", "axial", "experiments", _SCRIPTS)


class Shell:
    """Runs commands on the workers of a `Backend`, or prints them."""

    def __init__(self, backend, say=show.say):
        self._backend, self._say = backend, say

    @property
    def dry_run(self):
        return self._backend.calls.dry_run

    def run(self, worker, command):
        """(exit code, output) of a command; the output has its errors too."""
        return self._process(self._backend.ssh(worker, command))

    def copy(self, worker, path, target):
        """Copies a file to a worker. Raises Unreachable if that fails."""
        code, output = self._process(self._backend.copy(worker, path, target))
        if code:
            raise Unreachable(f"worker {worker.index}: {path} cannot be copied ({_last_line(output)})")

    def start(self, worker, command):
        """A `subprocess.Popen` of a command with its output, or None in a dry run."""
        arguments = self._backend.ssh(worker, command)
        if self.dry_run:
            self._print(arguments)
            return None
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that its end is also that of the ssh below it
        )

    def _print(self, arguments):
        for line in f"$ {shlex.join(arguments)}".split("\n"):  # a shell takes it as it stands
            self._say(line)

    def _process(self, arguments):
        if self.dry_run:
            self._print(arguments)
            return 0, ""
        try:
            done = subprocess.run(
                arguments,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except FileNotFoundError:
            raise InputError(f"{arguments[0]} is not installed: {_INSTALL_TOOL.get(arguments[0], '')}") from None
        return done.returncode, done.stdout


_INSTALL_TOOL = {
    "gcloud": "https://docs.cloud.google.com/sdk/docs/install",
    "kubectl": "gcloud components install kubectl",
}


def _last_line(output):
    return (output.strip().splitlines() or ["no output"])[-1][:300]


# === The package ===


@dataclasses.dataclass(frozen=True)
class Package:
    """An archive of axial and of gin files, and its SHA-256."""

    path: str
    digest: str


def pack(path, gin_files=()):
    """Writes the archive that workers install.

    Args:
        path: of the archive.
        gin_files: local files beside axial's own; they get the name gin/NAME.

    Returns:
        a `Package`.

    Raises:
        InputError: this axial is neither a checkout nor installed from a wheel.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(axial.__file__)))
    files = {name: os.path.join(root, name) for name in _SOURCES}
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path, "w:gz", compresslevel=6) as archive:
        if not all(map(os.path.exists, files.values())):
            wheel = _wheel(folder, root)
            files = {os.path.basename(wheel): wheel, _SCRIPTS: os.path.join(root, "axial", _SCRIPTS)}
        files |= {os.path.join("gin", os.path.basename(file)): file for file in gin_files}
        for name, file in files.items():
            archive.add(file, name, filter=_plain)
    return Package(path, _digest(path))


def _wheel(folder, root):
    """Path of a wheel of the axial that is installed in `root`, whose files are those of its wheel."""
    for found in importlib.metadata.distributions(name="axial", path=[root]):
        record = found.read_text("RECORD")
        if record is None:
            continue
        kept = {str(file): file for file in found.files or () if file.parts[0] != ".." and not _is_made(file)}
        rows = [row for row in record.splitlines(True) if row.split(",")[0] in kept]
        path = os.path.join(folder, f"axial-{found.version}-py3-none-any.whl")
        with zipfile.ZipFile(path, "w") as wheel:
            for name, file in sorted(kept.items()):
                data = "".join(rows).encode() if file.name == "RECORD" else file.read_binary()
                wheel.writestr(zipfile.ZipInfo(name), data)
        return path
    raise InputError(f"{root}: holds neither a checkout of axial nor what pip has installed of a wheel")


def _is_made(file):
    """Whether pip has made a file that was in no wheel."""
    return file.suffix == ".pyc" or file.name in ("INSTALLER", "REQUESTED", "direct_url.json")


def _plain(entry):
    """A file without what differs from machine to machine; None for what is made by running."""
    if "__pycache__" in entry.name or entry.name.endswith((".pyc", ".egg-info")):
        return None
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def _digest(path):
    """SHA-256 of an archive's files, whatever the order and the time of their packing."""
    digest = hashlib.sha256()
    with tarfile.open(path, "r:gz") as archive:
        for entry in sorted(archive, key=lambda entry: entry.name):
            content = archive.extractfile(entry) if entry.isfile() else io.BytesIO()
            digest.update(entry.name.encode() + b"\0" + hashlib.sha256(content.read()).digest())
    return digest.hexdigest()


# === Commands ===


@dataclasses.dataclass(frozen=True)
class Job:
    """A training run.

    Attributes:
        name: of the slice and of the folder on its workers.
        arguments: of axial-train, without --strategy and --tpu.
        package: a `Package`.
        install: shell command that installs it, in the unpacked archive.
    """

    name: str
    arguments: tuple
    package: Package
    install: str = INSTALL

    @property
    def folder(self):
        return f"axial-{self.name}"


def install(shell, workers, job):
    """Installs axial on every worker that does not have this very package.

    Raises:
        Unreachable: a worker cannot be reached.
        InputError: an installation fails.
    """
    _on_each(shell, workers, lambda worker: _install(shell, worker, job))


def _on_each(shell, workers, action):
    """Calls action(worker) for all workers at the same time."""
    with concurrent.futures.ThreadPoolExecutor(1 if shell.dry_run else min(len(workers), 32)) as pool:
        list(pool.map(action, workers))


def _install(shell, worker, job):
    stamp = f"{job.package.digest} {job.install}"
    code, output = shell.run(worker, f"cat {job.folder}/installed 2>/dev/null || true")
    if code:
        raise Unreachable(f"worker {worker.index}: cannot be reached ({_last_line(output)})")
    if stamp in output:
        return
    archive = f"{job.folder}.tar.gz"
    shell.copy(worker, job.package.path, archive)
    # The archive has no times, so pip would take what it has built of an earlier package for new.
    earlier = " ".join(("installed", "build", "gin", *_SOURCES))
    code, output = shell.run(
        worker,
        f"mkdir -p {job.folder} && cd {job.folder} && rm -rf {earlier} *.whl && tar xzf ../{archive} && "
        f"{{ {job.install}; }} >install.log 2>&1 && printf '%s' {shlex.quote(stamp)} >installed || "
        "{ tail -n 5 install.log; exit 1; }",
    )
    if code:
        kind = Unreachable if code == NO_CONNECTION else InputError
        raise kind(
            f"worker {worker.index}: the installation failed, see {job.folder}/install.log ({_last_line(output)})"
        )


class Unreachable(InputError):
    """No shell can be had on a worker."""


class Busy(InputError):
    """A trainer with other arguments runs on the slice."""


def tpu_address(workers):
    """What --tpu is on the first worker: 'local' for one host, the addresses of all for several."""
    if len(workers) == 1:
        return "local"
    return ",".join(f"grpc://{worker.address}:{GRPC_PORT}" for worker in workers)


def _clean(backend, workers):
    """`env` with the slice variables cleared that the service does not give itself."""
    cleared = [name for name in SLICE_VARIABLES if not (name in backend.gives and len(workers) == 1)]
    return ["env", *(f"--unset={name}" for name in cleared)]


def _in_folder(job, command):
    path = 'export PATH="$PWD/venv/bin:$HOME/.local/bin:$PATH" PYTHONUNBUFFERED=1'
    return f"cd {job.folder} && {path} && {command}"


def start_command(backend, workers, job, verb="start"):
    """The shell command that starts the trainer on the first worker or, with 'ask', says whether it runs."""
    variables = {**backend.environment(), "AXIAL_TPU": backend.request.slice.generation}
    if len(workers) > 1:
        variables["TPU_LOAD_LIBRARY"] = "0"  # the worker's server holds its chips; the trainer is its client
    words = _clean(backend, workers) + [f"{name}={value}" for name, value in variables.items()]
    words += ["axial-train", "--strategy=tpu", f"--tpu={tpu_address(workers)}", *job.arguments]
    return _in_folder(job, f"bash scripts/tpu/job.sh {verb} {TRAINER} {shlex.join(words)}")


def server_command(backend, job):
    """The shell command that starts TensorFlow's server on a worker. A server of an earlier command stays."""
    cleared = [f"--unset={name}" for name in SLICE_VARIABLES if name not in backend.gives]
    words = ["env", *cleared, "python3", "-m", "axial.cloud.server", f"--port={GRPC_PORT}"]
    return _in_folder(job, f"{{ bash scripts/tpu/job.sh start {SERVER} {shlex.join(words)} || [[ $? == 3 ]]; }}")


def is_running(shell, backend, workers, job):
    """Whether the trainer of this job runs. Raises Busy if one with other arguments does, or Unreachable."""
    # true: a worker without axial has no trainer
    code, output = shell.run(workers[0], start_command(backend, workers, job, "ask") + " || true")
    if code:
        raise Unreachable(f"worker 0: cannot be reached ({_last_line(output)})")
    said = output.splitlines()
    if f"{TRAINER} runs already, with another command" in said:
        raise Busy(f"--name={job.name}: a trainer with other flags runs there")
    return f"{TRAINER} runs already" in said


def start(shell, backend, workers, job):
    """Starts the servers, where the image has none, and the trainer, unless they run. Raises InputError."""
    if backend.starts_server():
        _on_each(shell, workers, lambda worker: _must(shell, worker, server_command(backend, job)))
    _must(shell, workers[0], start_command(backend, workers, job))


def _must(shell, worker, command):
    code, output = shell.run(worker, command)
    if code:
        raise Unreachable(f"worker {worker.index}: nothing can be started ({_last_line(output)})")


def stop(shell, worker, job):
    """Asks the trainer to save and end."""
    shell.run(worker, stop_command(job))


def stop_command(job):
    """The shell command that asks the trainer to save and end."""
    return _in_folder(job, f"bash scripts/tpu/job.sh stop {TRAINER}")


def logs_command(job, byte=1):
    """The shell command that prints the trainer's log from a byte on, until the trainer ends."""
    return _in_folder(job, f"bash scripts/tpu/job.sh follow {TRAINER} {byte}")


class Follower:
    """Prints a trainer's log as it grows.

    Attributes:
        code: exit code of the trainer; None while it runs, or if the connection has ended.
        alive: whether the connection stands.
    """

    def __init__(self, shell, worker, job, *, byte=1, out=None):
        self.code = 0 if shell.dry_run else None
        self._byte = byte
        self._out = out or sys.stdout
        self._process = shell.start(worker, logs_command(job, byte))
        self._thread = threading.Thread(target=self._read, daemon=True)
        if self._process:
            self._thread.start()

    def _read(self):
        for line in self._process.stdout:
            ended = _ENDED.match(line.rstrip("\n"))
            if ended:
                self.code = int(ended[1])
                continue
            self._byte += len(line.encode())
            try:
                show.say(line.removesuffix("\n"), to=self._out)
            except show.Closed:  # the next line of the command itself ends it
                break

    @property
    def alive(self):
        return self._process is not None and self._thread.is_alive()

    @property
    def byte(self):
        """The first byte of the log that is not printed."""
        return self._byte

    def wait(self, seconds):
        """Waits until the connection ends, but not longer than some seconds."""
        if self._process:
            self._thread.join(seconds)

    def close(self):
        """Ends the connection, not the trainer."""
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._thread.join(5)
            self._process.stdout.close()
