"""axial-tpu from the outside, against stand-ins of the APIs and of gcloud."""

import os
import re
import shlex
import signal
import time

import pytest

pytest.importorskip("google.cloud.tpu_v2")
pytest.importorskip("google.cloud.compute_v1")
pytest.importorskip("kubernetes")

import stand_ins
from axial import configuration
from axial.tpu_compiler import table as tpu_table
from conftest import ROOT

PLACE = "--name=run", "--project=p", "--zone=us-west4-a"
QUEUED = (*PLACE, "--slice=v5e-16", "--backend=queued_resources")
RECIPE = "--gin_file=coco/axial_deeplab_s.gin", "--data_dir=gs://far/data"
THREE_PARTS = "--gin_binding=TrainingConfig.accumulate = 3"
TEXT = "--gin_file=multi30k/transformer_nano.gin", THREE_PARTS, "--data_dir=gs://a"


@pytest.fixture
def cloud(tmp_path):
    """Function that makes a stand-in of the Cloud TPU API; its `flags` and `environment` lead a command to it."""
    servers = []

    def make(lives, **options):
        made = stand_ins.TpuApi(tmp_path, lives, **options)
        servers.append(stand_ins.serving(made))
        made.flags = f"--api_endpoint={servers[-1].__enter__()}", "--poll_seconds=0.05", "--api_timeout=5"
        made.environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        return made

    yield make
    for server in servers:
        server.__exit__(None, None, None)


def test_a_run_from_creation_to_deletion(command, cloud, tmp_path):
    here = cloud([("waiting", "active"), ("creating", "active")])
    here.plan("10 preempted", "100 0")
    run = f"--model_dir=file://{tmp_path}/model"
    flags = *QUEUED, *RECIPE, run, *here.flags
    result = command("tpu", "run", *flags, "--install=true", "--seconds_per_step=0.36", environment=here.environment)
    assert result.code == 0, result.err
    assert "200000 steps of 0.36 s are 20.0 hours and 320 chip-hours" in result.out
    assert "(--seconds_per_step)" in result.out
    assert "warning: gs://far: the bucket is in europe-west4, the slice in us-west4" in result.out
    assert "run is preempted" in result.out and "step 100 of 100, then 0" in result.out
    assert "the last step is reached" in result.out
    # the reminder is last, and its command works as it stands
    last = result.out.splitlines()[-1]
    assert "run (v5e-16, 16 chips) is active and costs money until axial-tpu delete" in last
    delete = re.search(r"axial-tpu (delete .*)", last)[1].split()

    status = command("tpu", "status", *QUEUED, run, *here.flags, environment=here.environment)
    assert "worker 3  3  10.0.0.3" in status.out and "run: done, step 100 of 100, 0.5 s a step" in status.out
    assert command("tpu", "logs", *QUEUED, *here.flags, environment=here.environment).code == 0
    shell = command("tpu", "ssh", *QUEUED, *here.flags, "--worker=2", "--command=exit 7", environment=here.environment)
    assert shell.code == 7
    assert "workers 0 to 3" in command("tpu", "ssh", *QUEUED, *here.flags, "--worker=4").line
    assert command("tpu", *delete, *here.flags).code == 2 and here.script  # nobody answers the question
    result = command("tpu", *delete, *here.flags, "--yes")
    assert result.code == 0 and result.out.splitlines()[-1] == "axial-tpu: run is deleted" and here.script is None


def test_a_slice_is_deleted_when_its_run_is_done(command, cloud, tmp_path):
    here = cloud([("active",)])
    here.plan("100 0")
    flags = *QUEUED, *RECIPE, f"--model_dir=file://{tmp_path}/model", *here.flags, "--install=true"
    result = command("tpu", "run", *flags, "--delete_when_done", environment=here.environment)
    assert result.code == 0, result.err
    assert here.deleted == 1 and here.script is None and "costs money" not in result.out


def test_codes_of_the_trainer_are_those_of_the_command(command, cloud, tmp_path):
    here = cloud([("active",)])
    here.plan("0 70")
    flags = *QUEUED, *RECIPE, f"--model_dir=file://{tmp_path}/model", *here.flags, "--install=true"
    result = command("tpu", "run", *flags, environment=here.environment)
    assert result.code == 70 and "a fault of axial" in result.line
    assert "costs money" in result.out


def test_what_a_slice_does_not_have_is_one_line(command, cloud):
    here = cloud([("active",)])
    for verb in ("logs", "ssh"):
        result = command("tpu", verb, *QUEUED, *here.flags, environment=here.environment)
        assert result.code == 2 and "--name=run: has no workers; axial-tpu status --slice=v5e-16" in result.line
    assert command("tpu", "create", *QUEUED, *here.flags).code == 0
    result = command("tpu", "logs", *QUEUED, *here.flags, environment=here.environment)
    assert result.code == 2 and result.out == "axial-tpu: run: no trainer was started there\n"


def test_create_says_what_is_in_use(command, cloud):
    here = cloud([("waiting", "active")])
    result = command("tpu", "create", *QUEUED, *here.flags)
    assert result.code == 0 and "run is waiting" in result.out and "costs money" in result.out
    result = command("tpu", "create", *QUEUED, *here.flags)
    assert result.code == 2 and "--name=run: is in use; axial-tpu status --slice=v5e-16" in result.line


def test_create_that_does_not_end_says_what_costs(command, cloud):
    """Ctrl-C or an outage while it waits for capacity."""
    here = cloud([("waiting",), ("waiting",)])

    def interrupt(pid):
        stand_ins.until(lambda: here.log.count(f"GET {here.other}/run") > 2)  # it waits
        os.kill(pid, signal.SIGINT)

    result = command("tpu", "create", *QUEUED, *here.flags, meanwhile=interrupt)
    reminder = "run (v5e-16, 16 chips) is waiting and costs money until axial-tpu delete"
    assert result.code == 130 and reminder in result.out.splitlines()[-1] and result.err == ""
    result = command("tpu", "create", *QUEUED, *here.flags)
    assert "is in use" in result.line and "costs money" not in result.out  # not of this call
    here.delete()

    def break_down(pid):
        stand_ins.until(lambda: any(line.startswith("POST") for line in here.log))
        here.faults = [("GET", 500)] * 6  # all tries of one look

    here.log.clear()
    result = command("tpu", "create", *QUEUED, *here.flags, meanwhile=break_down)
    assert result.code == 2 and "the service is at fault" in result.line
    assert reminder in result.out.splitlines()[-1]
    here.delete()
    here.faults = [("GET", 500)] * 6
    result = command("tpu", "create", *QUEUED, *here.flags)
    assert result.code == 2 and "the service is at fault" in result.line and result.out == ""  # nothing was sent


def test_run_with_other_flags_says_how_the_trainer_is_stopped(command, cloud, tmp_path):
    here = cloud([("active",)])
    here.plan("10 hang")
    flags = *QUEUED, *RECIPE, f"--model_dir=file://{tmp_path}/model", *here.flags, "--install=true"

    def interrupt(pid):
        stand_ins.until(here.starts)
        time.sleep(0.3)
        os.kill(pid, signal.SIGINT)

    assert command("tpu", "run", *flags, meanwhile=interrupt, environment=here.environment).code == 130
    others = *flags, "--gin_binding=BATCH = 32", "--time_limit=0.01"  # 36 s, if it follows the other trainer
    result = command("tpu", "run", *others, environment=here.environment)
    assert result.code == 2 and "--name=run: a trainer with other flags runs there; to stop it: " in result.line
    # the command works as it stands
    stop = shlex.split(result.line.partition("to stop it: axial-tpu ")[2])
    assert command("tpu", *stop, *here.flags, environment=here.environment).code == 0
    here.plan("100 0")
    (folder,) = here.root.glob("workers/run-0/axial-run")
    stand_ins.until((folder / "trainer.code").exists)
    assert command("tpu", "run", *others, environment=here.environment).code == 0
    assert "--gin_binding=BATCH" in here.starts()[1]


def test_refused_quota_is_one_line(command, cloud):
    here = cloud([("quota",)])
    result = command("tpu", "create", *QUEUED, *here.flags)
    assert result.code == 2 and "no quota" in result.line and "TPUV5sLitepodPerProjectPerZone" in result.line


@pytest.mark.parametrize("backend", ["queued_resources", "compute_engine", "gke"])
def test_a_dry_run_needs_no_credentials_and_no_network(command, backend):
    result = command(
        "tpu",
        "run",
        *(*PLACE, "--slice=v5e-16", f"--backend={backend}", *RECIPE, "--model_dir=gs://near/run", "--dry_run"),
        environment={"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere", "KUBECONFIG": "/nowhere"},
    )
    assert result.code == 0, result.err
    # a recipe as it is has a row in experiments/tpu.csv
    assert "200000 steps of " in result.out and "cycles of the compiler's cost model at 1.50 GHz" in result.out
    assert result.out.count("POST https://") >= 1 and "axial-train --strategy=tpu" in result.out
    assert "costs money" not in result.out


def test_an_image_with_its_own_tensorflow_is_estimated_without_kernels(command):
    """Axial-DeepLab-L with 4 images a core: they fit with the kernels, and 3 without."""
    rows = tpu_table.read_rows(ROOT / "experiments" / "tpu.csv")
    flags = *QUEUED, "--gin_file=coco/axial_deeplab_l.gin", *RECIPE[1:], "--model_dir=gs://near/run", "--dry_run"
    for more, form, fits in (([], "without kernels", False), (["--runtime=v2-alpha-tpuv5-lite"], "recipe", True)):
        result = command("tpu", "run", *flags, *more)
        cycles = 2 * rows["coco/axial_deeplab_l.gin", "v5e:4x8", form].cycles
        assert f"({cycles:.4g} cycles of the compiler's cost model" in result.out, result.err
        warning = "warning: 4 images a core, and 3 fit by the compiler (experiments/tpu.csv), without axial's"
        assert (warning in result.out) != fits


def test_gin_files_of_this_machine_travel_as_one(command, tmp_path):
    (tmp_path / "base.gin").write_text("include 'coco/axial_deeplab_s.gin'\nSTEPS = 3\n")
    (tmp_path / "mine.gin").write_text(f"include '{tmp_path}/base.gin'\nBATCH = 16\n")
    files = "coco/axial_deeplab_l.gin", f"{tmp_path}/mine.gin"
    flags = *(f"--gin_file={file}" for file in files), "--gin_binding=EVAL_SPLIT = 'x'", "--data_dir=gs://far/data"
    run = *PLACE, "--slice=v5e-16", *flags, "--model_dir=gs://near/run", "--dry_run"
    result = command("tpu", "run", *run)
    assert "--gin_file=gin/config.gin " in result.out and "mine.gin" not in result.out, result.err
    configuration.load(files, ["EVAL_SPLIT = 'x'"])
    text = configuration.text()
    assert "MODEL = 'axial_deeplab_s'" in text and "STEPS = 3" in text and "BATCH = 16" in text
    (tmp_path / "config.gin").write_text(text)
    configuration.load([f"{tmp_path}/config.gin"], ["EVAL_SPLIT = 'x'"])
    assert configuration.text() == text


def test_a_recipe_with_bindings_has_no_estimate(command):
    flags = *PLACE, "--slice=v5e-16", *RECIPE, "--model_dir=gs://near/run", "--dry_run", "--gin_binding=BATCH = 16"
    result = command("tpu", "run", *flags, "--change=batch,learning_rate")
    assert " --change=batch,learning_rate " in result.out, result.err
    assert "no step time is known, so no estimate of the cost" in result.out


def test_cycles_are_turned_into_hours(command):
    flags = *PLACE, "--slice=v5e-16", *RECIPE, "--model_dir=gs://near/run", "--dry_run", "--cycles_per_step=1e9"
    result = command("tpu", "run", *flags)
    assert "(1e+09 cycles of the compiler's cost model at 1.50 GHz" in result.out


BAD = {
    "slice": (["create", *PLACE, "--slice=v5e-17"], "--slice=v5e-17: no such slice (did you mean 'v5e-16'?)"),
    "back end": (["create", *PLACE, "--slice=v4-8"], "--backend=compute_engine does not serve v4"),
    "no slice": (["create", *PLACE], "--slice is needed"),
    "zone": (["create", *PLACE[:2], "--zone=us-west4", "--slice=v5e-8"], "--zone=us-west4: not the name of a zone"),
    "name": (["create", "--name=A_b", *PLACE[1:], "--slice=v5e-8"], "--name=A_b: expected at most 40 small letters"),
    "software": (["create", *QUEUED, "--runtime=tpu-vm-tf-2.18.0-pjrt"], "has 4 hosts; expected tpu-vm-tf-2.18.0-pod"),
    "reservation": (["create", *QUEUED, "--reservation=r"], "--reservation goes with --provisioning=reserved"),
    "flex start": (["create", *QUEUED, "--provisioning=flex_start"], "has its queue instead"),
    "time limit": (["create", *QUEUED, "--time_limit=0"], "--time_limit=0: 0.0 is not a number in the range"),
    "no limit of its own": (
        ["create", *QUEUED, "--time_limit=2"],
        "--time_limit=2.0: --backend=queued_resources keeps none; axial-tpu run keeps it itself",
    ),
    **{
        f"{flag}={value}": (["run", *QUEUED, f"--{flag}={value}"], f"--{flag}={value}: {said}")
        for flag in ("time_limit", "poll_seconds", "api_timeout", "seconds_per_step", "cycles_per_step")
        for value, said in (("nan", "expected a number"), ("inf", "inf is not"), ("-1", "-1.0 is not"), ("0", "0.0 is"))
    },
    "steps": (["run", *QUEUED, "--steps=0"], "--steps=0: 0 is not a positive integer"),
    **{
        f"{flag} with {backend}": (
            ["create", *PLACE, "--slice=v5e-8", f"--backend={backend}", f"--{flag}=mine", "--dry_run"],
            f"--{flag} does not go with --backend={backend}; it is for ",
        )
        for flag, backend in (
            *(("network", "gke"), ("subnetwork", "gke")),
            *((flag, "compute_engine") for flag in ("queue", "namespace", "context")),
            *((flag, "queued_resources") for flag in ("queue", "namespace", "context")),
        )
    },
    "a wait for no node": (["status", *QUEUED, "--wait"], "--wait needs --node"),
    "local folder": (
        ["run", *QUEUED, *RECIPE, "--model_dir=/tmp/run"],
        "--model_dir=/tmp/run: expected a folder in a bucket",
    ),
    "no recipe": (["run", *QUEUED, "--data_dir=gs://a", "--model_dir=gs://b"], "--gin_file is needed"),
    "recipe": (
        ["run", *QUEUED, "--gin_file=coco/no.gin", "--data_dir=gs://a", "--model_dir=gs://b", "--dry_run"],
        "coco/no.gin",
    ),
    "batch": (
        ["run", *PLACE, "--slice=v5e-256", *RECIPE, "--model_dir=gs://b", "--dry_run"],
        "--slice=v5e-256: batch 64 cannot be shared by 256 replicas",
    ),
    "rows of text": (
        ["run", *PLACE, "--slice=v5e-4", *TEXT, "--model_dir=gs://b", "--dry_run"],
        "--slice=v5e-4: TrainingConfig.accumulate = 3: does not divide 16, a replica's rows of 48 tokens",
    ),
    "a flag of another verb": (["delete", *QUEUED, "--steps=3"], "--steps: axial-tpu delete does not take it"),
    "clock": (
        ["run", *PLACE, "--slice=tpu7x-16", *RECIPE, "--model_dir=gs://b", "--dry_run", "--cycles_per_step=1e9"],
        "no source says the clock of tpu7x",
    ),
    "verb": (["strat"], "give one of create, status, run, logs, ssh, delete: got 'strat' (did you mean"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(command, name):
    arguments, said = BAD[name]
    result = command("tpu", *arguments)
    assert result.code == 2 and said in result.line


def test_no_credentials_are_one_line(command):
    environment = {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere/key.json"}
    result = command("tpu", "status", *QUEUED, environment=environment)
    assert result.code == 2 and "no credentials: gcloud auth application-default login" in result.line
    environment = {"KUBECONFIG": "/nowhere/config"}
    result = command("tpu", "status", *PLACE, "--slice=v5e-16", "--backend=gke", environment=environment)
    assert result.code == 2 and "no cluster in the kubeconfig" in result.line


def test_tpu7x_has_no_tensorflow(command):
    result = command("tpu", "create", *PLACE, "--slice=tpu7x-8", "--dry_run")
    assert "TensorFlow is not supported on TPU7x" in result.out
