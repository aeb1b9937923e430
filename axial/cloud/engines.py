"""Engines: each turns a request and a `Run` into YAML or a script, and knows the commands of its tool.

An engine is a cloud service: it makes the slice, starts the supervisors, restarts them after some exit codes (see
`runs`), and deletes the slice at the end. The tool on this machine only submits and queries the run.
"""

import dataclasses
import datetime
import json
import math
import os
import re
import shlex
import subprocess
import time

import yaml

from axial import slices
from axial.cloud import runs
from axial.errors import InputError, pip_install
from axial.io.paths import PACKAGE
from axial.io.read import read_text

MARGIN = 600.0  # seconds from the deadline until the engine itself ends a run that its supervisors have not ended
PATH = 'export PATH="$HOME/axial/venv/bin:$PATH"'  # on a VM, puts axial's environment first in PATH
# Pattern of the paths of wheels that scripts/tpu/install.sh finds.
WHEEL = r"gs://[^/]+/(.+/)?axial_deeplab_tf-[\w.]+-py3-none-any\.whl"


@dataclasses.dataclass(frozen=True)
class Request:
    """A user's request to an engine. Its fields are flags of axial-tpu, whose help explains them."""

    name: str
    slice: slices.Slice | None = None
    provisioning: str = "on_demand"
    project: str = ""
    zone: str = ""
    runtime: str = ""
    wheel: str = ""
    service_account: str = ""
    network: str = ""
    queue: str = ""


class Engine:
    """An engine and the request to it. In addition to the methods here, each engine has:

    body(run): content of the YAML file to submit for a `Run`; or text(run), the script to submit.
    launch(path, run): arguments of the command that submits the file `path`.
    commands(): dict from 'status', 'logs' and 'delete' to the arguments of a command. 'logs' follows the first host's
    log. 'delete' ends the run and deletes the slice.
    describe(output): turns the output of 'status' into a pair: a line to print, and whether the run may cost money.

    Attributes:
        name: name of the engine.
        tool: program on this machine that talks to the engine; `install` explains how to get it.
        file: name of the submitted file.
        flags: names of the `Request` fields that it reads. Every command needs the fields `needs`, a launch also the
            fields `needs_to_launch`.
        refusals: pairs (pattern of the tool's output, axial's message for it). Braces in a message name `Request`
            fields.
        notes: lines that a user should know before a launch.
        by_hand: whether a launch without --yes only prints its commands.
        kernels: whether axial's TPU kernels can run on its hosts.
    """

    name = tool = install = file = ""
    flags = needs = needs_to_launch = refusals = notes = ()
    by_hand, kernels = False, True

    def __init__(self, request):
        """Raises InputError for a request that the engine cannot serve."""
        self.request = request
        self.region = request.zone.rpartition("-")[0]
        wheel = "gs://BUCKET/axial_deeplab_tf-VERSION-py3-none-any.whl, of pip wheel --no-deps"
        for flag, value, pattern, expected in (
            ("name", request.name, r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", "at most 40 small letters, digits and hyphens"),
            ("zone", request.zone, r"([a-z]+-[a-z]+\d+-[a-z]\w*)?", "the name of a zone, like us-central2-b"),
            ("wheel", request.wheel, f"({WHEEL})?", wheel),
        ):
            if not re.fullmatch(pattern, value):
                raise InputError(f"--{flag}={value}: expected {expected}")

    def text(self, run):
        return yaml.safe_dump(self.body(run), sort_keys=False, width=math.inf)

    def checks(self):
        """Pairs (arguments of a command that must succeed before a launch, function of its output or None)."""
        return []

    def run_options(self):
        """dict of the `Run` fields that depend on the slice and its image."""
        return {"hosts": self.request.slice.hosts, "generation": self.request.slice.generation}

    def not_installed(self):
        return InputError(f"--engine={self.name} needs {self.tool}: {self.install}")

    def explain(self, output):
        """Translates the tool's output into an InputError."""
        for pattern, meaning in self.refusals:
            if re.search(pattern, output):
                return InputError(meaning.format(**dataclasses.asdict(self.request)))
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        marked = [line for line in lines if re.match(r"(?i)error", line)]
        return InputError(f"{self.tool}: {(marked or lines or ['no reason given'])[0][:400]}")

    def call(self, arguments):
        """Output of a command of the tool. Raises InputError if it fails or is not installed."""
        try:
            done = subprocess.run(arguments, check=False, capture_output=True, text=True, errors="replace", input="")
        except FileNotFoundError:
            raise self.not_installed() from None
        if done.returncode:
            raise self.explain(done.stderr + done.stdout)
        return done.stdout


def _script(name):
    """Path of a file in scripts/tpu, in the installed package or in the checkout."""
    folders = os.path.join(PACKAGE, "scripts"), os.path.join(os.path.dirname(PACKAGE), "scripts")
    return os.path.join(next(filter(os.path.isdir, folders)), "tpu", name)


# === Google Kubernetes Engine ===

SITE = "https://jobset.sigs.k8s.io/docs/installation"
# The newest field that axial uses; it needs JobSet 0.10.
FIELD = "jobsets.spec.failurePolicy.rules.onJobFailureMessagePatterns"


# kubectl's messages without a cluster or without credentials.
NOBODY = r"(?i)(localhost:8080|unauthorized|must be logged in|getting credentials|invalid configuration)"


class Gke(Engine):
    """Google Kubernetes Engine: a JobSet, whose controller lives in the cluster. Needs JobSet 0.10 or later.

    A host is a pod. Its supervisor is the container's first process. If a pod fails, its Job fails by the
    `podFailurePolicy`, with a reason and a message that name the matching rule. The JobSet's own rules read reason and
    message (scripts/tpu/jobset.yaml):

    | exit code or end of a pod | rule or reason of the failed Job | the JobSet |
    |---|---|---|
    | 2, 70, 124: bad input, a fault, the deadline | rule 0 | ends |
    | the node is taken away (DisruptionTarget) | rule 1 | is recreated, without limit |
    | 42: preempted, a lost host | rule 2 | is recreated, without limit |
    | another code | BackoffLimitExceeded | is recreated, at most 3 times |
    | activeDeadlineSeconds, as a backstop | DeadlineExceeded | ends |

    The messages are not a stable interface. They come from kubernetes 95f0849, pkg/controller/job/pod_failure_policy.go
    ("Container %s for pod %s/%s failed with exit code %v matching %v rule at index %d", "Pod %s/%s has condition %v
    matching %v rule at index %d"), and are quoted in JobSet 0.10.1's keps/262-ConfigurableFailurePolicy. Other sources:
    JobSet's api/jobset/v1alpha2/jobset_types.go, https://docs.cloud.google.com/kubernetes-engine/docs/how-to/tpus and,
    for Kueue's labels, https://kueue.sigs.k8s.io/docs/concepts/workload.
    """

    name, tool, file = "gke", "kubectl", "jobset.yaml"
    install = "gcloud components install kubectl gke-gcloud-auth-plugin"
    flags = ("zone", "runtime", "service_account", "queue")
    needs_to_launch = ("runtime",)
    # The patterns match messages of kubectl 1.3x (staging/src/k8s.io/kubectl/pkg/cmd/util/helpers.go and pkg/explain)
    # and of the API server.
    refusals = (
        (r"\(AlreadyExists\)", "--name={name}: is in use; axial-tpu delete --engine=gke --name={name} frees it"),
        (r'localqueues\S* "[^"]*" not found', "--queue={queue}: the namespace has no such queue of Kueue"),
        (r'resource type "localqueues"', "--queue={queue}: the cluster has no Kueue: https://kueue.sigs.k8s.io"),
        (r'field "?onJobFailure\S* does not exist', f"JobSet is too old, 0.10 or later is needed: {SITE}"),
        (r'(resource type "jobsets"|resource for "?jobset|kind "JobSet")', f"the cluster has no JobSet: {SITE}"),
        (r'jobsets\S* "[^"]*" not found', "--name={name}: the namespace has no such run"),
        (NOBODY, "no credentials for a cluster: gcloud container clusters get-credentials CLUSTER"),
    )

    def __init__(self, request):
        super().__init__(request)
        if request.slice and not request.slice.kind.gke:
            raise InputError(f"--slice={request.slice.name}: GKE has no {request.slice.generation}; v4 to v6e")

    def body(self, run):
        """The JobSet: jobset.yaml plus the fields of this run."""
        request, jobset = self.request, yaml.safe_load(read_text(_script("jobset.yaml")))
        labels, left = {"axial-run": request.name}, round(max(run.deadline - time.time(), 0) + MARGIN)
        jobset["metadata"] |= {"name": request.name, "labels": dict(labels)}
        if request.queue:
            names = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/max-exec-time-seconds"
            jobset["metadata"]["labels"] |= dict(zip(names, (request.queue, str(left))))
        if run.hosts > 1:
            alone = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
            jobset["metadata"]["annotations"] = alone
        job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        job |= {"parallelism": run.hosts, "completions": run.hosts, "activeDeadlineSeconds": left}
        job["template"]["metadata"] = {"labels": labels}
        pod, gke = job["template"]["spec"], "cloud.google.com/gke-"
        pod["nodeSelector"] = {
            f"{gke}tpu-accelerator": request.slice.kind.gke,
            f"{gke}tpu-topology": request.slice.topology,
            **({f"{gke}spot": "true"} if request.provisioning == "spot" else {}),
        }
        if request.service_account:
            pod["serviceAccountName"] = request.service_account
        chips = {"google.com/tpu": str(request.slice.chips // request.slice.hosts)}
        (container,) = pod["containers"]
        container |= {"image": request.runtime, "resources": {"requests": dict(chips), "limits": chips}}
        # JobSet names pods NAME-JOB-JOBINDEX-PODINDEX in the subdomain NAME.
        hosts = ",".join(f"{request.name}-slice-0-{host}.{request.name}" for host in range(run.hosts))
        variables = ("AXIAL_HOSTS", hosts), (runs.VARIABLE, run.to_json())
        container["env"] += [{"name": name, "value": value} for name, value in variables]
        return jobset

    def checks(self):
        checks = [(["kubectl", "explain", FIELD, "--api-version=jobset.x-k8s.io/v1alpha2"], None)]
        return checks + [(["kubectl", "get", "localqueues", self.request.queue], None)] * bool(self.request.queue)

    def launch(self, path, run):
        return ["kubectl", "create", "--validate=strict", f"--filename={path}"]

    def commands(self):
        set_of = f"jobset.sigs.k8s.io/jobset-name={self.request.name}"
        first = f"--selector={set_of},batch.kubernetes.io/job-completion-index=0"
        return {
            "status": ["kubectl", "get", "jobsets", self.request.name, "--output=json"],
            "logs": ["kubectl", "logs", "--follow", "--tail=-1", first],
            "delete": ["kubectl", "delete", "jobsets", self.request.name],
        }

    def describe(self, output):
        status = json.loads(output).get("status", {})
        true = {c["type"]: c.get("message", "") for c in status.get("conditions", []) if c.get("status") == "True"}
        restarts, counted = status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)
        state = next((kind for kind in ("Completed", "Failed", "Suspended") if kind in true), "")
        ready = sum(job.get("ready", 0) for job in status.get("replicatedJobsStatus", []))
        summary = f"{state.lower()}: {true[state]}" if state else ("runs" if ready else "waits for its hosts")
        return f"{summary}; recreated {restarts} times, {counted} of 3 allowed", state in ("", "Suspended")


# === TPU VMs ===


class OnVirtualMachines(Engine):
    """Base of the engines whose hosts are TPU VMs. The VMs boot a TPU software version and install a wheel."""

    def __init__(self, request):
        super().__init__(request)
        if request.slice:
            self.runtime = request.runtime or slices.default_runtime(request.slice)
            slices.check_runtime(request.slice, self.runtime)
            self.kernels = slices.tensorflow_of(self.runtime) is None

    def run_options(self):
        # The variables in `library` let TensorFlow in Google's images find the TPU of its host, see "TensorFlow PJRT
        # support" in https://docs.cloud.google.com/tpu/docs/runtimes. On several hosts, the images start servers.
        library = {"NEXT_PLUGGABLE_DEVICE_USE_C_API": "true", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": "/lib/libtpu.so"}
        image_options = {"own_server": False} if self.request.slice.hosts > 1 else {"environment": library}
        return super().run_options() | ({} if self.kernels else image_options)

    def installation(self):
        """Shell commands that install the wheel in ~/axial/venv once, and put this environment first in PATH."""
        return f"AXIAL_WHEEL={shlex.quote(self.request.wheel)}\n{read_text(_script('wheel.sh'))}"


class SkyPilot(OnVirtualMachines):
    """SkyPilot 0.11.2 or later: a managed job on TPU VMs, whose controller lives in the cloud.

    SkyPilot recreates the slice after a preemption and after exit code 42. Every other code ends the job, because the
    supervisor has already retried the trainer. Field names are from `sky/utils/schemas.py` of SkyPilot 0.11.2 and
    0.14.1. Clients after 0.11.2 accept unknown names below `job_recovery`, so a test checks `body` against the schema.
    """

    name, tool, file = "skypilot", "sky", "task.yaml"
    install = f"in an environment of its own, {pip_install('skypilot')}"
    flags = ("zone", "runtime", "wheel")
    needs_to_launch = ("zone", "wheel")
    # The patterns match messages in sky/client/cli/command.py and sky/exceptions.py of SkyPilot 0.14.1.
    refusals = (
        (r"(?i)no cloud (access|is enabled)|not enabled|sky check", "--engine=skypilot: no credentials: sky check gcp"),
        (r"(?i)no (running )?managed jobs? (with name|found)", "--name={name}: SkyPilot has no such run"),
    )

    def body(self, run):
        """The task of SkyPilot, as a dict."""
        request = self.request
        resources = {
            "infra": f"gcp/{self.region}/{request.zone}",
            "accelerators": f"tpu-{request.slice.accelerator_type}:1",
            "accelerator_args": {"tpu_vm": True, "runtime_version": self.runtime},
            "use_spot": request.provisioning == "spot",
            "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [runs.PREEMPTED]},
            "labels": {"axial-run": request.name},
        }
        # To SkyPilot, the hosts of a slice are nodes (sky/backends/task_codegen.py).
        hosts = 'export AXIAL_HOST="$SKYPILOT_NODE_RANK" AXIAL_HOSTS="$SKYPILOT_NODE_IPS"'
        commands = {"setup": f"set -e\n{self.installation()}", "run": f"{PATH}\n{hosts}\nexec {runs.SUPERVISOR}\n"}
        return {"name": request.name, "resources": resources, "envs": {runs.VARIABLE: run.to_json()}, **commands}

    def checks(self):
        return [(["sky", "--version"], self._check_version), (["sky", "jobs", "queue", "-s", "-v"], self._check_name)]

    def _check_version(self, output):
        version = re.search(r"(\d+)\.(\d+)\.(\d+)", output)
        if not version or tuple(map(int, version.groups())) < (0, 11, 2):
            needed = f"{output.strip()} is installed, 0.11.2 or later is needed: {self.install}"
            raise InputError(f"--engine=skypilot: {needed}")

    def _check_name(self, output):
        if self._rows(output):
            name = f"--name={self.request.name}"
            raise InputError(f"{name}: is in use; axial-tpu delete --engine=skypilot {name} frees it")

    def _rows(self, output):
        """Lines of SkyPilot's table of jobs that have the name of this run."""
        return [line for line in output.splitlines() if self.request.name in line.split()]

    def launch(self, path, run):
        return ["sky", "jobs", "launch", "--yes", "--detach-run", f"--name={self.request.name}", path]

    def commands(self):
        name = f"--name={self.request.name}"
        logs, delete = ["sky", "jobs", "logs", name], ["sky", "jobs", "cancel", "--yes", name]
        return {"status": ["sky", "jobs", "queue", "-v"], "logs": logs, "delete": delete}

    def describe(self, output):
        rows = self._rows(output)
        if not rows:
            raise InputError(f"--name={self.request.name}: SkyPilot has no such run")
        ended = re.search(r"\b(SUCCEEDED|CANCELLED|FAILED\w*)\b", rows[0])
        return " ".join(rows[0].split()), not ended


class Gcloud(OnVirtualMachines):
    """A queued resource of the Cloud TPU API, which its hosts delete. Nothing recovers a preempted slice.

    The start-up script of every host installs axial and runs the supervisor, and runs it again after exit code 42. At
    the end of the run, the script deletes the queued resource with its node; it does so after the deadline even if a
    process hangs. The script runs at every boot, and then continues the run or deletes the resource. The flags are from
    https://docs.cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources/create and delete. The names of a
    host's metadata are from jax/_src/clusters/cloud_tpu_cluster.py of jax 0.10.
    """

    name, tool, file = "gcloud", "gcloud", "startup.sh"
    install = "https://docs.cloud.google.com/sdk/docs/install"
    flags = ("project", "zone", "runtime", "wheel", "service_account", "network")
    needs, needs_to_launch = ("project", "zone"), ("wheel",)
    by_hand = True
    notes = (
        "this engine does not recover a preempted slice; the same command goes on from the checkpoint",
        "the hosts delete their slice by themselves; their service account needs the role roles/tpu.admin",
    )
    # The patterns match messages in gcloud's googlecloudsdk/calliope/exceptions and the API's codes in
    # google/rpc/code.proto.
    refusals = (
        (r"ALREADY_EXISTS|already exists", "--name={name}: is in use; axial-tpu delete --engine=gcloud frees it"),
        (r"NOT_FOUND", "--name={name}: there is no such queued resource in {zone}"),
        (r"(?i)active account|reauth|credentials|UNAUTHENTICATED", "no credentials: gcloud auth login"),
    )

    def _command(self, group, verb, *words):
        where = [f"--project={self.request.project}", f"--zone={self.request.zone}"]
        return ["gcloud", "compute", "tpus", group, verb, self.request.name, *where, *words]

    def text(self, run):
        variables = {
            runs.VARIABLE: run.to_json(),
            "AXIAL_HOST_COUNT": str(run.hosts),
            "AXIAL_END": str(round(run.deadline + MARGIN)),
            "AXIAL_DELETE": shlex.join(self.commands()["delete"]),
        }
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        install = ["install() {", self.installation(), "}"]
        head = ["#!/bin/bash", "# Made by axial-tpu launch --engine=gcloud. Every boot of every host runs it."]
        return "\n".join([*head, *exports, *install, read_text(_script("startup.sh"))])

    def launch(self, path, run):
        request = self.request
        until = datetime.datetime.fromtimestamp(run.deadline, datetime.timezone.utc)
        return self._command(
            *("queued-resources", "create", f"--node-id={request.name}", f"--runtime-version={self.runtime}"),
            *(f"--accelerator-type={request.slice.accelerator_type}", *["--spot"] * (request.provisioning == "spot")),
            *(f"--metadata-from-file=startup-script={path}", f"--labels=axial-run={request.name}", "--async"),
            "--scopes=https://www.googleapis.com/auth/cloud-platform",
            f"--valid-until-time={until:%Y-%m-%dT%H:%M:%SZ}",
            *([f"--service-account={request.service_account}"] if request.service_account else []),
            *([f"--network={request.network}"] if request.network else []),
        )

    def commands(self):
        journal = "sudo journalctl --follow --lines=all --output=cat --unit=google-startup-scripts"
        return {
            "status": self._command("queued-resources", "describe", "--format=value(state.state)"),
            "logs": self._command("tpu-vm", "ssh", "--worker=0", f"--command={journal}"),
            "delete": self._command("queued-resources", "delete", "--force", "--async", "--quiet"),
        }

    def describe(self, output):
        state = output.strip() or "unknown"
        return state.lower(), state not in ("FAILED", "DELETING")


ENGINES = {kind.name: kind for kind in (Gke, SkyPilot, Gcloud)}
