"""Trains on a Cloud TPU slice. An engine in the cloud supervises the run; this machine only submits it.

%s launch --engine=gke --slice=v5e-16 --name=NAME --runtime=IMAGE --time_limit=48 \\
    --gin_file=coco/axial_deeplab_s.gin --data_dir=gs://BUCKET/data --model_dir=gs://BUCKET/run
%s launch --engine=skypilot ... --zone=ZONE --wheel=gs://BUCKET/axial_deeplab_tf-VERSION-py3-none-any.whl
%s launch --engine=gcloud ... --project=PROJECT --zone=ZONE [--yes] \\
    --wheel=gs://BUCKET/axial_deeplab_tf-VERSION-py3-none-any.whl
%s launch ... --dry_run                prints the YAML or script and the commands; needs no credentials
%s status | logs | delete --engine=ENGINE --name=NAME
%s status --node=NAME --project=PROJECT --zone=ZONE     health and endpoints of a node of the Cloud TPU API
"""

import dataclasses
import os
import shlex
import subprocess
import sys
import tempfile
import time

from axial import recipes
from axial.analysis import slice_cost as cost
from axial.cli import app, flags
from axial.cli.flags import Flag, Flags
from axial.cloud import bucket
from axial.cloud.engines import ENGINES, Request
from axial.cloud.node import describe
from axial.cloud.runs import Run
from axial.errors import InputError, named
from axial.io.gfile import check_plain, is_remote
from axial.io.read import read_json
from axial.io.schemas import STATUS, RunStatus
from axial.io.show import plain, say
from axial.io.write import write_text
from axial.slices import find_slice

_ENGINE_FLAGS = {flag for kind in ENGINES.values() for flag in kind.flags}
YES = Flag(bool, "delete: skips the question; launch --engine=gcloud: runs the commands.", False)


class Which(Flags):
    """Flags that name a run and its location."""

    engine = Flag(str, "service that creates and supervises the slice.", choices=tuple(ENGINES))
    name = Flag(str, "name of the run and of its slice.")
    project = Flag(str, "id of the Google Cloud project.", "")
    zone = Flag(str, "zone of the slice, like us-central1-a.", "")
    dry_run = Flag(bool, "prints the YAML or script and the commands, and does nothing else.", False)

    def make_engine(self, slice_=None):
        """Makes the `Engine` of the flags. Raises InputError if a flag is missing or does not suit the engine."""
        kind = ENGINES[self.need("engine")]
        asked = self.changed(*_ENGINE_FLAGS)
        for name in sorted(asked.keys() - kind.flags):
            raise InputError(f"--{name} does not go with --engine={kind.name}")
        for name in ("name", *kind.needs, *(kind.needs_to_launch if slice_ else ())):
            self.need(name)
        return kind(Request(slice=slice_, **self.changed("name", "provisioning"), **asked))

    def command(self, verb):
        """The command line of another verb for the same run."""
        named = self.changed(*Which.declared())
        return f"axial-tpu {verb} {shlex.join(f'--{name}={value}' for name, value in named.items())}"

    def call(self, engine, arguments):
        """Runs a command of the engine's tool and returns its output. A dry run prints the command and returns None."""
        if not self.dry_run:
            return engine.call(arguments)
        say(*f"$ {shlex.join(arguments)}".split("\n"))
        return None


class Launch(Which):
    slice = Flag(str, "the slice, like v5e-16, v4-32 or v6e-4x4.", needed=True)
    provisioning = Flag(str, "type of capacity.", "on_demand", choices=("on_demand", "spot"))
    runtime = Flag(str, "container image with axial (gke), or TPU software version (skypilot, gcloud).", "")
    wheel = Flag(str, "axial's wheel in a bucket, for the hosts to install (skypilot, gcloud).", "")
    service_account = Flag(str, "service account of the hosts (gke: a Kubernetes service account).", "")
    network = Flag(str, "network of the hosts (gcloud); by default the project's default network.", "")
    queue = Flag(str, "Kueue queue (gke).", "")
    gin_file = flags.GIN_FILE
    gin_binding = flags.GIN_BINDING
    change = flags.CHANGE
    data_dir = flags.DATA_DIR
    model_dir = flags.MODEL_DIR
    time_limit = Flag(float, "hours until the deadline, from now.", least=0.01, most=8784)
    seconds_per_step = Flag(float, "step time for the cost; by default as measured or compiled.", least=1e-6, most=1e6)
    yes = YES

    def check(self):
        for name in ("engine", "gin_file", "time_limit", "data_dir", "model_dir"):
            value = self.need(name)
            if name.endswith("_dir") and not is_remote(value):
                raise InputError(f"--{name}={value}: expected a folder in a bucket, as the hosts share no other")
        check_plain(self.model_dir)


class Status(Which):
    model_dir = flags.MODEL_DIR
    node = Flag(str, "name of a node of the Cloud TPU API, whatever created it.")
    wait = Flag(bool, "with --node: waits until the node is healthy.", False, needs="node")


class Delete(Which):
    yes = YES


def _say(*lines):
    say(*(f"axial-tpu: {line}" for line in lines))


def _read_status(model_dir):
    """The `RunStatus` of a run, or None if its status.json is missing or unreadable."""
    try:
        return read_json(os.path.join(model_dir, STATUS), RunStatus)[1]
    except InputError as error:
        if "no such file" not in str(error):
            _say(f"note: {error}")
        return None


def _training(slice_, given):
    """(`TrainingConfig` of the gin files, number of replicas). Raises InputError if the files do not suit the slice."""
    recipe = recipes.read(given.gin_file, given.gin_binding)
    from axial.recipes import configuration
    from axial.training.trainer import check_batch

    configuration.bind(recipe)
    training = configuration.build("TrainingConfig")
    replicas, rest = divmod(slice_.devices, training.partitions)
    with named(f"--slice={slice_.name}"):
        if rest:
            raise InputError(f"TrainingConfig.partitions = {training.partitions}: it has {slice_.devices} devices")
        check_batch(training, replicas, row=configuration.query("TextData.lengths", (1,))[-1])
    return training, replicas


def _check_data(given):
    """Raises InputError if the data lacks a split of the gin files."""
    from axial.recipes import configuration

    task, training, _ = configuration.build(data_dir=given.data_dir)
    configuration.check_splits(task, [task.data.train_split, *[None] * bool(training.eval_interval)])


def _cost(given, engine, images, *, left, status):
    """Prints the estimated cost of the run, and a warning if a replica's images exceed the largest batch that fits."""
    slice_, cycles = engine.request.slice, None
    rows = cost.compiled_steps(given.gin_file, slice_.generation) if not given.gin_binding else {}
    if step := rows.get("recipe" if engine.kernels else "without kernels"):
        cycles = step.cycles * images / step.batch  # cycles are nearly linear in the batch size
    largest = rows.get("largest batch, kernels" if engine.kernels else "largest batch, XLA, blocks recomputed")
    if largest and images > largest.batch:
        why = "" if engine.kernels else f", without axial's TPU kernels, as {engine.runtime} has its own TensorFlow"
        _say(f"warning: {images:g} images a core, and {largest.batch} fit by the compiler (experiments/tpu.csv){why}")
    spent = cost.step_time(slice_, given=given.seconds_per_step, status=status, cycles=cycles)
    _say(*cost.describe(slice_, engine.region, steps_left=left, time=spent, limit=given.time_limit))


def _run_of(engine, given):
    """The `Run` that the flags describe. If a gin file is local, the run gets all files and bindings as one text."""
    from axial.recipes import configuration

    is_local = any(map(os.path.isfile, given.gin_file))
    arguments = [f"--gin_file={name}" for name in given.gin_file if not is_local]
    arguments += [f"--gin_binding={binding}" for binding in given.gin_binding]
    arguments += [f"--change={','.join(given.change)}"] * bool(given.change)
    return Run(
        name=given.name,
        arguments=[*arguments, f"--data_dir={given.data_dir}"],
        model_dir=given.model_dir,
        deadline=round(time.time() + given.time_limit * 3600),
        gin=configuration.text() if is_local else "",
        **engine.run_options(),
    )


def _launch(given):
    engine = given.make_engine(find_slice(given.slice))
    training, replicas = _training(engine.request.slice, given)
    status = None if given.dry_run else _read_status(given.model_dir)
    left = max(training.steps - status.step, 0) if status else training.steps
    if status and status.state == "done" and not left:
        _say(f"{given.model_dir}: the last step is reached already; nothing is made")
        return
    _cost(given, engine, training.batch / replicas, left=left, status=status)
    for name in bucket.names((given.data_dir, given.model_dir)) if engine.region and not given.dry_run else ():
        if warning := bucket.warning(name, engine.region):
            _say(f"warning: {warning}")
    _say(*(f"note: {line}" for line in engine.notes))
    run = _run_of(engine, given)
    given = dataclasses.replace(given, dry_run=given.dry_run or (engine.by_hand and not given.yes))
    for arguments, check in engine.checks():
        said = given.call(engine, arguments)
        if check and not given.dry_run:
            check(said)
    if given.dry_run:
        say(f"$ cat > {engine.file} <<'END'", *engine.text(run).splitlines(), "END")
        given.call(engine, engine.launch(engine.file, run))
        return
    _check_data(given)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, engine.file)
        write_text(path, engine.text(run))
        engine.call(engine.launch(path, run))
    _say(f"{given.name} is submitted, and goes on without this machine; it costs money until {given.command('delete')}")


def _status(given):
    if given.node:
        say(*describe(given.node, given.need("project"), given.need("zone"), wait=given.wait))
        return
    if given.name or not given.model_dir:
        engine = given.make_engine()
        said = given.call(engine, engine.commands()["status"])
        if said is not None:
            line, costs = engine.describe(said)
            say(f"{given.name}: {line}" + (f"; it costs money until {given.command('delete')}" if costs else ""))
    if given.model_dir:
        if (status := _read_status(given.model_dir)) is None:
            say("run: has no status.json")
            return
        speed = f", {status.seconds_per_step:.4g} s a step" if status.seconds_per_step else ""
        where = f"step {status.step} of {status.steps}{speed}, {status.updated} {status.host}"
        say(f"run: {status.state}, {where}".rstrip())


def _logs(given):
    engine = given.make_engine()
    follow = engine.commands()["logs"]
    if given.dry_run:
        given.call(engine, follow)
        return
    try:
        sys.exit(subprocess.run(follow, check=False).returncode)
    except FileNotFoundError:
        raise engine.not_installed() from None


def _delete(given):
    engine = given.make_engine()
    if not given.yes and not given.dry_run:
        try:
            answer = input(plain(f"End {given.name} and delete its slice? [y/N] "))
        except EOFError:
            raise InputError(f"{given.name} is not deleted: nobody answers; use --yes") from None
        if answer.strip().lower() not in ("y", "yes"):
            raise InputError(f"{given.name} is not deleted")
    if given.call(engine, engine.commands()["delete"]) is not None:
        _say(f"{given.name} is deleted")


VERBS = {"launch": (Launch, _launch), "status": (Status, _status), "logs": (Which, _logs), "delete": (Delete, _delete)}


def main():
    app.run(VERBS)
