"""The JobSet that axial writes: held to JobSet's own definition, and to Kubernetes' of a Job."""

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
from axial.cloud.engine import Request
from axial.cloud.gke import Gke
from axial.errors import InputError

# config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of https://github.com/kubernetes-sigs/jobset at v0.10.1
# (da72d32b), Apache License 2.0, Copyright The Kubernetes Authors. It is unchanged, but for its compression.
CRD = pathlib.Path(__file__).with_name("jobset-crd-v0.10.1.yaml.gz")
CRD_SHA256 = "dd2d5dbb3186ea36f6815b19d9bc18c0f59ce50e28348d11d2a0888e0b5d0f16"


def request(**more):
    return Request(**{"name": "run", "slice": slices.find_slice("v5e-16"), "runtime": "image:1", **more})


def run(hosts=4, **more):
    values = {"name": "run", "arguments": ["--a"], "model_dir": "gs://b/run", "deadline": time.time() + 3600}
    return runs.Run(**values, hosts=hosts, generation="v5e", **more)


def body(run_=None, **more):
    return yaml.safe_load(Gke(request(**more)).text(run_ or run()))


@pytest.fixture(scope="module")
def definition():
    """The schema of a JobSet, which refuses unknown fields."""
    text = gzip.decompress(CRD.read_bytes())
    assert hashlib.sha256(text).hexdigest() == CRD_SHA256
    crd = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506, a safe one
    (version,) = crd["spec"]["versions"]
    assert (crd["spec"]["group"], version["name"]) == ("jobset.x-k8s.io", "v1alpha2")
    return version["schema"]["openAPIV3Schema"]


def faults(value, schema, where=""):
    """Where a value does not fit a structural schema. A field that it does not name is a fault."""
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, (int, str)) else [f"{where}: neither a number nor text"]
    kind = kinds[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [f"{where}: not of the type {schema['type']}"]
    found = [f"{where}: not one of {schema['enum']}"] if value not in schema.get("enum", [value]) else []
    if kind is int and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        found.append(f"{where}: out of range")
    if kind is str and not re.search(schema.get("pattern", ""), value):
        found.append(f"{where}: not like {schema['pattern']}")
    if kind is list:
        assert len(value) <= schema.get("maxItems", len(value))
        return found + [f for i, item in enumerate(value) for f in faults(item, schema["items"], f"{where}[{i}]")]
    if kind is dict:
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        found += [f"{where}.{name}: is missing" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            inner = known.get(name, others)
            if inner is None and not (where == ".metadata" or schema.get("x-kubernetes-preserve-unknown-fields")):
                found.append(f"{where}.{name}: unknown")
            elif inner:
                found += faults(item, inner, f"{where}.{name}")
    return found


WISHES = [
    {},
    {"queue": "q", "service_account": "s", "namespace": "n"},
    {"provisioning": "spot"},
    {"provisioning": "flex_start", "slice": slices.find_slice("v6e-8")},
    {"provisioning": "reserved", "reservation": "r", "slice": slices.find_slice("v4-32")},
]


@pytest.mark.parametrize("wish", WISHES)
def test_the_jobset_is_one_by_its_own_definition(definition, wish):
    hosts = wish.get("slice", slices.find_slice("v5e-16")).hosts
    assert faults(body(run(hosts), **wish), definition) == []


def test_a_misspelling_is_found(definition):
    made = body()
    (replicated,) = made["spec"]["replicatedJobs"]
    replicated["template"]["spec"]["podFailurePolicies"] = 1
    assert [fault.endswith(".podFailurePolicies: unknown") for fault in faults(made, definition)] == [True]
    made = body()
    made["spec"]["failurePolicy"]["rules"][0]["action"] = "RestartJob"  # of 0.11
    assert len(faults(made, definition)) == 1


@pytest.mark.parametrize("wish", WISHES)
def test_its_job_is_one_of_kubernetes(wish):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    hosts = wish.get("slice", slices.find_slice("v5e-16")).hosts
    (replicated,) = body(run(hosts), **wish)["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **replicated["template"]}
    kubernetes_validate.validate(job, "1.33", strict=True)
    job["spec"]["backofLimit"] = 0
    with pytest.raises(kubernetes_validate.ValidationError, match="backofLimit"):
        kubernetes_validate.validate(job, "1.33", strict=True)


def test_what_a_pod_gets():
    made = body(queue="q", provisioning="spot")
    (replicated,) = made["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0)
    assert 4150 < job["activeDeadlineSeconds"] <= 4200  # the backstop, ten minutes after the deadline
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
    assert values["AXIAL_HOSTS"] == "run-slice-0-0.run,run-slice-0-1.run,run-slice-0-2.run,run-slice-0-3.run"
    assert json.loads(values[runs.VARIABLE])["model_dir"] == "gs://b/run"
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert made["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"] == str(job["activeDeadlineSeconds"])


# What kubectl and the API server say: kubernetes' staging/src/k8s.io/kubectl/pkg/cmd/util/helpers.go and
# pkg/explain/v2 (95f0849), staging/src/k8s.io/apimachinery/pkg/api/errors/errors.go.
REFUSALS = [
    ('Error from server (NotFound): error when creating "x.yaml": namespaces "n" not found', "--namespace=n: the clus"),
    (
        'Error from server (AlreadyExists): error when creating "x": jobsets.jobset.x-k8s.io "run" already exists',
        "--name=run: is in use; axial-tpu delete --engine=gke --name=run frees it",
    ),
    ('Error from server (NotFound): localqueues.kueue.x-k8s.io "q" not found', "--queue=q: the namespace n has no"),
    ('error: the server doesn\'t have a resource type "localqueues"', "--queue=q: the cluster has no Kueue"),
    ('error: field "onJobFailureMessagePatterns" does not exist', "JobSet is too old, 0.10 or later is needed"),
    ('error: the server doesn\'t have a resource type "jobsets"', "the cluster has no JobSet"),
    (
        'Error from server (NotFound): jobsets.jobset.x-k8s.io "run" not found',
        "--name=run: the namespace n has no such",
    ),
    ('error: context "c" does not exist', "--context=c: the kubeconfig has no such context"),
    (
        "E1 memcache.go] couldn't get the list\nThe connection to the server localhost:8080 was refused - did you "
        "specify the right host or port?",
        "no credentials for a cluster: gcloud container clusters get-credentials",
    ),
    ("error: You must be logged in to the server (Unauthorized)", "no credentials for a cluster"),
    ("W1 note\nError from server (Forbidden): jobsets is forbidden", "kubectl: Error from server (Forbidden): jobsets"),
    ("", "kubectl: no reason given"),
]


@pytest.mark.parametrize("said, meaning", REFUSALS)
def test_refusals_are_one_line(said, meaning):
    error = Gke(request(namespace="n", queue="q", context="c")).explain(said)
    assert isinstance(error, InputError) and meaning in str(error) and "\n" not in str(error)


def test_states():
    """Conditions of api/jobset/v1alpha2/jobset_types.go."""
    engine = Gke(Request("run"))

    def line(*conditions, **status):
        rows = [{"type": kind, "status": "True", "message": f"why {kind}"} for kind in conditions]
        return engine.describe(json.dumps({"status": {"conditions": rows, **status}}))

    assert line() == ("waits for its hosts; made again 0 times, 0 of them of 3", True)
    ready = [{"name": "slice", "ready": 1}]
    assert line(replicatedJobsStatus=ready, restarts=4, restartsCountTowardsMax=1) == (
        "runs; made again 4 times, 1 of them of 3",
        True,
    )
    assert line("Suspended")[0].startswith("suspended: why Suspended") and line("Suspended")[1]
    assert line("Failed") == ("failed: why Failed; made again 0 times, 0 of them of 3", False)
    assert line("Completed", "StartupPolicyCompleted")[0].startswith("completed") and not line("Completed")[1]


@pytest.mark.parametrize(
    "wish, said",
    [
        ({"name": "Run"}, "--name=Run: expected at most 40"),
        ({"name": "a" * 41}, "--name=aaa"),
        ({"zone": "us-west4"}, "--zone=us-west4: expected the name of a zone"),
        ({"provisioning": "reserved"}, "--reservation goes with --provisioning=reserved"),
        ({"reservation": "r"}, "--reservation goes with"),
        ({"slice": slices.find_slice("v2-8")}, "--slice=v2-8: GKE has no v2"),
    ],
)
def test_requests_that_it_cannot_serve(wish, said):
    with pytest.raises(InputError, match=re.escape(said)):
        Gke(dataclasses.replace(request(), **wish))
