"""Slices of Compute Engine, v5e and later: a managed instance group with a workload policy that names the topology.

https://docs.cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice. A slice is three resources: the policy
(of several hosts alone), an instance template, and the group. The group makes all its machines at once or waits, and
does not repair them: a slice without one of its hosts is of no use.
"""

import collections
import json

from axial.cloud import slices
from axial.cloud.backend import MARGIN, MOST_LOOKS, Backend, State, Status, Worker
from axial.cloud.calls import Absent, NoQuota, Refused, Taken, credentials, is_quota, needs
from axial.errors import InputError

ENDPOINT = "https://compute.googleapis.com"
LONGEST_FLEX_START = 7 * 24 * 3600  # seconds; https://docs.cloud.google.com/compute/docs/instances/about-flex-start-vms
BOOT_DISK_GB = 200
DYING = ("STOPPING", "STOPPED", "TERMINATED", "DEPROVISIONING", "PENDING_STOP")
# Errors of a group that waits for capacity: it tries again by itself.
NO_CAPACITY = ("ZONE_RESOURCE_POOL_EXHAUSTED", "STOCKOUT", "RESOURCE_POOL_EXHAUSTED", "RESOURCE_NOT_READY")


class ComputeEngine(Backend):
    """See `Backend`."""

    name = slices.COMPUTE

    def __init__(self, request, calls, **options):
        super().__init__(request, calls, **options)
        self._url = f"{self._endpoint or ENDPOINT}/compute/v1/projects/{request.project}"
        self._clients = {}

    def _client(self, kind):
        """A client of google-cloud-compute, 'InstanceGroupManagersClient'."""
        if kind not in self._clients:
            try:
                from google.cloud import compute_v1
            except ImportError as error:
                raise needs(self.name, "google-cloud-compute", error) from None
            options = {"api_endpoint": self._endpoint} if self._endpoint else None
            made = getattr(compute_v1, kind)(credentials=credentials(self._endpoint), client_options=options)
            self._clients[kind] = made
        return self._clients[kind]

    # === What is sent ===

    def policy(self):
        """The workload policy, in the JSON of the API."""
        topology = {"type": "HIGH_THROUGHPUT", "acceleratorTopology": self.request.slice.topology}
        return {"name": self.request.name, "workloadPolicy": {**topology, "acceleratorTopologyMode": "AUTO_CONNECT"}}

    def template(self):
        """The instance template, in the JSON of the API."""
        request, kind = self.request, self.request.slice.kind
        image = f"projects/{slices.IMAGE_PROJECT}/global/images/family/{request.runtime or kind.image}"
        network = {"accessConfigs": [{"name": "External NAT", "type": "ONE_TO_ONE_NAT"}]}
        if request.network or not request.subnetwork:
            network["network"] = f"global/networks/{request.network or 'default'}"
        if request.subnetwork:
            network["subnetwork"] = f"regions/{request.region}/subnetworks/{request.subnetwork}"
        disk = {"sourceImage": image, "diskSizeGb": str(BOOT_DISK_GB), "diskType": kind.disk}
        properties = {
            "machineType": request.slice.machine_type,
            "disks": [{"boot": True, "autoDelete": True, "initializeParams": disk}],
            "networkInterfaces": [network],
            "serviceAccounts": [
                {
                    "email": request.service_account or "default",
                    "scopes": ["https://www.googleapis.com/auth/cloud-platform"],
                }
            ],
            "scheduling": self._scheduling(),
            "labels": request.labels,
        }
        if request.reservation:
            properties["reservationAffinity"] = {
                "consumeReservationType": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": [request.reservation],
            }
        return {"name": request.name, "properties": properties}

    def _scheduling(self):
        models = {"spot": "SPOT", "flex_start": "FLEX_START", "reserved": "RESERVATION_BOUND", "on_demand": "STANDARD"}
        provisioning = self.request.provisioning
        seconds = self.request.seconds and self.request.seconds + MARGIN
        if provisioning == "flex_start":
            seconds = min(seconds or LONGEST_FLEX_START, LONGEST_FLEX_START)
        scheduling = {"onHostMaintenance": "TERMINATE", "automaticRestart": False}
        scheduling["provisioningModel"] = models[provisioning]
        if provisioning in ("spot", "flex_start") or seconds:
            # deleted, not stopped: a stopped machine may hold quota, and its disk costs
            scheduling["instanceTerminationAction"] = "DELETE"
        if seconds:
            scheduling["maxRunDuration"] = {"seconds": str(round(seconds))}
        return scheduling

    def group(self):
        """The managed instance group, in the JSON of the API."""
        request = self.request
        group = {
            "name": request.name,
            "baseInstanceName": f"{request.name}-####",
            "instanceTemplate": f"projects/{request.project}/global/instanceTemplates/{request.name}",
            "targetSize": request.slice.hosts,
            "targetSizePolicy": {"mode": "BULK"},
            "instanceLifecyclePolicy": {"defaultActionOnFailure": "DO_NOTHING"},
        }
        if request.slice.hosts > 1:
            policy = f"projects/{request.project}/regions/{request.region}/resourcePolicies/{request.name}"
            group["resourcePolicies"] = {"workloadPolicy": policy}
        return group

    # === Calls ===

    def _call(self, method, path, send, body=None):
        return self.calls(method, f"{self._url}/{path}", send, body=body)

    def _finish(self, path, operation):
        """Waits for an operation. Raises NoQuota or Refused if it fails, InputError after `MOST_LOOKS`.

        The clients' own waiting does not go to a private end point.

        Args:
            path: of the resource, 'zones/us-central1-a/instanceGroupManagers'.
            operation: a `compute_v1.Operation`, or None.
        """
        scope, *place = path.split("/")[:2]
        kind, key = {"zones": ("Zone", "zone"), "regions": ("Region", "region"), "global": ("Global", "")}[scope]
        where = {key: place[0]} if key else {}
        at = "/".join([scope, *place[: len(where)], "operations"])
        looks = 0
        while operation is not None and operation.status != operation.Status.DONE:
            if looks == MOST_LOOKS:
                raise InputError(f"--name={self.request.name}: {at}/{operation.name} does not end")
            looks += 1
            self.wait(self.poll)

            def send(name=operation.name):
                client = self._client(f"{kind}OperationsClient")
                options = {"project": self.request.project, "retry": None, "timeout": self.calls.timeout}
                return client.get(operation=name, **where, **options)

            operation = self._call("GET", f"{at}/{operation.name}", send)
        errors = operation.error.errors if operation is not None else ()
        if errors:
            said = f"{errors[0].code}: {errors[0].message}"
            raise NoQuota(f"no quota: {said}") if is_quota(said) else Refused(said)

    def _insert(self, collection, kind, place, body):
        """Makes a resource.

        Args:
            collection: path below the project, 'global/instanceTemplates'.
            kind: (client, message, keyword of the message), names of google-cloud-compute.
            place: keywords of its place.
            body: plain values.
        """
        client, message, keyword = kind

        def send():
            made = self._client(client)
            from google.cloud import compute_v1

            resource = getattr(compute_v1, message).from_json(json.dumps(body))
            options = {"project": self.request.project, "retry": None, "timeout": self.calls.timeout}
            return made.insert_unary(**place, **{keyword: resource}, **options)

        self._finish(collection, self._call("POST", collection, send, body))

    def create(self):
        request = self.request
        if self.status().state is not State.ABSENT:
            raise Taken(f"--name={request.name}: is in use")
        self._delete_rest()  # what a stopped call has left
        if request.slice.hosts > 1:
            self._insert(
                f"regions/{request.region}/resourcePolicies",
                ("ResourcePoliciesClient", "ResourcePolicy", "resource_policy_resource"),
                {"region": request.region},
                self.policy(),
            )
        self._insert(
            "global/instanceTemplates",
            ("InstanceTemplatesClient", "InstanceTemplate", "instance_template_resource"),
            {},
            self.template(),
        )
        self._insert(
            f"zones/{request.zone}/instanceGroupManagers",
            ("InstanceGroupManagersClient", "InstanceGroupManager", "instance_group_manager_resource"),
            {"zone": request.zone},
            self.group(),
        )
        self.made = True

    def _of_group(self, method, client_method):
        """The group, or a list of what belongs to it; None if it is absent or in a dry run."""
        request = self.request
        path = f"zones/{request.zone}/instanceGroupManagers/{request.name}"
        itself = client_method in ("get", "delete_unary")

        def send():
            answer = getattr(self._client("InstanceGroupManagersClient"), client_method)(
                project=request.project,
                zone=request.zone,
                instance_group_manager=request.name,
                retry=None,
                timeout=self.calls.timeout,
            )
            return answer if itself else list(answer)

        try:
            return self._call(method, path if itself else f"{path}/{_camel(client_method)}", send)
        except Absent:
            return None

    def status(self):
        group = self._of_group("GET", "get")
        if self.calls.dry_run:
            return self.dry_status()
        if group is None:
            return Status(State.ABSENT)
        if group.current_actions.deleting:
            return Status(State.DELETING)
        machines = self._of_group("POST", "list_managed_instances") or []
        states = collections.Counter(machine.instance_status or machine.current_action for machine in machines)
        counts = ", ".join(f"{count} {state.lower()}" for state, count in sorted(states.items()))
        if states["RUNNING"] == self.request.slice.hosts:
            return Status(State.ACTIVE)
        if any(states[state] for state in DYING):
            return Status(State.PREEMPTED, counts)
        if states["SUSPENDED"] or states["SUSPENDING"]:
            return Status(State.SUSPENDED, counts)
        if states["REPAIRING"]:
            return Status(State.MAINTENANCE, counts)
        return self._of_errors(counts) or Status(State.CREATING, counts)

    def _of_errors(self, counts):
        """Status of a group that is not whole, by its errors; None if it has none."""
        errors = [item.error for item in self._of_group("GET", "list_errors") or []]
        for error in errors:
            if not any(code in error.code for code in NO_CAPACITY):
                raise_quota = is_quota(f"{error.code} {error.message}")
                said = f"{error.code}: {error.message}"
                return Status(State.FAILED, f"no quota: {said}" if raise_quota else said)
        if errors:
            return Status(State.WAITING, errors[-1].message or errors[-1].code)
        return Status(State.WAITING, counts) if "pending" in counts else None

    def workers(self):
        machines = self._of_group("POST", "list_managed_instances")
        if self.calls.dry_run:
            return self.dry_workers()
        names = sorted(machine.instance.rpartition("/")[2] for machine in machines or [])
        return [Worker(i, name, self._address(name)) for i, name in enumerate(names)]

    def _address(self, instance):
        place = {"project": self.request.project, "zone": self.request.zone, "instance": instance}

        def send():
            return self._client("InstancesClient").get(**place, retry=None, timeout=self.calls.timeout)

        found = self._call("GET", f"zones/{self.request.zone}/instances/{instance}", send)
        return found.network_interfaces[0].network_i_p

    def other(self):
        group, request = self._of_group("GET", "get"), self.request
        if group is None:
            return ""
        template = group.instance_template.rpartition("/")[2]
        if template != request.name:
            return f"a group of the template {template}"

        def send():
            client = self._client("InstanceTemplatesClient")
            options = {"project": request.project, "retry": None, "timeout": self.calls.timeout}
            return client.get(instance_template=template, **options).properties

        made, wanted = self._call("GET", f"global/instanceTemplates/{template}", send), self.template()["properties"]
        image = wanted["disks"][0]["initializeParams"]["sourceImage"].rpartition("/")[2]
        wanted = request.slice.hosts, request.slice.machine_type, image
        found = group.target_size, made.machine_type, made.disks[0].initialize_params.source_image.rpartition("/")[2]
        return "" if found == wanted else "{} machines {} with {}".format(*found)

    def delete(self):
        path = f"zones/{self.request.zone}/instanceGroupManagers"
        self._finish(path, self._of_group("DELETE", "delete_unary"))
        self.until_gone()
        self._delete_rest()
        self.made = False

    def _delete_rest(self):
        """Deletes the template and the policy, where they are."""
        request = self.request
        rest = [("InstanceTemplatesClient", "global/instanceTemplates", {"instance_template": request.name})]
        if request.slice.hosts > 1:
            path = f"regions/{request.region}/resourcePolicies"
            place = {"region": request.region, "resource_policy": request.name}
            rest.append(("ResourcePoliciesClient", path, place))
        for client, path, place in rest:

            def send(client=client, place=place):
                made = self._client(client)
                return made.delete_unary(project=request.project, **place, retry=None, timeout=self.calls.timeout)

            try:
                self._finish(path, self._call("DELETE", f"{path}/{request.name}", send))
            except Absent:
                continue

    # === Workers ===

    def ssh(self, worker, command=None):
        place = [f"--project={self.request.project}", f"--zone={self.request.zone}", "--quiet"]
        return ["gcloud", "compute", "ssh", worker.name, *place, *([f"--command={command}"] if command else [])]

    def copy(self, worker, path, target):
        place = [f"--project={self.request.project}", f"--zone={self.request.zone}", "--quiet"]
        return ["gcloud", "compute", "scp", path, f"{worker.name}:{target}", *place]


def _camel(name):
    """'list_errors' as the API writes it, 'listErrors'."""
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)
