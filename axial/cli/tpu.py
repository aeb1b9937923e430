"""Trains on a Cloud TPU slice, by an engine that lives in the cloud: this machine only hands over.

%s launch --engine=gke --slice=v5e-16 --name=NAME --runtime=IMAGE --time_limit=48 \\
    --gin_file=coco/axial_deeplab_s.gin --data_dir=gs://BUCKET/data --model_dir=gs://BUCKET/run
%s launch --engine=skypilot ... --zone=ZONE --wheel=gs://BUCKET/axial_deeplab_tf-VERSION-py3-none-any.whl
%s launch --engine=gcloud ... --project=PROJECT --zone=ZONE [--yes] \\
    --wheel=gs://BUCKET/axial_deeplab_tf-VERSION-py3-none-any.whl
%s launch ... --dry_run                prints the YAML or the script, and the commands; needs no credentials
%s status | logs | delete --engine=ENGINE --name=NAME
%s status --node=NAME --project=PROJECT --zone=ZONE     health and end points of a node of the Cloud TPU API
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time

from absl import flags

from axial.analysis import slice_cost as cost
from axial.cli import app, checks
from axial.cloud import bucket
from axial.cloud.engine import Request
from axial.cloud.gcloud import Gcloud
from axial.cloud.gke import Gke
from axial.cloud.node import describe
from axial.cloud.runs import Run
from axial.cloud.skypilot import SkyPilot
from axial.errors import InputError
from axial.io.check import is_remote
from axial.io.gfile import check_plain
from axial.io.read import read_json
from axial.io.schemas import STATUS, RunStatus
from axial.io.show import plain, say
from axial.io.write import write_text
from axial.slices import find_slice

FLAGS = flags.FLAGS
ENGINES = {kind.name: kind for kind in (Gke, SkyPilot, Gcloud)}

flags.DEFINE_enum("engine", None, [*ENGINES], "what makes the slice and looks after it.")
flags.DEFINE_string("slice", None, "the slice, like v5e-16, v4-32 or v6e-4x4.")
flags.DEFINE_string("name", None, "name of the run and of its slice.")
flags.DEFINE_string("project", "", "id of the Google Cloud project.")
flags.DEFINE_string("zone", "", "zone of the slice, like us-central1-a.")
flags.DEFINE_enum("provisioning", "on_demand", Gke.capacity, "how the capacity is had.")
flags.DEFINE_string("reservation", "", "name of a reservation (gke).")
flags.DEFINE_string("runtime", "", "container image with axial (gke), or TPU software version (skypilot, gcloud).")
flags.DEFINE_string("wheel", "", "axial's wheel in a bucket, which the hosts install (skypilot, gcloud).")
flags.DEFINE_string("service_account", "", "service account of the hosts (gke: of Kubernetes).")
flags.DEFINE_string("network", "", "network of the hosts (gcloud); the project's default network by default.")
flags.DEFINE_string("subnetwork", "", "subnetwork of the hosts (gcloud).")
flags.DEFINE_string("namespace", "default", "namespace of Kubernetes (gke).")
flags.DEFINE_string("context", "", "context of the kubeconfig (gke); the current one by default.")
flags.DEFINE_string("queue", "", "queue of Kueue (gke).")
flags.DEFINE_multi_string("gin_file", [], "gin files, on disk or of experiments/; a later one overrides.")
flags.DEFINE_multi_string("gin_binding", [], "gin bindings, like 'TrainingConfig.steps = 100'.")
flags.DEFINE_list("change", [], "settings that a resumed run changes, like batch,learning_rate; see axial-train.")
flags.DEFINE_string("data_dir", None, "what axial-convert wrote, in a bucket.")
flags.DEFINE_string("model_dir", None, "folder of the run, in a bucket; it outlives the slice.")
flags.DEFINE_float("time_limit", None, "hours until the deadline, from now.", lower_bound=0.01, upper_bound=8784)
flags.DEFINE_float("seconds_per_step", None, "of the estimate; or as measured.", lower_bound=1e-6, upper_bound=1e6)
flags.DEFINE_bool("dry_run", False, "print the YAML or the script, and the commands; do nothing.")
flags.DEFINE_bool("yes", False, "do it without a question (delete), or at all (launch --engine=gcloud).")
flags.DEFINE_string("node", None, "name of a node of the Cloud TPU API, made by whatever.")
flags.DEFINE_bool("wait", False, "with --node: wait until it is healthy.")
for _name in ("time_limit", "seconds_per_step"):  # nan is within all bounds
    flags.register_validator(_name, lambda value: value is None or value == value, "expected a number")

_WHICH = ("engine", "name", "project", "zone", "namespace", "context", "dry_run")
_OF_ENGINES = sorted({flag for kind in ENGINES.values() for flag in kind.flags})
_RUN = ("gin_file", "gin_binding", "change", "data_dir", "model_dir", "time_limit", "seconds_per_step")


def _engine(slice_=None):
    """The `Engine` of the flags. Raises InputError."""
    kind = ENGINES[app.flag("engine")]
    for name in _OF_ENGINES:
        if FLAGS[name].present and name not in kind.flags:
            raise InputError(f"--{name} does not go with --engine={kind.name}")
    for name in ("name", *kind.needs, *(kind.needs_to_launch if slice_ else ())):
        app.flag(name)
    return kind(Request(slice=slice_, **{name: FLAGS[name].value for name in (*kind.flags, "name", "provisioning")}))


def _say(line):
    say(f"axial-tpu: {line}")


def _verb(verb):
    """The command line of another verb for the same run."""
    names = [name for name in _WHICH if FLAGS[name].value != FLAGS[name].default]
    return f"axial-tpu {verb} {shlex.join(f'--{name}={FLAGS[name].value}' for name in names)}"


def _call(engine, arguments):
    """What a command of the engine's tool prints. A dry run prints the command, and gives None."""
    if not FLAGS.dry_run:
        return engine.call(arguments)
    say(*f"$ {shlex.join(arguments)}".split("\n"))
    return None


def _read_status(model_dir):
    """The `RunStatus` of a run, or None if it has none that can be read."""
    try:
        return read_json(os.path.join(model_dir, STATUS), RunStatus)[1]
    except InputError as error:
        if "no such file" not in str(error):
            _say(f"note: {error}")
        return None


def _check_launch():
    """Raises InputError for flags of `launch` that cannot work."""
    for name in ("engine", "gin_file", "time_limit", "data_dir", "model_dir"):
        value = app.flag(name)
        if name.endswith("_dir") and not is_remote(value):
            raise InputError(
                f"--{name}={value}: expected a folder in a bucket, gs://...; hosts have no other in common"
            )
    check_plain(FLAGS.model_dir)


def _training(slice_):
    """(`TrainingConfig` of the gin files, replicas), which are checked here and not on the slice. Raises InputError."""
    checks.check_recipe()
    from axial import configuration
    from axial.chips import replicas_of
    from axial.training.trainer import check_batch

    configuration.load(FLAGS.gin_file, FLAGS.gin_binding)
    training = configuration.build("TrainingConfig")
    replicas = replicas_of(f"{slice_.generation}:{slice_.topology}", training.partitions)
    try:
        check_batch(training, replicas, row=configuration.query("TextData.lengths", (1,))[-1])
    except InputError as error:
        raise InputError(f"--slice={slice_.name}: {error}") from None
    return training, replicas


def _check_data(training):
    """Raises InputError unless the data has the splits of the gin files."""
    from axial import configuration
    from axial.data.tfrecord import read_manifest

    for name in ("train_split", "eval_split")[: 2 if training.eval_interval else 1]:
        for kind in ("DataConfig", "ClassificationData", "DetectionData", "TextData"):
            if split := configuration.query(f"{kind}.{name}", None):
                read_manifest(FLAGS.data_dir, split)


def _cost(engine, images, left, status):
    """Prints what the run may cost, and whether the compiler says that the images of a core do not fit."""
    slice_, cycles = engine.request.slice, None
    rows = cost.compiled_steps(FLAGS.gin_file, slice_.generation) if not FLAGS.gin_binding else {}
    if step := rows.get("recipe" if engine.kernels else "without kernels"):
        cycles = step.cycles * images / step.batch  # nearly linear in the batch
    largest = rows.get("largest batch, kernels" if engine.kernels else "largest batch, XLA, blocks recomputed")
    if largest and images > largest.batch:
        why = "" if engine.kernels else f", without axial's TPU kernels, as {engine.runtime} has its own TensorFlow"
        _say(f"warning: {images:g} images a core, and {largest.batch} fit by the compiler (experiments/tpu.csv){why}")
    spent = cost.step_time(slice_, given=FLAGS.seconds_per_step, status=status, cycles=cycles)
    for line in cost.describe(slice_, engine.region, steps_left=left, time=spent, limit=FLAGS.time_limit):
        _say(line)


def _run_of(engine):
    """The `Run` of the flags. Where a gin file is of this machine, all files and bindings travel as one text."""
    from axial import configuration

    is_local = any(map(os.path.isfile, FLAGS.gin_file))
    arguments = [f"--gin_file={name}" for name in FLAGS.gin_file if not is_local]
    arguments += [f"--gin_binding={binding}" for binding in FLAGS.gin_binding]
    arguments += [f"--change={','.join(FLAGS.change)}"] * bool(FLAGS.change)
    return Run(
        name=FLAGS.name,
        arguments=[*arguments, f"--data_dir={FLAGS.data_dir}"],
        model_dir=FLAGS.model_dir,
        deadline=round(time.time() + FLAGS.time_limit * 3600),
        gin=configuration.text() if is_local else "",
        **engine.run_options(),
    )


def _launch(_):
    engine = _engine(find_slice(app.flag("slice")))
    training, replicas = _training(engine.request.slice)
    status = None if FLAGS.dry_run else _read_status(FLAGS.model_dir)
    left = max(training.steps - status.step, 0) if status else training.steps
    if status and status.state == "done" and not left:
        _say(f"{FLAGS.model_dir}: the last step is reached already; nothing is made")
        return
    _cost(engine, training.batch / replicas, left, status)
    for name in bucket.names((FLAGS.data_dir, FLAGS.model_dir)) if engine.region and not FLAGS.dry_run else ():
        if warning := bucket.warning(name, engine.region):
            _say(f"warning: {warning}")
    for line in engine.notes:
        _say(f"note: {line}")
    run = _run_of(engine)
    FLAGS.dry_run = FLAGS.dry_run or (engine.by_hand and not FLAGS.yes)
    for arguments, check in engine.checks():
        said = _call(engine, arguments)
        if check and not FLAGS.dry_run:
            check(said)
    if FLAGS.dry_run:
        say(f"$ cat > {engine.file} <<'END'", *engine.text(run).splitlines(), "END")
        _call(engine, engine.launch(engine.file, run))
        return
    _check_data(training)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, engine.file)
        write_text(path, engine.text(run))
        engine.call(engine.launch(path, run))
    _say(f"{FLAGS.name} is handed over, and goes on without this machine; it costs money until {_verb('delete')}")


def _status(_):
    app.refuse_without("node", ("wait",))
    if FLAGS.node:
        say(*describe(FLAGS.node, app.flag("project"), app.flag("zone"), wait=FLAGS.wait))
        return
    if FLAGS.name or not FLAGS.model_dir:
        engine = _engine()
        said = _call(engine, engine.status())
        if said is not None:
            line, costs = engine.describe(said)
            say(f"{FLAGS.name}: {line}" + (f"; it costs money until {_verb('delete')}" if costs else ""))
    if FLAGS.model_dir:
        if (status := _read_status(FLAGS.model_dir)) is None:
            say("run: has no status.json")
            return
        speed = f", {status.seconds_per_step:.4g} s a step" if status.seconds_per_step else ""
        where = f"step {status.step} of {status.steps}{speed}, {status.updated} {status.host}"
        say(f"run: {status.state}, {where}".rstrip())


def _logs(_):
    engine = _engine()
    if FLAGS.dry_run:
        _call(engine, engine.logs())
        return
    try:
        sys.exit(subprocess.run(engine.logs(), check=False).returncode)
    except FileNotFoundError:
        raise engine.not_installed() from None


def _delete(_):
    engine = _engine()
    if not FLAGS.yes and not FLAGS.dry_run:
        try:
            answer = input(plain(f"End {FLAGS.name} and delete its slice? [y/N] "))
        except EOFError:
            raise InputError(f"{FLAGS.name} is not deleted: nobody answers; give --yes") from None
        if answer.strip().lower() not in ("y", "yes"):
            raise InputError(f"{FLAGS.name} is not deleted")
    if _call(engine, engine.delete()) is not None:
        _say(f"{FLAGS.name} is deleted")


VERBS = {
    "launch": app.Verb(_launch, (*_WHICH, "slice", "provisioning", *_OF_ENGINES, *_RUN, "yes"), check=_check_launch),
    "status": app.Verb(_status, (*_WHICH, "model_dir", "node", "wait")),
    "logs": app.Verb(_logs, _WHICH),
    "delete": app.Verb(_delete, (*_WHICH, "yes")),
}


def main():
    app.run_verbs(VERBS, sys.modules[__name__])
