"""The command axial-tpu, with stand-ins for kubectl, sky and gcloud."""

import csv
import json
import re
import shlex
import subprocess

import pytest
import yaml

from axial.cloud import engines
from axial.recipes import configuration
from tests.conftest import ROOT

WHEEL = "--wheel=gs://near/axial_deeplab_tf-1.0-py3-none-any.whl"
ENGINES = {
    "gke": ("--engine=gke", "--name=run", "--runtime=image:1"),
    "skypilot": ("--engine=skypilot", "--name=run", "--zone=us-west4-a", WHEEL),
    "gcloud": ("--engine=gcloud", "--name=run", "--project=p", "--zone=us-west4-a", WHEEL),
}
LOCATION = {"gke": ENGINES["gke"][:2], "skypilot": ENGINES["skypilot"][:2], "gcloud": ENGINES["gcloud"][:4]}
RECIPE = "--gin_file=coco/axial_deeplab_s.gin", "--data_dir=gs://far/data", "--model_dir=gs://near/run"
WISH = "--slice=v5e-16", "--time_limit=100"
THREE_PARTS = "--gin_binding=TrainingConfig.accumulate = 3"
TEXT = "--gin_file=multi30k/transformer_nano.gin", THREE_PARTS, "--data_dir=gs://a", "--model_dir=gs://b"
TINY = "--gin_file=sample/overfit.gin", "--gin_file=tiny/panoptic.gin", "--gin_binding=BATCH = 16"


@pytest.fixture
def local(sample_dir, tmp_path):
    """Flags that name a data folder and a run folder on this machine by file:// URLs, which count as buckets."""
    return f"--data_dir=file://{sample_dir}", f"--model_dir=file://{tmp_path}/model"


def status_of(folder, state, step, steps=1):
    folder.mkdir(exist_ok=True)
    text = json.dumps({"state": state, "step": step, "steps": steps, "seconds_per_step": 0.5, "host": "h"})
    (folder / "status.json").write_text(text)


def test_the_wheels_of_the_pages_are_valid():
    pages = "".join((ROOT / path).read_text() for path in ("docs/slices.md", "axial/cli/tpu.py"))
    assert all(re.fullmatch(engines.WHEEL, wheel) for wheel in re.findall(r"--wheel=(\S+)", pages))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_dry_run_needs_no_tool_and_no_credentials(succeed, engine, tmp_path):
    environment = {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere", "KUBECONFIG": "/nowhere", "PATH": str(tmp_path)}
    result = succeed("tpu", "launch", *ENGINES[engine], *WISH, *RECIPE, "--dry_run", environment=environment)
    # An unchanged recipe has a row in experiments/tpu.csv.
    assert "200000 steps of " in result.out and "cycles of the compiler's cost model at 1.50 GHz" in result.out
    assert "list price: about " in result.out and "USD a chip-hour on demand in us-" in result.out
    assert "axial.cloud.supervisor" in result.out and "costs money" not in result.out
    for verb in ("status", "logs", "delete"):
        result = succeed("tpu", verb, *LOCATION[engine], "--dry_run", environment=environment)
        assert result.out.startswith("$ ") and result.out.count("\n") == 1


def test_a_dry_run_prints_what_a_launch_submits(command, succeed, tools, local):
    dry = command("tpu", "launch", *ENGINES["gke"], *WISH, *TINY, *local, "--dry_run").out
    (text,) = re.findall(r"^\$ cat > jobset.yaml <<'END'\n(.*)^END$", dry, re.MULTILINE | re.DOTALL)
    succeed("tpu", "launch", *ENGINES["gke"], *WISH, *TINY, *local, environment={"PATH": tools.path})

    def timeless(document):
        made = yaml.safe_load(document)
        made["spec"]["replicatedJobs"][0]["template"]["spec"].pop("activeDeadlineSeconds")
        return re.sub(r'"deadline":\d+', "", json.dumps(made).replace("\\", ""))

    assert timeless(tools.handed()) == timeless(text)


def test_a_launch_on_gke(succeed, tools, local):
    call = [*ENGINES["gke"], *WISH, *TINY, *local, "--queue=q"]
    result = succeed("tpu", "launch", *call, "--seconds_per_step=36000", environment={"PATH": tools.path})
    assert "1 step of 3.6e+04 s are 10.0 hours and 160 chip-hours" in result.out
    calls = tools.calls()
    assert calls[0].startswith("kubectl explain jobsets.spec.failurePolicy.rules.onJobFailureMessagePatterns")
    assert calls[1] == "kubectl get localqueues q"
    assert calls[2].startswith("kubectl create --validate=strict --filename=")
    made = yaml.safe_load(tools.handed())
    (container,) = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    run = json.loads(container["env"][-1]["value"])
    assert run["arguments"][:2] == ["--gin_file=sample/overfit.gin", "--gin_file=tiny/panoptic.gin"]
    assert run["hosts"] == 4 and run["own_server"] and run["pace"] == 1.0
    # The last line names the command that ends the run.
    last = result.out.splitlines()[-1]
    assert "goes on without this machine; it costs money until axial-tpu delete" in last
    assert shlex.split(last.partition("axial-tpu delete ")[2]) == [*LOCATION["gke"]]


def test_a_run_on_gke_is_shown_logged_and_deleted(command, succeed, tools, local, tmp_path):
    run = LOCATION["gke"]
    status = {"status": {"restarts": 2, "replicatedJobsStatus": [{"name": "slice", "ready": 1}]}}
    tools.answers("kubectl", "get jobsets run --output=json", f"echo '{json.dumps(status)}'")
    status_of(tmp_path / "model", "training", 3, 10)
    result = command("tpu", "status", *run, local[1], environment={"PATH": tools.path})
    assert "run: runs; recreated 2 times, 0 of 3 allowed" in result.out and "costs money until" in result.out
    assert "run: training, step 3 of 10, 0.5 s a step" in result.out
    tools.answers("kubectl", "logs --follow", "echo a line; exit 7")
    result = command("tpu", "logs", *run, environment={"PATH": tools.path})
    assert result.code == 7 and result.out == "a line\n"
    assert command("tpu", "delete", *run, environment={"PATH": tools.path}).code == 2  # stdin has no answer
    succeed("tpu", "delete", *run, "--yes", environment={"PATH": tools.path})
    assert tools.calls()[-1] == "kubectl delete jobsets run"


def test_a_run_on_skypilot(succeed, refuse, tools, local):
    tools.answers("sky", "--version", "echo skypilot, version 0.11.2")
    tools.answers("gcloud", "storage buckets describe", "printf 'US-WEST4\\tregion\\n'")
    launch = "tpu", "launch", *ENGINES["skypilot"], *WISH, *TINY, *local
    succeed(*launch, environment={"PATH": tools.path})
    made = yaml.safe_load(tools.handed())
    assert made["resources"]["accelerator_args"]["runtime_version"] == "tpu-vm-tf-2.18.0-pod-pjrt"
    assert tools.calls()[-1].startswith("sky jobs launch --yes --detach-run --name=run /")
    tools.answers("sky", "jobs queue", "echo 1 - run 1x 1h 0 RUNNING")
    refuse("--name=run: is in use", *launch, environment={"PATH": tools.path})


def test_by_hand_it_prints_and_with_yes_it_runs(succeed, tools, local):
    call = ["launch", *ENGINES["gcloud"], *WISH, *TINY, *local, "--provisioning=spot"]
    result = succeed("tpu", *call, environment={"PATH": tools.path})
    assert tools.calls() == [] and "#!/bin/bash" in result.out
    assert "note: this engine does not recover a preempted slice" in result.out and "roles/tpu.admin" in result.out
    assert result.out.splitlines()[-1].startswith("$ gcloud compute tpus queued-resources create run")
    succeed("tpu", *call, "--yes", environment={"PATH": tools.path})
    assert tools.calls()[-1].startswith("gcloud compute tpus queued-resources create run --project=p")
    subprocess.run(["bash", "-n"], input=tools.handed(), text=True, check=True)


def test_a_finished_run_makes_nothing(succeed, tools, local, tmp_path):
    status_of(tmp_path / "model", "done", 1)
    result = succeed("tpu", "launch", *ENGINES["gke"], *WISH, *TINY, *local, environment={"PATH": tools.path})
    assert "the last step is reached already; nothing is made" in result.out
    assert tools.calls() == []
    more = "--gin_binding=STEPS = 5"
    result = succeed("tpu", "launch", *ENGINES["gke"], *WISH, *TINY, *local, more, environment={"PATH": tools.path})
    assert "4 steps of 0.5 s" in result.out and "measured by this run" in result.out


def test_splits_that_are_missing_are_one_line(refuse, tools, local):
    flags = *ENGINES["gke"], *WISH, *TINY, *local, "--gin_binding=TRAIN_SPLIT = 'train2018'"
    result = refuse("no split 'train2018'", "tpu", "launch", *flags, environment={"PATH": tools.path})
    assert "train2017" in result.line
    assert not any(" create " in call for call in tools.calls())


def test_an_image_with_its_own_tensorflow_is_estimated_without_kernels(command):
    """Axial-DeepLab-L: 4 images per core fit with the kernels, and only 3 fit without the kernels."""
    with open(ROOT / "experiments" / "tpu.csv") as file:
        rows = {(row["leaf"], row["slice"], row["form"]): float(row["cycles"]) for row in csv.DictReader(file)}
    flags = *ENGINES["skypilot"], *WISH, "--gin_file=coco/axial_deeplab_l.gin", *RECIPE[1:], "--dry_run"
    for more, form, fits in (([], "without kernels", False), (["--runtime=v2-alpha-tpuv5-lite"], "recipe", True)):
        result = command("tpu", "launch", *flags, *more)
        cycles = 2 * rows["coco/axial_deeplab_l.gin", "v5e:4x8", form]
        assert f"({cycles:.4g} cycles of the compiler's cost model" in result.out, result.err
        warning = "warning: 4 images a core, and 3 fit by the compiler (experiments/tpu.csv), without axial's"
        assert (warning in result.out) != fits


def test_gin_files_of_this_machine_travel_as_one(command, tmp_path):
    (tmp_path / "base.gin").write_text("include 'coco/axial_deeplab_s.gin'\nSTEPS = 3\n")
    (tmp_path / "mine.gin").write_text(f"include '{tmp_path}/base.gin'\nBATCH = 16\n")
    files = "coco/axial_deeplab_l.gin", f"{tmp_path}/mine.gin"
    flags = *(f"--gin_file={file}" for file in files), "--gin_binding=EVAL_SPLIT = 'x'", *RECIPE[1:]
    result = command("tpu", "launch", *ENGINES["gke"], *WISH, *flags, "--dry_run")
    (text,) = re.findall(r"AXIAL_RUN\n *value: '(.*)'$", result.out, re.MULTILINE)
    run = json.loads(text.replace("''", "'"))
    assert run["arguments"] == ["--gin_binding=EVAL_SPLIT = 'x'", "--data_dir=gs://far/data"]
    configuration.load(files, ["EVAL_SPLIT = 'x'"])
    text = configuration.text()
    assert run["gin"] == text and "MODEL = 'axial_deeplab_s'" in text and "STEPS = 3" in text and "BATCH = 16" in text
    (tmp_path / "config.gin").write_text(text)
    configuration.load([f"{tmp_path}/config.gin"], ["EVAL_SPLIT = 'x'"])
    assert configuration.text() == text


GKE, SKY, GCLOUD = (" ".join(flags) for flags in ENGINES.values())
HOURS = "launch --time_limit=1"
BAD = {
    f"{HOURS} {GKE} --slice=v5e-17 RECIPE": "--slice=v5e-17: no such slice (did you mean 'v5e-16'?)",
    f"{HOURS} --engine=gke --name=run --slice=v5e-8 RECIPE": "--runtime is needed: container image",
    f"{HOURS} {GCLOUD} --slice=v5e-16 --runtime=tpu-vm-tf-2.18.0-pjrt RECIPE": "has 4 hosts; expected tpu-vm-tf-2",
    f"{HOURS} {GKE} --slice=v5e-8 RECIPE --network=a": "--network does not go with --engine=gke",
    f"{HOURS} {GKE} --slice=v5e-256 RECIPE": "--slice=v5e-256: batch 64 cannot be shared by 256 replicas",
    f"launch {GKE} WISH RECIPE --model_dir=/tmp/run": "--model_dir=/tmp/run: expected a folder in a bucket",
    f"{HOURS} {GKE} --slice=v5e-4 TEXT": "accumulate = 3: does not divide 16, a replica's rows of 48 tokens",
    "status --wait": "--wait needs --node",
    "strat": "give one of launch, status, logs, delete: got 'strat' (did you mean",
}


@pytest.mark.parametrize("call, said", BAD.items(), ids=BAD)
def test_bad_input_is_one_line(refuse, call, said):
    flags = {"RECIPE": RECIPE, "WISH": WISH, "TEXT": TEXT}
    refuse(said, "tpu", *(word for name in call.split() for word in flags.get(name, [name])))


def test_an_engine_that_is_not_installed(refuse, tmp_path):
    environment = {"PATH": str(tmp_path)}
    for engine, said in (
        ("gke", "--engine=gke needs kubectl: gcloud components install kubectl"),
        ("skypilot", "--engine=skypilot needs sky: in an environment of its own, pip install"),
        ("gcloud", "--engine=gcloud needs gcloud: https://docs.cloud.google.com/sdk/docs/install"),
    ):
        for call in (["status"], ["logs"], ["delete", "--yes"]):
            refuse(said, "tpu", *call, *LOCATION[engine], environment=environment)
