"""Stand-ins on loopback for the Cloud TPU, Compute Engine and Kubernetes APIs, for gcloud, kubectl and the trainer.

One `Cloud` has the life of one slice; each API says it in its own words. What comes in and what goes out passes the
messages of Google's client libraries, and the models of the Kubernetes client. A worker is a folder. The stand-ins of
gcloud and kubectl run a command there, and fail where the Cloud has taken the folder away.
"""

import contextlib
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import tarfile
import threading
import time
import urllib.parse

from google.cloud import compute_v1, tpu_v2
from kubernetes import client as kubernetes

from stand_in_commands import GCLOUD, PYTHON, TRAINER

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "tpu"
PLACE = "projects/p/locations/us-west4-a"


class Cloud:
    """The life of one slice, and its workers.

    Attributes:
        lives: for each time that the slice is made, its states at one look after the other; the last one stays.
            The states are those of `State`, 'failed MESSAGE', 'quota' for a refusal at once, and 'stopped'.
        lag: how often the quota is refused after a slice was deleted.
        faults: what happens to the next requests that match: (pattern, 'METHOD path'), then an HTTP status, 'slow', or
            'lost' for one that is heard but not answered.
        log: 'METHOD path' of every request.
        bodies: what was asked for, by collection.
        made, deleted: how often.
    """

    def __init__(self, root, lives, *, lag=0, hosts=4):
        self.root, self.lives, self.lag, self.hosts = pathlib.Path(root), list(lives), lag, hosts
        self.faults, self.log, self.bodies, self.operations = [], [], {}, {}
        self.script, self.made, self.deleted, self.refuse = None, 0, 0, 0
        self.lock = threading.RLock()
        for name, text in (("gcloud", GCLOUD), ("kubectl", GCLOUD), ("axial-train", TRAINER), ("python3", PYTHON)):
            path = self.root / ("bin" if name in ("gcloud", "kubectl") else "worker_bin") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        (self.root / "workers").mkdir(exist_ok=True)

    def plan(self, *lines):
        """What each start of the trainer does."""
        (self.root / "plan").write_text("".join(f"{line}\n" for line in lines))

    def read(self, name):
        path = self.root / name
        return path.read_text() if path.exists() else ""

    def starts(self):
        """Arguments of each start of the trainer."""
        return [line.split() for line in self.read("starts").splitlines()]

    # === The slice ===

    def create(self):
        """'taken', 'quota' or 'made'."""
        if self.script is not None:
            return "taken"
        if self.refuse:
            self.refuse -= 1
            return "quota"
        life = list(self.lives.pop(0))
        if life == ["quota"]:
            return "quota"
        self.script, self.made = life, self.made + 1
        return "made"

    def look(self):
        """The state now, or None if there is no slice."""
        if self.script is None:
            return None
        taken = self.root / "taken"
        if taken.exists():
            self.script = [taken.read_text().strip()]
            taken.unlink()
            if self.script[0] != "maintenance":
                self.kill()
            else:
                self.script = ["maintenance", "maintenance", "preempted"]
        state = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if state == "active":
            for name in self.names():
                (self.root / "workers" / name).mkdir(exist_ok=True)
        if state == "preempted":
            self.kill()
        return state

    def delete(self):
        """Whether there was a slice."""
        found, self.script = self.script is not None, None
        self.deleted += found
        self.refuse = self.lag if found else self.refuse
        self.kill()
        return found

    def names(self):
        return [self.worker(i) for i in range(self.hosts)]

    def kill(self):
        for pid in (self.root / "workers").glob("*/*/*.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.killpg(int(pid.read_text()), signal.SIGKILL)
        shutil.rmtree(self.root / "workers", ignore_errors=True)
        (self.root / "workers").mkdir(exist_ok=True)

    # === HTTP ===

    def fault(self, method, path):
        for fault in self.faults:
            if re.search(fault[0], f"{method} {path}"):
                self.faults.remove(fault)
                return fault[1]
        return None

    def answer(self, method, path, query, body):
        """(status, plain values) of a request."""
        raise NotImplementedError


@contextlib.contextmanager
def serving(cloud):
    """Address of a `Cloud` on loopback."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self):
            split = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(split.query))
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            assert "Authorization" not in self.headers
            with cloud.lock:
                cloud.log.append(f"{self.command} {split.path}")
                fault = cloud.fault(self.command, split.path)
                if fault in (None, "lost"):
                    status, value = cloud.answer(self.command, split.path, query, body)
            if fault == "slow":
                time.sleep(1.5)
                self.close_connection = True
                return
            if fault == "lost":
                self.close_connection = True
                return
            if fault:
                said = "the service is at fault"  # Google's APIs have it below "error", Kubernetes beside it
                status, value = fault, {**error(fault, said), "message": said}
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = handle_any

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        cloud.kill()


def until(condition):
    """Waits until a function returns what is true. Fails after half a minute."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.02)


def error(code, message, **more):
    return {"error": {"code": code, "message": message, **more}}


def plain(message):
    """Plain values of a proto message, as the API's JSON."""
    return json.loads(type(message).to_json(message, use_integers_for_enums=False))


# === Cloud TPU API ===


TPU_STATES = {
    "waiting": "WAITING_FOR_RESOURCES",
    "creating": "PROVISIONING",
    "suspended": "SUSPENDED",
    "stopped": "SUSPENDED",
    "deleting": "DELETING",
}


class TpuApi(Cloud):
    """https://docs.cloud.google.com/tpu/docs/reference/rest/v2."""

    backend, other = "queued_resources", f"/v2/{PLACE}/queuedResources"
    QUOTA = "Quota limit 'TPUV5sLitepodPerProjectPerZone' has been exceeded. Limit: 16 in zone us-west4-a."

    def worker(self, index):
        return f"run-{index}"

    def answer(self, method, path, query, body):
        name = path.rpartition("/")[2]
        if path == self.other and method == "POST":
            return self.post(query["queuedResourceId"], body)
        if path.startswith(f"{self.other}/") and method == "DELETE":
            assert query.get("force") == "true"
            return (200, plain_operation(name)) if self.delete() else (404, error(404, f"{name} was not found"))
        if path.startswith(f"{self.other}/"):
            self.state = self.look()
            return self.queued(name) if self.state else (404, error(404, f"{name} was not found"))
        if path == f"/v2/{PLACE}/nodes/{name}" and self.script:
            return self.node(name)
        if path.startswith("/storage/"):
            return bucket(name)
        return 404, error(404, f"Location {path} is not found or access is unauthorized.")

    def post(self, name, body):
        wanted = tpu_v2.QueuedResource.from_json(json.dumps(body))  # raises for a field that the API does not have
        self.bodies["queuedResources"] = plain(wanted)
        told = self.create()
        if told == "taken":
            return 409, error(409, f"{name} already exists", status="ALREADY_EXISTS")
        if told == "quota":
            return 429, error(429, self.QUOTA, status="RESOURCE_EXHAUSTED")
        return 200, plain_operation(name)

    def queued(self, name):
        state = TPU_STATES.get(self.state.split()[0], "ACTIVE")
        wanted = self.bodies.get("queuedResources", {})
        found = {"name": f"{PLACE}/queuedResources/{name}", "tpu": wanted.get("tpu", {}), "state": {"state": state}}
        if self.state.startswith("failed"):
            found["state"] = {"state": "FAILED", "failedData": {"error": {"code": 8, "message": self.state[7:]}}}
        if self.state in ("suspended", "stopped"):
            found["state"]["stateInitiator"] = "USER" if self.state == "stopped" else "SERVICE"
        return 200, plain(tpu_v2.QueuedResource.from_json(json.dumps(found)))

    def node(self, name):
        states = {"preempted": "PREEMPTED", "maintenance": "REPAIRING", "active": "READY"}
        found = {
            "name": f"{PLACE}/nodes/{name}",
            "state": states[self.state],
            "health": "UNHEALTHY_MAINTENANCE" if self.state == "maintenance" else "HEALTHY",
            "networkEndpoints": [{"ipAddress": f"10.0.0.{i}", "port": 8470} for i in range(self.hosts)],
        }
        return 200, plain(tpu_v2.Node.from_json(json.dumps(found)))


def plain_operation(name):
    return {"name": f"{PLACE}/operations/{name}", "done": False}


def bucket(name):
    found = {"near": ("US-WEST4", "region"), "far": ("EUROPE-WEST4", "region"), "eu": ("EU", "multi-region")}.get(name)
    return (200, {"location": found[0], "locationType": found[1]}) if found else (404, error(404, "no such bucket"))


# === Compute Engine API ===


COMPUTE_MESSAGES = {
    "resourcePolicies": compute_v1.ResourcePolicy,
    "instanceTemplates": compute_v1.InstanceTemplate,
    "instanceGroupManagers": compute_v1.InstanceGroupManager,
}


COMPUTE_STATUS = {
    "waiting": "PENDING",
    "creating": "STAGING",
    "active": "RUNNING",
    "preempted": "TERMINATED",
    "suspended": "SUSPENDED",
    "maintenance": "REPAIRING",
}


class ComputeApi(Cloud):
    """https://docs.cloud.google.com/compute/docs/reference/rest/v1."""

    backend, other = "compute_engine", "/compute/v1/projects/p/zones/us-west4-a/instanceGroupManagers"

    def worker(self, index):
        return f"run-{index:04d}"

    def answer(self, method, path, query, body):
        parts = path.removeprefix("/compute/v1/projects/p/").split("/")
        if path.startswith("/storage/"):
            return bucket(parts[-1])
        if "operations" in parts:
            return 200, self.operations[parts[-1]]
        if method == "POST" and parts[-1] in COMPUTE_MESSAGES:
            return self.post(parts, body)
        if method == "DELETE":
            return self.remove(parts)
        if parts[-1] in ("listManagedInstances", "listErrors"):
            return self.instances(parts[-1])
        if "instances" in parts:
            number = int(parts[-1].rpartition("-")[2])
            found = {"name": parts[-1], "networkInterfaces": [{"networkIP": f"10.0.0.{number}"}]}
            return 200, plain(compute_v1.Instance.from_json(json.dumps(found)))
        if "instanceTemplates" in parts:
            return 200, self.bodies[f"instanceTemplates/{parts[-1]}"]
        self.state = self.look()
        if self.state is None or parts[-1] not in self.bodies:
            return 404, error(404, f"{parts[-1]} was not found")
        return 200, {**self.bodies[parts[-1]], "currentActions": {"deleting": 0}}

    def post(self, parts, body):
        COMPUTE_MESSAGES[parts[-1]].from_json(json.dumps(body))  # raises for a field that the API does not have
        if parts[-1] == "instanceGroupManagers":
            told = self.create()
            if told == "quota":
                return 403, error(403, "Quota 'TPUS_PER_TPU_FAMILY' exceeded. Limit: 8.0 in region us-west4.")
            if told == "taken":
                return 409, error(409, f"{body['name']} already exists")
        elif self.bodies.get(f"{parts[-1]}/{body['name']}"):
            return 409, error(409, f"{body['name']} already exists")
        self.bodies[parts[-1]] = self.bodies[f"{parts[-1]}/{body['name']}"] = self.bodies[body["name"]] = body
        return 200, self.operation(parts[:-1])

    def remove(self, parts):
        collection, name = parts[-2:]
        if collection == "instanceGroupManagers":
            if not self.delete():
                return 404, error(404, f"{name} was not found")
        elif not self.bodies.pop(f"{collection}/{name}", None):
            return 404, error(404, f"{name} was not found")
        return 200, self.operation(parts[:-2])

    def operation(self, place):
        """An operation that runs now and is done at the next look."""
        name = f"operation-{len(self.operations)}"
        where = {"zones": "zone", "regions": "region"}.get(place[0])
        link = f"https://www.googleapis.com/compute/v1/projects/p/{'/'.join(place)}"
        found = {"name": name, "status": "RUNNING", **({where: link} if where else {})}
        self.operations[name] = {**found, "status": "DONE"}
        return plain(compute_v1.Operation.from_json(json.dumps(found)))

    def instances(self, what):
        if what == "listErrors":
            code, _, text = self.state.removeprefix("failed").strip().partition(" ")
            failed = self.state.startswith("failed")
            return 200, {"items": [{"error": {"code": code, "message": text}}] if failed else []}
        status = COMPUTE_STATUS.get(self.state)
        link = "https://www.googleapis.com/compute/v1/projects/p/zones/us-west4-a/instances"
        found = [
            {"instance": f"{link}/{name}", "instanceStatus": status, "currentAction": "NONE"} for name in self.names()
        ]
        if self.state == "preempted":  # Compute Engine takes one machine of four
            found[1:] = [{**machine, "instanceStatus": "RUNNING"} for machine in found[1:]]
        return 200, {"managedInstances": found if status else []}


# === Kubernetes API ===


def check_model(value, kind):
    """Asserts that plain values have the fields of a model of the Kubernetes client."""
    if kind.startswith("list["):
        for item in value:
            check_model(item, kind[5:-1])
    elif hasattr(kubernetes, kind):
        model = getattr(kubernetes, kind)
        fields = {name: model.openapi_types[attribute] for attribute, name in model.attribute_map.items()}
        for name, item in value.items():
            assert name in fields, f"{kind} has no {name}"
            check_model(item, fields[name])


class KubernetesApi(Cloud):
    """https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2, and pods."""

    backend, other = "gke", "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"

    def worker(self, index):
        return f"run-slice-0-{index}-abcde"

    def answer(self, method, path, query, body):
        if path.startswith("/storage/"):
            return bucket(path.rpartition("/")[2])
        if path == self.other and method == "POST":
            return self.post(body)
        if path.startswith(f"{self.other}/"):
            if method == "DELETE":
                return (200, {}) if self.delete() else status(404, "jobsets run not found")
            self.state = self.look()
            return self.jobset() if self.state else status(404, "jobsets run not found")
        if path == "/api/v1/namespaces/default/pods":
            assert query == {"labelSelector": "jobset.sigs.k8s.io/jobset-name=run"}
            return 200, {"kind": "PodList", "items": self.pods() if self.script else []}
        return status(404, f"{path} not found")

    def post(self, body):
        (replicated,) = body["spec"]["replicatedJobs"]
        assert set(replicated) == {"name", "replicas", "template"}
        check_model(replicated["template"], "V1JobTemplateSpec")
        check_model(body["metadata"], "V1ObjectMeta")
        self.bodies["jobsets"] = body
        told = self.create()
        if told == "taken":
            return status(409, "jobsets run already exists")
        if told == "quota":
            return status(403, "jobsets run is forbidden: exceeded quota: chips, requested: google.com/tpu=16")
        return 201, body

    def jobset(self):
        conditions = {"waiting": ("Suspended", "waits in Kueue's queue")}.get(self.state)
        if self.state.startswith("failed"):
            conditions = "Failed", self.state[7:]
        if self.state == "suspended":
            conditions = "Failed", "its pods were evicted"
        found = [{"type": conditions[0], "status": "True", "message": conditions[1]}] if conditions else []
        return 200, {
            "metadata": {"name": "run"},
            "spec": self.bodies["jobsets"]["spec"],
            "status": {"conditions": found},
        }

    def pods(self):
        phase = {"active": "Running", "maintenance": "Running", "preempted": "Failed", "suspended": "Failed"}
        found = []
        for index, name in reversed(list(enumerate(self.names()))):
            annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
            pod = {"phase": phase.get(self.state, "Pending"), "podIP": f"10.0.0.{index}", "conditions": []}
            if pod["phase"] == "Running":
                pod["conditions"] = [{"type": "Ready", "status": "True"}]
            if self.state == "preempted":
                lost = {"type": "DisruptionTarget", "status": "True", "message": "the node is preempted"}
                pod["conditions"] = [lost]
            metadata = {"name": name, "annotations": annotations}
            check_model(metadata, "V1ObjectMeta")
            check_model(pod, "V1PodStatus")
            found.append({"metadata": metadata, "status": pod, "spec": {"containers": []}})
        return found


def status(code, message):
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


APIS = (TpuApi, ComputeApi, KubernetesApi)


def small_package(folder):
    """An archive with what a worker needs to run a job, without axial."""
    path = os.path.join(folder, "small.tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        for name in ("job.sh",):
            archive.add(SCRIPTS / name, f"scripts/tpu/{name}")
    return path
