"""Trains on a Cloud TPU slice, from a laptop: makes the slice, installs axial, trains, and goes on after a preemption.

%s run --slice=v5e-16 --name=NAME --project=PROJECT --zone=ZONE --gin_file=coco/axial_deeplab_s.gin \\
    --gin_binding="INIT = 'gs://BUCKET/start'" --data_dir=gs://BUCKET/data --model_dir=gs://BUCKET/run
%s run ... --dry_run                   prints every API call and every command, without credentials
%s create | status | logs | ssh | delete --slice=v5e-16 --name=NAME --project=PROJECT --zone=ZONE
%s status --node=NAME                  health and end points of a node of the Cloud TPU API
"""

import contextlib
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time

from absl import flags

from axial.cli import app, checks
from axial.errors import InputError
from axial.io.show import counted, plain, say

FLAGS = flags.FLAGS

flags.DEFINE_string("slice", None, "the slice, like v5e-16, v4-32 or v6e-4x4.")
flags.DEFINE_string("name", None, "name of the slice, and of its run.")
flags.DEFINE_string("project", None, "id of the Google Cloud project.")
flags.DEFINE_string("zone", None, "zone of the slice, like us-central1-a.")
flags.DEFINE_enum(
    "backend",
    "compute_engine",
    ["compute_engine", "queued_resources", "gke"],
    "service that makes the slice: queued_resources is the Cloud TPU API, for v2 to v6e.",
)
flags.DEFINE_enum(
    "provisioning", "on_demand", ["on_demand", "spot", "flex_start", "reserved"], "how the capacity is had."
)
flags.DEFINE_string("reservation", "", "name of a reservation, with --provisioning=reserved.")
flags.DEFINE_string(
    "runtime",
    "",
    "TPU software version (queued_resources), image family (compute_engine) or container image (gke).",
)
flags.DEFINE_string("network", "", "network of the workers; the project's default network by default.")
flags.DEFINE_string("subnetwork", "", "subnetwork of the workers.")
flags.DEFINE_string("service_account", "", "service account of the workers.")
flags.DEFINE_string("namespace", "default", "Kubernetes namespace, with --backend=gke.")
flags.DEFINE_string("context", "", "context of the kubeconfig, with --backend=gke; the current one by default.")
flags.DEFINE_string("queue", "", "queue of Kueue, with --backend=gke; xpk makes multislice-queue.")
flags.DEFINE_multi_string("gin_file", [], "gin files, on disk or of experiments/; a later one overrides.")
flags.DEFINE_multi_string("gin_binding", [], "gin bindings, like 'TrainingConfig.steps = 100'.")
flags.DEFINE_list("change", [], "settings that a resumed run changes, like batch,learning_rate; see axial-train.")
flags.DEFINE_string("data_dir", None, "what axial-convert wrote, in a bucket.")
flags.DEFINE_string("model_dir", None, "folder of the run, in a bucket; it outlives the slice.")
flags.DEFINE_string("install", "", "shell command that installs axial on a worker, in place of scripts/tpu/install.sh.")
flags.DEFINE_float(
    "time_limit",
    None,
    "hours after which run deletes the slice, counted from its first activity; where the Cloud can, it ends the slice "
    "itself 10 minutes later.",
    lower_bound=0.01,
    upper_bound=366 * 24,
)
flags.DEFINE_bool("delete_when_done", False, "delete the slice when the last step is reached.")
flags.DEFINE_integer(
    "steps", None, "steps of the training, for the estimate; by default those of the gin files.", lower_bound=1
)
flags.DEFINE_float(
    "seconds_per_step",
    None,
    "for the estimate; by default what the run itself has measured.",
    lower_bound=1e-6,
    upper_bound=1e6,
)
flags.DEFINE_float(
    "cycles_per_step",
    None,
    "for the estimate: of axial-analyze tpu; by default those of experiments/tpu.csv.",
    lower_bound=1,
    upper_bound=1e15,
)
flags.DEFINE_bool("dry_run", False, "print the API calls and the commands; do nothing.")
flags.DEFINE_bool("yes", False, "delete without a question.")
flags.DEFINE_integer("worker", 0, "number of the worker.")
flags.DEFINE_string("command", None, "command to run on the worker; a shell by default.")
flags.DEFINE_string("node", None, "name of a node of the Cloud TPU API, made by whatever.")
flags.DEFINE_bool("wait", False, "with --node: wait until it is healthy.")
flags.DEFINE_string(
    "api_endpoint", os.environ.get("AXIAL_API_ENDPOINT", ""), "address of a private end point of the service."
)
flags.DEFINE_float("api_timeout", 60, "seconds that an API call may take.", lower_bound=1, upper_bound=3600)
# So short that the loop sees the end of the time limit before the Cloud does (`backend.MARGIN`).
flags.DEFINE_float("poll_seconds", 15, "seconds between two looks at the slice.", lower_bound=0.01, upper_bound=120)
for _name in ("time_limit", "seconds_per_step", "cycles_per_step", "api_timeout", "poll_seconds"):
    # nan is within all bounds
    flags.register_validator(_name, lambda value: value is None or not math.isnan(value), "expected a number")

_PLACE = ("slice", "name", "project", "zone", "backend", "namespace", "context")
_API = ("dry_run", "api_endpoint", "api_timeout", "poll_seconds")
_WANTED = ("provisioning", "reservation", "runtime", "network", "subnetwork", "service_account", "queue", "time_limit")
_RUN = ("gin_file", "gin_binding", "change", "data_dir", "model_dir", "install", "delete_when_done")
# What only some back ends read.
_OF_BACKENDS = {
    **dict.fromkeys(("network", "subnetwork"), ("compute_engine", "queued_resources")),
    **dict.fromkeys(("namespace", "context", "queue"), ("gke",)),
}
_COST = ("steps", "seconds_per_step", "cycles_per_step")


def _calls():
    from axial.cloud.calls import Calls

    first_wait = min(2.0, FLAGS.poll_seconds)
    return Calls(dry_run=FLAGS.dry_run, timeout=FLAGS.api_timeout, first_wait=first_wait, say=say)


def _backend():
    """The `Backend` of the flags. Raises InputError."""
    from axial.cloud.backend import Request
    from axial.cloud.compute_engine import ComputeEngine
    from axial.cloud.gke import Gke
    from axial.cloud.queued_resources import QueuedResources
    from axial.cloud.slices import NO_TENSORFLOW_PAGE, find_slice

    kind = {kind.name: kind for kind in (ComputeEngine, QueuedResources, Gke)}[FLAGS.backend]
    slice_ = find_slice(app.flag("slice"), kind.name)
    for name, backends in _OF_BACKENDS.items():
        if FLAGS[name].present and kind.name not in backends:
            raise InputError(f"--{name} does not go with --backend={kind.name}; it is for {' and '.join(backends)}")
    limit = FLAGS.time_limit
    request = Request(
        **{name: app.flag(name) for name in ("name", "project", "zone")},
        **{name: FLAGS[name].value for name in ("provisioning", "reservation", "runtime", "network", "subnetwork")},
        **{name: FLAGS[name].value for name in ("service_account", "namespace", "context", "queue")},
        slice=slice_,
        seconds=limit * 3600 if limit else None,
    )
    if slice_.generation == "tpu7x":
        say(f"axial-tpu: note: TensorFlow is not supported on TPU7x, says {NO_TENSORFLOW_PAGE}")
    return kind(request, _calls(), endpoint=FLAGS.api_endpoint, poll=FLAGS.poll_seconds)


def _remind(backend):
    """Says that a slice is there and costs money, if it is."""
    from axial.cloud.backend import State

    if FLAGS.dry_run:
        return
    try:
        state = backend.status().state
    except Exception as error:  # the reminder is what matters, also where the Cloud does not answer
        say(f"axial-tpu: {backend.request.name}: its state is not known ({error}); it may run and cost money")
        return
    if state not in (State.ABSENT, State.DELETING):
        slice_ = backend.request.slice
        say(
            f"axial-tpu: {backend.request.name} ({slice_.name}, {counted(slice_.chips, 'chip')}) is {state.value} and "
            f"costs money until {_verb('delete')}"
        )


def _verb(verb):
    """The command line of another verb for the same slice."""
    given = [f"--{name}={FLAGS[name].value}" for name in _PLACE if FLAGS[name].value != FLAGS[name].default]
    return f"axial-tpu {verb} {shlex.join(given)}"


# === create, status, delete, ssh, logs ===


def _check_create():
    """Raises InputError for a time limit that nobody would keep."""
    if FLAGS.backend == "queued_resources" and FLAGS.time_limit:
        raise InputError(
            f"--time_limit={FLAGS.time_limit}: --backend=queued_resources keeps none; axial-tpu run keeps it itself"
        )


def _create(_):
    from axial.cloud.calls import Taken

    backend = _backend()
    backend.status()  # without credentials or the API's package this raises, and nothing was sent
    try:
        with contextlib.ExitStack() as at_end:
            at_end.callback(_remind, backend)  # whatever happens, as the Cloud may have heard the call
            try:
                backend.create()
            except Taken:
                at_end.pop_all()  # the slice is not of this call
                raise InputError(f"--name={FLAGS.name}: is in use; {_verb('status')}") from None
            _wait_until_made(backend)
    except KeyboardInterrupt:
        sys.exit(130)


def _wait_until_made(backend):
    """Waits for capacity. Exits with code 1 if the slice cannot be made."""
    from axial.cloud.backend import State

    said = None
    while (status := backend.status()).state in (State.WAITING, State.CREATING, State.ABSENT):
        if str(status) != said:
            say(f"axial-tpu: {FLAGS.name} is {status}")
            said = str(status)
        time.sleep(FLAGS.poll_seconds)
    say(f"axial-tpu: {FLAGS.name} is {status}")
    if status.state is not State.ACTIVE:
        sys.exit(1)


def _status(_):
    app.refuse_without("node", ("wait",))
    if FLAGS.node:
        _node_status()
        return
    from axial.cloud.backend import State

    if FLAGS.model_dir and not FLAGS.name:
        say(_describe_run(_read_status(FLAGS.model_dir)))
        return
    backend = _backend()
    status = backend.status()
    say(f"{FLAGS.name}: {status}")
    if status.state is State.ACTIVE:
        for worker in backend.workers():
            say(f"  worker {worker.index}  {worker.name}  {worker.address}")
    if FLAGS.model_dir:
        say(_describe_run(_read_status(FLAGS.model_dir)))
    _remind(backend)


def _node_status():
    """Prints what cloud-tpu-client says of a node, by TensorFlow's own copy of it where it is not installed."""
    from axial.cloud.node import describe

    for line in describe(
        FLAGS.node,
        app.flag("project"),
        app.flag("zone"),
        endpoint=FLAGS.api_endpoint,
        wait=FLAGS.wait,
        poll=FLAGS.poll_seconds,
    ):
        say(line)


def _delete(_):
    backend = _backend()
    slice_ = backend.request.slice
    if not FLAGS.yes and not FLAGS.dry_run:
        question = f"Delete {FLAGS.name} ({slice_.name}, {counted(slice_.chips, 'chip')}, {FLAGS.zone})? [y/N] "
        try:
            answer = input(plain(question))
        except EOFError:
            raise InputError(f"{FLAGS.name} is not deleted: nobody answers; give --yes") from None
        if answer.strip().lower() not in ("y", "yes"):
            raise InputError(f"{FLAGS.name} is not deleted")
    backend.delete()
    if not FLAGS.dry_run:
        say(f"axial-tpu: {FLAGS.name} is deleted")


def _workers(backend):
    """The `Worker`s of a slice. Raises InputError if it has none."""
    workers = backend.workers()
    if not workers:
        raise InputError(f"--name={FLAGS.name}: has no workers; {_verb('status')}")
    return workers


def _worker(backend):
    """The `Worker` of --worker."""
    workers = _workers(backend)
    if not 0 <= FLAGS.worker < len(workers):
        raise InputError(f"--worker={FLAGS.worker}: the slice has workers 0 to {len(workers) - 1}")
    return workers[FLAGS.worker]


def _ssh(_):
    backend = _backend()
    _hand_over(backend.ssh(_worker(backend), FLAGS.command))


def _logs(_):
    from axial.cloud.workers import TRAINER, Job, Package, logs_command

    backend = _backend()
    job = Job(FLAGS.name, (), Package("", ""))
    said = f"axial-tpu: {FLAGS.name}: no trainer was started there"
    command = f"test -e {job.folder}/{TRAINER}.pid || {{ echo {said}; exit 2; }} && {logs_command(job)}"
    _hand_over(backend.ssh(_workers(backend)[0], command))


def _hand_over(arguments):
    """Runs a command in place of this one."""
    if FLAGS.dry_run:
        say(*f"$ {shlex.join(arguments)}".split("\n"))
        return
    try:
        sys.exit(subprocess.run(arguments, check=False).returncode)
    except FileNotFoundError:
        raise InputError(f"{arguments[0]} is not installed") from None


# === run ===


def _read_status(model_dir):
    """The `RunStatus` of a run, or None if it has none that can be read."""
    from axial.cloud.run import status_path
    from axial.io.read import read_json
    from axial.io.schemas import RunStatus

    try:
        return read_json(status_path(model_dir), RunStatus)[1]
    except InputError as error:
        if "no such file" not in str(error):
            say(f"axial-tpu: note: {error}")
        return None


def _describe_run(status):
    if status is None:
        return "run: has no status.json"
    speed = f", {status.seconds_per_step:.4g} s a step" if status.seconds_per_step else ""
    return f"run: {status.state}, step {status.step} of {status.steps}{speed}, {status.updated} {status.host}".rstrip()


def _check_run():
    """Raises InputError for flags of `run` that cannot work."""
    from axial.io.check import is_remote

    model_dir, data_dir = app.flag("model_dir"), app.flag("data_dir")
    for name, path in (("model_dir", model_dir), ("data_dir", data_dir)):
        if not is_remote(path):
            raise InputError(
                f"--{name}={path}: expected a folder in a bucket, gs://...; workers have no other in common"
            )
    app.flag("gin_file")


def _training(slice_):
    """The `TrainingConfig` of the gin files, which are checked here and not first on the slice. Raises InputError."""
    checks.check_recipe()
    from axial import configuration
    from axial.chips import GENERATIONS, replicas_of
    from axial.training.trainer import check_batch

    configuration.load(FLAGS.gin_file, FLAGS.gin_binding)
    training = configuration.build("TrainingConfig")
    if slice_.generation in GENERATIONS:
        replicas = replicas_of(f"{slice_.generation}:{slice_.topology}", training.partitions)
        try:
            check_batch(training, replicas, row=configuration.query("TextData.lengths", (1,))[-1])
        except InputError as error:
            raise InputError(f"--slice={slice_.name}: {error}") from None
    return training


def _compiled_rows(slice_):
    """The rows of `axial-analyze tpu --all` of a published recipe as it is, by their forms; none for others."""
    from axial.recipes import experiments_dir
    from axial.tpu_compiler import table as tpu_table

    if FLAGS.gin_binding or len(FLAGS.gin_file) > 1:
        return {}
    rows = tpu_table.read_rows(os.path.join(experiments_dir(), "tpu.csv")).values()
    place = FLAGS.gin_file[0], slice_.generation
    return {row.form: row for row in rows if (row.leaf, row.slice.partition(":")[0]) == place and row.fits}


def _estimate(backend, training):
    """Prints what the run may cost, and whether the compiler says that the images of a core do not fit."""
    from axial.chips import replicas_of
    from axial.cloud import estimate

    slice_, cycles = backend.request.slice, FLAGS.cycles_per_step
    rows = _compiled_rows(slice_)
    if rows:
        kernels = backend.tensorflow is None
        images = training.batch / replicas_of(f"{slice_.generation}:{slice_.topology}")
        step = rows.get("recipe" if kernels else "without kernels")
        if step and not cycles:
            cycles = step.cycles * images / step.batch  # nearly linear in the batch
        largest = rows.get("largest batch, kernels" if kernels else "largest batch, XLA, blocks recomputed")
        if largest and images > largest.batch:
            why = "" if kernels else f", without axial's TPU kernels, as {backend.runtime} has its own TensorFlow"
            say(
                f"axial-tpu: warning: {images:g} images a core, and {largest.batch} fit by the compiler "
                f"(experiments/tpu.csv){why}"
            )
    steps = FLAGS.steps or training.steps
    status = None if FLAGS.dry_run else _read_status(FLAGS.model_dir)
    left = max(steps - status.step, 0) if status else steps
    found = estimate.step_time(slice_, given=FLAGS.seconds_per_step, status=status, cycles=cycles)
    say(f"axial-tpu: {estimate.describe(slice_, left, found)}")


def _arguments(folder):
    """(arguments of axial-train, files that travel to the workers).

    Where a gin file is of this machine, all files and bindings travel as one gin file.
    """
    from axial import configuration
    from axial.io.write import write_text

    files, local = FLAGS.gin_file, []
    if any(os.path.isfile(file) for file in files):
        local = [os.path.join(folder, "config.gin")]
        write_text(local[0], configuration.text())
        files = ["gin/config.gin"]
    arguments = [f"--gin_file={name}" for name in files] + [f"--gin_binding={text}" for text in FLAGS.gin_binding]
    arguments += [f"--change={','.join(FLAGS.change)}"] if FLAGS.change else []
    return (*arguments, f"--data_dir={FLAGS.data_dir}", f"--model_dir={FLAGS.model_dir}"), local


def _run(_):
    from axial.cloud import bucket, workers
    from axial.cloud.run import Ended, Loop, Seam

    backend = _backend()
    training = _training(backend.request.slice)
    _estimate(backend, training)
    for name in bucket.names((FLAGS.data_dir, FLAGS.model_dir)):
        warning = bucket.warning(name, backend.request.region, backend.calls, FLAGS.api_endpoint)
        if warning:
            say(f"axial-tpu: warning: {warning}")
    seam = Seam(
        read_status=(lambda: None) if FLAGS.dry_run else lambda: _read_status(FLAGS.model_dir),
        say=say,
        poll=FLAGS.poll_seconds,
        limit=backend.request.seconds,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments, local = _arguments(folder)
        package = workers.pack(os.path.join(folder, "axial.tar.gz"), local)
        job = workers.Job(FLAGS.name, arguments, package, FLAGS.install or workers.INSTALL)
        try:
            Loop(backend, job, seam).run()
            if FLAGS.delete_when_done:
                backend.delete()
            say(f"axial-tpu: {FLAGS.name}: the last step is reached" if not FLAGS.dry_run else "axial-tpu: dry run")
        except workers.Busy as error:
            stop = f"{_verb('ssh')} --command={shlex.quote(workers.stop_command(job))}"
            raise InputError(f"{error}; to stop it: {stop}") from None
        except Ended as error:
            say(f"axial-tpu: {error}", error=True)
            sys.exit(error.code)
        except KeyboardInterrupt:
            say(f"axial-tpu: the trainer goes on without this command; {_verb('logs')}")
            sys.exit(130)
        finally:
            _remind(backend)


VERBS = {
    "create": app.Verb(_create, (*_PLACE, *_API, *_WANTED), check=_check_create),
    "status": app.Verb(_status, (*_PLACE, *_API, "model_dir", "node", "wait")),
    "run": app.Verb(_run, (*_PLACE, *_API, *_WANTED, *_RUN, *_COST), check=_check_run),
    "logs": app.Verb(_logs, (*_PLACE, *_API)),
    "ssh": app.Verb(_ssh, (*_PLACE, *_API, "worker", "command")),
    "delete": app.Verb(_delete, (*_PLACE, *_API, "yes")),
}


def main():
    app.run_verbs(VERBS, sys.modules[__name__])
