"""The JobSet that axial writes is valid for JobSet's CRD, and its Job is valid for Kubernetes' schema."""

import dataclasses
import gzip
import hashlib
import json
import pathlib
import re
import time

import pytest
import yaml

from axial import slices
from axial.cloud import runs
from axial.cloud.engines import Gke, Request
from axial.errors import InputError

# config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of https://github.com/kubernetes-sigs/jobset at v0.10.1
# (da72d32b), Apache License 2.0, Copyright The Kubernetes Authors. The file is compressed, and otherwise unchanged.
CRD = pathlib.Path(__file__).with_name("jobset-crd-v0.10.1.yaml.gz")
CRD_SHA256 = "dd2d5dbb3186ea36f6815b19d9bc18c0f59ce50e28348d11d2a0888e0b5d0f16"
# Messages of kubernetes' pkg/controller/job/pod_failure_policy.go (95f0849).
EXIT = "Container axial for pod d/run-slice-0-0-x failed with exit code {code} matching FailJob rule at index {index}"
DISRUPTED = "Pod d/run-slice-0-0-x has condition DisruptionTarget matching FailJob rule at index 1"


def request(**more):
    return Request(**{"name": "run", "slice": slices.find_slice("v5e-16"), "runtime": "image:1", **more})


def manifest(**more):
    wanted = request(**more)
    values = {"name": "run", "arguments": ["--a"], "model_dir": "gs://b/run", "deadline": time.time() + 3600}
    return yaml.safe_load(Gke(wanted).text(runs.Run(**values, hosts=wanted.slice.hosts, generation="v5e")))


@pytest.fixture(scope="module")
def validator():
    """A validator of JobSet manifests."""
    jsonschema = pytest.importorskip("jsonschema")
    text = gzip.decompress(CRD.read_bytes())
    assert hashlib.sha256(text).hexdigest() == CRD_SHA256
    crd = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506, both loaders are safe
    (version,) = crd["spec"]["versions"]
    assert (crd["spec"]["group"], version["name"]) == ("jobset.x-k8s.io", "v1alpha2")
    return jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))


def closed(schema):
    """Returns a structural schema that refuses unknown fields, as the API server does."""
    if isinstance(schema, list):
        return [closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    is_closed = "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields")
    refusal = {"additionalProperties": False} if is_closed else {}
    return refusal | {name: closed(entry) for name, entry in schema.items()}


@pytest.mark.parametrize(
    "options", [{"queue": "q", "service_account": "s"}, {"provisioning": "spot", "slice": slices.find_slice("v6e-8")}]
)
def test_the_jobset_and_its_job_fit_the_schemas_of_jobset_and_kubernetes(validator, options):
    made = manifest(**options)
    assert list(validator.iter_errors(made)) == []
    (replicated,) = made["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **replicated["template"]}
    pytest.importorskip("kubernetes_validate").validate(job, "1.33", strict=True)
    job["spec"]["podFailurePolicies"] = []  # a field that Job does not have
    made["spec"]["failurePolicy"]["rules"][0]["action"] = "RestartJob"  # only JobSet 0.11 and later have this action
    assert len(list(validator.iter_errors(made))) == 2


@pytest.mark.parametrize(
    "reason, said, action",
    [
        ("PodFailurePolicy", EXIT.format(code=2, index=0), "FailJobSet"),
        ("PodFailurePolicy", EXIT.format(code=124, index=0), "FailJobSet"),
        ("PodFailurePolicy", EXIT.format(code=42, index=2), "RestartJobSetAndIgnoreMaxRestarts"),
        ("PodFailurePolicy", DISRUPTED, "RestartJobSetAndIgnoreMaxRestarts"),
        ("BackoffLimitExceeded", "Job has reached the specified backoff limit", "RestartJobSet"),
        ("DeadlineExceeded", "Job was active longer than specified deadline", "FailJobSet"),
    ],
)
def test_what_the_jobset_does_at_the_end_of_its_job(reason, said, action):
    """The first match decides, as in pkg/controllers/failure_policy.go (v0.10.1). Without a match, JobSet restarts."""
    spec = manifest()["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 3 and spec["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
    pod_rules = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    if "DisruptionTarget" in said:
        assert pod_rules[1]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    elif "exit code" in said:  # the message names the first rule with this code
        code, index = map(int, re.search(r"code (\d+) .* (\d)$", said).groups())
        exits = [rule.get("onExitCodes", {"values": []}) for rule in pod_rules]
        assert [code in values["values"] for values in exits].index(True) == index
        assert exits[index]["containerName"] == "axial"
    patterns = "onJobFailureMessagePatterns"
    actions = (
        rule["action"]
        for rule in spec["failurePolicy"]["rules"]
        if reason in rule["onJobFailureReasons"] and any(re.search(text, said) for text in rule.get(patterns, [""]))
    )
    assert next(actions, "RestartJobSet") == action


def test_what_a_pod_gets():
    made = manifest(queue="q", provisioning="spot")
    (replicated,) = made["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0)
    assert (job["completionMode"], job["template"]["spec"]["restartPolicy"]) == ("Indexed", "Never")
    assert 4150 < job["activeDeadlineSeconds"] <= 4200  # ten minutes after the run's deadline
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-spot": "true",
    }
    (container,) = pod["containers"]
    assert container["command"] == runs.SUPERVISOR.split()
    assert container["resources"]["limits"] == {"google.com/tpu": "4"}
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert container["env"][0] == {"name": "AXIAL_HOST", "valueFrom": {"fieldRef": {"fieldPath": index}}}
    assert values["AXIAL_HOSTS"] == "run-slice-0-0.run,run-slice-0-1.run,run-slice-0-2.run,run-slice-0-3.run"
    assert json.loads(values[runs.VARIABLE])["model_dir"] == "gs://b/run"
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert made["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"] == str(job["activeDeadlineSeconds"])


# Messages of kubectl and the API server: kubernetes' staging/src/k8s.io/kubectl/pkg/cmd/util/helpers.go and
# pkg/explain/v2 (95f0849), staging/src/k8s.io/apimachinery/pkg/api/errors/errors.go.
REFUSALS = {
    '(AlreadyExists): error when creating "x"': "--name=run: is in use; axial-tpu delete --engine=gke --name=run frees",
    'localqueues.kueue.x-k8s.io "q" not found': "--queue=q: the namespace has no",
    'error: the server doesn\'t have a resource type "localqueues"': "--queue=q: the cluster has no Kueue",
    'error: field "onJobFailureMessagePatterns" does not exist': "JobSet is too old, 0.10 or later is needed",
    'error: the server doesn\'t have a resource type "jobsets"': "the cluster has no JobSet",
    'jobsets.jobset.x-k8s.io "run" not found': "--name=run: the namespace has no such",
    "E1 memcache.go] couldn't get the list\nThe connection to the server localhost:8080 was refused": "no credentials",
    "error: You must be logged in to the server (Unauthorized)": "no credentials for a cluster: gcloud container clus",
    "W1 note\nError from server (Forbidden): jobsets is forbidden": "kubectl: Error from server (Forbidden): jobsets",
    "": "kubectl: no reason given",
}


def test_refusals_are_one_line():
    for said, meaning in REFUSALS.items():
        error = Gke(request(queue="q")).explain(said)
        assert isinstance(error, InputError) and meaning in str(error) and "\n" not in str(error)


def test_states():
    """The conditions are from JobSet's api/jobset/v1alpha2/jobset_types.go."""
    engine = Gke(Request("run"))

    def line(*conditions, **status):
        rows = [{"type": kind, "status": "True", "message": f"why {kind}"} for kind in conditions]
        return engine.describe(json.dumps({"status": {"conditions": rows, **status}}))

    assert line() == ("waits for its hosts; recreated 0 times, 0 of 3 allowed", True)
    status = dict(replicatedJobsStatus=[{"name": "slice", "ready": 1}], restarts=4, restartsCountTowardsMax=1)
    assert line(**status) == ("runs; recreated 4 times, 1 of 3 allowed", True)
    assert line("Suspended")[0].startswith("suspended: why Suspended") and line("Suspended")[1]
    assert line("Failed") == ("failed: why Failed; recreated 0 times, 0 of 3 allowed", False)
    assert line("Completed", "StartupPolicyCompleted")[0].startswith("completed") and not line("Completed")[1]


def test_requests_that_it_cannot_serve():
    for options, said in (
        ({"name": "a" * 41}, "--name=aaa"),
        ({"zone": "us-west4"}, "--zone=us-west4: expected the name of a zone"),
        ({"slice": slices.find_slice("v2-8")}, "--slice=v2-8: GKE has no v2"),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            Gke(dataclasses.replace(request(), **options))
