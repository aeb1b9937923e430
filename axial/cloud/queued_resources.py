"""Slices of the Cloud TPU API, v2 to v6e: a queued resource, which waits for capacity and then makes a node."""

import json

from axial.cloud import slices
from axial.cloud.backend import Backend, State, Status, Worker
from axial.cloud.calls import Absent, Refused, credentials, needs
from axial.errors import InputError

ENDPOINT = "https://tpu.googleapis.com"


class QueuedResources(Backend):
    """See `Backend`."""

    name = slices.QUEUED

    def __init__(self, request, calls, **options):
        if request.provisioning == "flex_start":
            raise InputError("--provisioning=flex_start: --backend=queued_resources has its queue instead; use spot")
        super().__init__(request, calls, **options)
        self.runtime = request.runtime or slices.default_runtime(request.slice)
        slices.check_runtime(request.slice, self.runtime)
        self.tensorflow = slices.tensorflow_of(self.runtime)
        self._place = f"projects/{request.project}/locations/{request.zone}"
        self._url = f"{self._endpoint or ENDPOINT}/v2/{self._place}"
        self._resource = f"{self._place}/queuedResources/{request.name}"
        self._node = f"{self._place}/nodes/{request.name}"
        self._operation = None
        self._made_client = None

    @property
    def _client(self):
        if self._made_client is None:
            try:
                from google.cloud import tpu_v2
            except ImportError as error:
                raise needs(self.name, "google-cloud-tpu", error) from None
            self._made_client = tpu_v2.TpuClient(
                credentials=credentials(self._endpoint),
                transport="rest",
                client_options={"api_endpoint": self._endpoint} if self._endpoint else None,
            )
        return self._made_client

    def body(self):
        """The QueuedResource, in the JSON of the API."""
        request = self.request
        node = {
            "acceleratorType": request.slice.accelerator_type,
            "runtimeVersion": self.runtime,
            "networkConfig": {"enableExternalIps": True},
            "labels": request.labels,
        }
        for key in ("network", "subnetwork"):
            if getattr(request, key):
                node["networkConfig"][key] = getattr(request, key)
        if request.service_account:
            node["serviceAccount"] = {"email": request.service_account}
        body = {"tpu": {"nodeSpec": [{"parent": self._place, "nodeId": request.name, "node": node}]}}
        if request.provisioning == "spot":
            body["spot"] = {}
        if request.provisioning == "reserved":
            body["guaranteed"] = {"reserved": True}
            body["reservationName"] = f"{self._place}/reservations/{request.reservation}"
        return body

    def create(self):
        def send():
            client = self._client  # first, as it says what is not installed
            from google.cloud.tpu_v2 import QueuedResource

            return client.create_queued_resource(
                parent=self._place,
                queued_resource=QueuedResource.from_json(json.dumps(self.body())),
                queued_resource_id=self.request.name,
                retry=None,
                timeout=self.calls.timeout,
            )

        url = f"{self._url}/queuedResources?queuedResourceId={self.request.name}"
        self._operation = self.calls("POST", url, send, body=self.body())
        self.made = True

    def status(self):
        from_api = self._get_resource()
        if self.calls.dry_run:
            return self.dry_status()
        if from_api is None:
            return self._of_operation()
        kinds = type(from_api.state).State
        state, by = from_api.state.state, from_api.state.state_initiator
        if state in (kinds.SUSPENDING, kinds.SUSPENDED):
            by_user = by == type(from_api.state).StateInitiator.USER
            return Status(State.STOPPED, "a user deleted its node") if by_user else Status(State.SUSPENDED)
        if state == kinds.FAILED:
            return Status(State.FAILED, from_api.state.failed_data.error.message or "the Cloud gives no reason")
        if state == kinds.ACTIVE:
            return self._of_node()
        known = {kinds.PROVISIONING: State.CREATING, kinds.DELETING: State.DELETING}
        return Status(known.get(state, State.WAITING), kinds(state).name.lower())

    def _get_resource(self):
        return self._get("queuedResources", "get_queued_resource", self._resource)

    def _get(self, collection, method, name):
        """A resource, or None if it is absent or in a dry run."""

        def send():
            return getattr(self._client, method)(name=name, retry=None, timeout=self.calls.timeout)

        try:
            return self.calls("GET", f"{self._url}/{collection}/{self.request.name}", send)
        except Absent:
            return None

    def _of_operation(self):
        """Status while there is no queued resource: what became of the call that asks for one."""
        operation, self._operation = self._operation, None
        error = getattr(getattr(operation, "operation", None), "error", None)
        if error is not None and error.code:
            return Status(State.FAILED, error.message)
        return Status(State.ABSENT)

    def _of_node(self):
        node = self._get("nodes", "get_node", self._node)
        if node is None:
            return Status(State.PREEMPTED, "its node is gone")
        kinds, health = type(node).State, type(node).Health
        if node.state in (kinds.PREEMPTED, kinds.TERMINATED):
            return Status(State.PREEMPTED)
        if node.state in (kinds.STOPPING, kinds.STOPPED):
            return Status(State.STOPPED)
        if node.state in (kinds.REPAIRING, kinds.RESTARTING) or node.health == health.UNHEALTHY_MAINTENANCE:
            return Status(State.MAINTENANCE, node.health_description)
        if node.state == kinds.READY:
            return Status(State.ACTIVE)
        return Status(State.CREATING, kinds(node.state).name.lower())

    def workers(self):
        node = self._get("nodes", "get_node", self._node)
        if self.calls.dry_run:
            return self.dry_workers()
        return [Worker(i, str(i), end.ip_address) for i, end in enumerate(node.network_endpoints)] if node else []

    def other(self):
        resource, wanted = self._get_resource(), (self.request.slice.accelerator_type, self.runtime)
        specs = resource.tpu.node_spec if resource else ()
        found = [(spec.node.accelerator_type, spec.node.runtime_version) for spec in specs]
        return "" if found in ([], [wanted]) else " and ".join("a {} with {}".format(*pair) for pair in found)

    def delete(self):
        def send():
            # force: the node with it, as a preempted node holds quota until it is deleted
            request = {"name": self._resource, "force": True}
            return self._client.delete_queued_resource(request=request, retry=None, timeout=self.calls.timeout)

        for _ in range(100):
            try:
                self.calls("DELETE", f"{self._url}/queuedResources/{self.request.name}?force=true", send)
                break
            except Absent:
                break
            except Refused:  # a resource that is just changing cannot be deleted
                if self.status().state is State.ABSENT:
                    break
                if self.status().state not in (State.DELETING, State.CREATING, State.SUSPENDED):
                    raise
                self.wait(self.poll)
        self.until_gone()
        self.made = False

    def ssh(self, worker, command=None):
        place = [f"--project={self.request.project}", f"--zone={self.request.zone}", f"--worker={worker.index}"]
        tail = [f"--command={command}"] if command else []
        return ["gcloud", "compute", "tpus", "tpu-vm", "ssh", self.request.name, *place, "--quiet", *tail]

    def copy(self, worker, path, target):
        place = [f"--project={self.request.project}", f"--zone={self.request.zone}", f"--worker={worker.index}"]
        return ["gcloud", "compute", "tpus", "tpu-vm", "scp", path, f"{self.request.name}:{target}", *place, "--quiet"]

    def starts_server(self):
        return super().starts_server() and self.tensorflow is None

    def environment(self):
        if self.tensorflow is None or self.request.slice.hosts > 1:
            return {}
        # How TensorFlow of these images finds the TPU of its own host:
        # https://docs.cloud.google.com/tpu/docs/runtimes (TensorFlow PJRT support).
        return {"NEXT_PLUGGABLE_DEVICE_USE_C_API": "true", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": "/lib/libtpu.so"}
