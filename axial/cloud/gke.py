"""Slices of Google Kubernetes Engine: a JobSet whose pods hold the chips, one pod a host.

The JobSet has the labels and selectors that xpk and Kueue know, so that `xpk workload list` shows it. Its pods wait;
what runs in them starts as on the other back ends, by `kubectl exec` in place of ssh.
https://docs.cloud.google.com/kubernetes-engine/docs/how-to/tpus, https://jobset.sigs.k8s.io.
"""

import contextlib

from axial.cloud import slices
from axial.cloud.backend import GRPC_PORT, MARGIN, Backend, State, Status, Worker
from axial.cloud.calls import Absent, Refused, needs
from axial.errors import InputError

JOBSET = ("jobset.x-k8s.io", "v1alpha2")
IMAGE = "python:3.11"
OF_JOBSET = "jobset.sigs.k8s.io/jobset-name"
INDEX = "batch.kubernetes.io/job-completion-index"
CONTAINER = "axial"
_CHIPS = ("accelerator", "topology")  # labels of nodes: what their chips are
# Reasons for which a container waits in vain: faults of the request.
NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")


class Gke(Backend):
    """See `Backend`."""

    name = slices.GKE
    # GKE's admission webhook writes them into each pod that asks for TPUs.
    gives = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY", "TPU_SKIP_MDS_QUERY")

    def __init__(self, request, calls, **options):
        super().__init__(request, calls, **options)
        self._path = f"apis/{'/'.join(JOBSET)}/namespaces/{request.namespace}/jobsets"
        self._api = None

    @property
    def _kubernetes(self):
        """(CustomObjectsApi, CoreV1Api)."""
        if self._api is None:
            try:
                from kubernetes import client, config
            except ImportError as error:
                raise needs(self.name, "kubernetes", error) from None
            settings = client.Configuration()
            if self._endpoint.startswith("http://"):
                settings.host = self._endpoint
            else:
                try:
                    config.load_kube_config(context=self.request.context or None, client_configuration=settings)
                except config.ConfigException as error:
                    raise InputError(
                        "--backend=gke: no cluster in the kubeconfig; gcloud container clusters get-credentials "
                        f"writes it ({error})"
                    ) from None
                settings.host = self._endpoint or settings.host
            settings.retries = False  # `Calls` tries again
            made = client.ApiClient(settings)
            self._api = client.CustomObjectsApi(made), client.CoreV1Api(made)
        return self._api

    def body(self):
        """The JobSet."""
        request = self.request
        metadata = {"name": request.name, "labels": {**request.labels, "xpk.google.com/workload": request.name}}
        if request.queue:
            metadata["labels"]["kueue.x-k8s.io/queue-name"] = request.queue
        if request.slice.hosts > 1:
            metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        job = {
            "parallelism": request.slice.hosts,
            "completions": request.slice.hosts,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"metadata": {"labels": request.labels}, "spec": self._pod()},
        }
        return {
            "apiVersion": "/".join(JOBSET),
            "kind": "JobSet",
            "metadata": metadata,
            "spec": {
                "failurePolicy": {"maxRestarts": 0},
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": job}}],
            },
        }

    def _pod(self):
        request = self.request
        selector = {
            "cloud.google.com/gke-tpu-accelerator": request.slice.kind.gke,
            "cloud.google.com/gke-tpu-topology": request.slice.topology,
        }
        kinds = {"spot": "cloud.google.com/gke-spot", "flex_start": "cloud.google.com/gke-flex-start"}
        if request.provisioning in kinds:
            selector[kinds[request.provisioning]] = "true"
        if request.reservation:
            selector["cloud.google.com/reservation-name"] = request.reservation
        chips = {"google.com/tpu": str(request.slice.chips_per_host)}
        container = {
            "name": CONTAINER,
            "image": request.runtime or IMAGE,
            # a shell, because sleep alone, as a container's first process, keeps every job that was killed as a zombie
            "command": ["bash", "-c", "sleep infinity & wait"],
            "ports": [{"containerPort": port} for port in (GRPC_PORT, 8471, 8476)],
            "securityContext": {"privileged": True},
            "resources": {"requests": chips, "limits": chips},
        }
        pod = {"restartPolicy": "Never", "nodeSelector": selector, "containers": [container]}
        if request.seconds:
            # of the pod, which counts from its start on a node; a Job's would count the wait for capacity too
            pod["activeDeadlineSeconds"] = round(request.seconds + MARGIN)
        if request.service_account:
            pod["serviceAccountName"] = request.service_account
        return pod

    def create(self):
        where = self._place()

        def send():
            return self._kubernetes[0].create_namespaced_custom_object(
                *JOBSET, **where, body=self.body(), _request_timeout=self.calls.timeout
            )

        try:
            self.calls("POST", f"{self._host()}/{self._path}", send, body=self.body())
        except Absent as error:
            raise Refused(
                f"the cluster has no JobSets, or no namespace {self.request.namespace!r}: "
                f"https://jobset.sigs.k8s.io/docs/installation ({error})"
            ) from None
        self.made = True

    def _host(self):
        return self._endpoint or "https://CLUSTER"

    def _place(self):
        return {"namespace": self.request.namespace, "plural": "jobsets"}

    def _jobset(self):
        """The JobSet as plain values, or None if it is absent or in a dry run."""

        def send():
            return self._kubernetes[0].get_namespaced_custom_object(
                *JOBSET, **self._place(), name=self.request.name, _request_timeout=self.calls.timeout
            )

        try:
            return self.calls("GET", f"{self._host()}/{self._path}/{self.request.name}", send)
        except Absent:
            return None

    def _pods(self):
        """The pods in the order of their index."""
        selector = f"{OF_JOBSET}={self.request.name}"
        path = f"api/v1/namespaces/{self.request.namespace}/pods?labelSelector={selector}"

        def send():
            return self._kubernetes[1].list_namespaced_pod(
                self.request.namespace, label_selector=selector, _request_timeout=self.calls.timeout
            )

        found = self.calls("GET", f"{self._host()}/{path}", send)
        return sorted(found.items, key=lambda pod: int((pod.metadata.annotations or {}).get(INDEX, 0))) if found else []

    def status(self):
        jobset = self._jobset()
        if self.calls.dry_run:
            return self.dry_status()
        pods = self._pods()
        if jobset is None:
            return Status(State.DELETING, f"{len(pods)} pods are left") if pods else Status(State.ABSENT)
        if jobset["metadata"].get("deletionTimestamp"):
            return Status(State.DELETING)
        true = {
            condition["type"]: condition.get("message") or condition.get("reason", "")
            for condition in jobset.get("status", {}).get("conditions", [])
            if condition["status"] == "True"
        }
        lost = [why for why in map(_why_lost, pods) if why]
        if lost:
            return Status(State.PREEMPTED, lost[0])
        if "Failed" in true:
            return Status(State.FAILED, true["Failed"])
        if "Suspended" in true:
            return Status(State.WAITING, true["Suspended"])
        unusable = [why for why in map(_why_unusable, pods) if why]
        if unusable:
            return Status(State.FAILED, unusable[0])
        if len(pods) == self.request.slice.hosts and all(map(_runs, pods)):
            return Status(State.ACTIVE)
        waiting = [why for why in map(_why_unscheduled, pods) if why]
        return Status(State.WAITING, waiting[0]) if waiting else Status(State.CREATING)

    def workers(self):
        pods = self._pods()
        if self.calls.dry_run:
            return self.dry_workers()
        return [Worker(i, pod.metadata.name, pod.status.pod_ip) for i, pod in enumerate(pods)]

    def other(self):
        def described(jobset):
            job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
            pod = job["template"]["spec"]
            chips = " ".join(pod.get("nodeSelector", {}).get(f"cloud.google.com/gke-tpu-{key}", "?") for key in _CHIPS)
            return f"{job.get('parallelism', 1)} pods of {chips} with {pod['containers'][0]['image']}"

        jobset = self._jobset()
        found = described(jobset) if jobset else ""
        return "" if found == described(self.body()) else found

    def delete(self):
        def send():
            return self._kubernetes[0].delete_namespaced_custom_object(
                *JOBSET, **self._place(), name=self.request.name, _request_timeout=self.calls.timeout
            )

        with contextlib.suppress(Absent):
            self.calls("DELETE", f"{self._host()}/{self._path}/{self.request.name}", send)
        self.until_gone()
        self.made = False

    def _kubectl(self, *arguments):
        context = [f"--context={self.request.context}"] if self.request.context else []
        return ["kubectl", *context, f"--namespace={self.request.namespace}", *arguments]

    def ssh(self, worker, command=None):
        shell = ["bash", "-c", command] if command else ["bash"]
        return self._kubectl(
            "exec", *([] if command else ["-it"]), worker.name, f"--container={CONTAINER}", "--", *shell
        )

    def copy(self, worker, path, target):
        return self._kubectl("cp", path, f"{worker.name}:{target}", f"--container={CONTAINER}")


def _why_lost(pod):
    """Why a pod that ran does so no more, or None."""
    for condition in pod.status.conditions or []:
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return condition.message or condition.reason or "its node is taken away"
    if pod.status.phase in ("Failed", "Unknown"):
        return pod.status.message or pod.status.reason or f"pod {pod.metadata.name} is {pod.status.phase}"
    return None


def _why_unusable(pod):
    """Why a pod will never run, or None."""
    for container in pod.status.container_statuses or []:
        waiting = container.state.waiting if container.state else None
        if waiting and waiting.reason in NO_IMAGE:
            return f"{waiting.reason}: {waiting.message or ''}"
    return None


def _why_unscheduled(pod):
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return condition.message or condition.reason
    return None


def _runs(pod):
    ready = any(condition.type == "Ready" and condition.status == "True" for condition in pod.status.conditions or [])
    return pod.status.phase == "Running" and ready and pod.metadata.deletion_timestamp is None
