"""What the back ends share: a request for a slice, the states of a slice, and its workers."""

import abc
import dataclasses
import enum
import re
import time

from axial.cloud.slices import Slice
from axial.errors import InputError

PROVISIONING = ("on_demand", "spot", "flex_start", "reserved")
GRPC_PORT = 8470  # where TensorFlow's server of a TPU worker listens; tensorflow/python/tpu/client/client.py
# Seconds from the end of the time limit to the Cloud's own end of the slice, the last resort. The Cloud counts from the
# start of each machine or pod, the loop of `run.py` from when all run, and then the trainer saves: without this margin
# the Cloud would take the slice away first, and the loop would make a new one.
MARGIN = 600.0
MOST_LOOKS = 1000  # at what the Cloud should have finished long before


class State(enum.Enum):
    """State of a slice, the same names for all back ends."""

    ABSENT = "absent"
    WAITING = "waiting"  # for capacity
    CREATING = "creating"
    ACTIVE = "active"  # every worker runs
    MAINTENANCE = "maintenance"  # the Cloud repairs or moves it, and will give it back
    PREEMPTED = "preempted"  # it holds its name, and may hold quota, until it is deleted
    SUSPENDED = "suspended"  # by the Cloud; the same
    STOPPED = "stopped"  # by a person
    FAILED = "failed"  # it could not be made
    DELETING = "deleting"


@dataclasses.dataclass(frozen=True)
class Status:
    """A `State`, and what the Cloud says about it."""

    state: State
    detail: str = ""

    def __str__(self):
        return self.state.value + (f": {self.detail}" if self.detail else "")


@dataclasses.dataclass(frozen=True)
class Worker:
    """A host of a slice: its number, its name for ssh, and its internal address."""

    index: int
    name: str
    address: str


@dataclasses.dataclass(frozen=True)
class Request:
    """A slice that a user wants.

    Attributes:
        name: of the slice.
        slice: a `Slice`.
        project, zone: of Google Cloud.
        provisioning: one of `PROVISIONING`.
        reservation: name of a reservation, with 'reserved'.
        runtime: TPU software version (queued_resources), image family (compute_engine) or container image (gke).
        network, subnetwork, service_account: '' for the project's defaults.
        seconds: that the slice may run; the Cloud itself ends it `MARGIN` later, where it can. None for any time.
        namespace, context, queue: of Kubernetes: its namespace, the context of the kubeconfig ('' for the current
            one), and the queue of Kueue ('' for none).
    """

    name: str
    slice: Slice
    project: str
    zone: str
    provisioning: str = "on_demand"
    reservation: str = ""
    runtime: str = ""
    network: str = ""
    subnetwork: str = ""
    service_account: str = ""
    seconds: float | None = None
    namespace: str = "default"
    context: str = ""
    queue: str = ""

    def __post_init__(self):
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", self.name):
            raise InputError(
                f"--name={self.name}: expected at most 40 small letters, digits and hyphens, a letter first"
            )
        if not re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z]\w*", self.zone):
            raise InputError(f"--zone={self.zone}: not the name of a zone; expected one like us-central2-b")
        if not re.fullmatch(r"[a-z0-9.:-]*[a-z][a-z0-9.:-]*", self.project):
            raise InputError(f"--project={self.project}: not the id of a project")
        if (self.provisioning == "reserved") != bool(self.reservation):
            raise InputError("--reservation goes with --provisioning=reserved, and that with --reservation")

    @property
    def region(self):
        return self.zone.rpartition("-")[0]

    @property
    def labels(self):
        return {"axial-run": self.name}


class Backend(abc.ABC):
    """A slice in one of Google's services.

    Attributes:
        name: of the back end.
        request: a `Request`.
        calls: a `Calls`.
        wait: function of seconds, between two looks at a slice.
        poll: those seconds.
        made: whether this object has made the slice; a dry run then takes it for active.
    """

    name = ""
    # (major, minor, patch) of the image's TensorFlow. Where it is None, axial installs one, and its TPU kernels.
    tensorflow = None
    # Variables that the service itself gives to a worker's processes and that they need.
    gives = ()

    def __init__(self, request, calls, *, endpoint="", wait=time.sleep, poll=15.0):
        """
        Args:
            request, calls, wait, poll: see the attributes.
            endpoint: address of the service, for a private end point; '' for Google's own.
        """
        self.request, self.calls, self.wait, self.poll = request, calls, wait, poll
        self.made = False
        self._endpoint = endpoint.rstrip("/")

    @abc.abstractmethod
    def create(self):
        """Asks for the slice. Raises Taken if the name is in use, NoQuota, or Refused."""

    @abc.abstractmethod
    def status(self):
        """The slice's `Status`."""

    @abc.abstractmethod
    def workers(self):
        """The `Worker`s of an active slice, first worker first."""

    @abc.abstractmethod
    def delete(self):
        """Deletes the slice and returns when it is gone. An absent one is no error."""

    @abc.abstractmethod
    def ssh(self, worker, command=None):
        """Arguments of the process that runs a shell command on a worker, or a shell without one."""

    @abc.abstractmethod
    def copy(self, worker, path, target):
        """Arguments of the process that copies a file to a worker, `target` relative to where `ssh` starts."""

    @abc.abstractmethod
    def other(self):
        """What the slice of this name is, as text, if it is not the one of the request; else ''."""

    def starts_server(self):
        """Whether a slice of several hosts needs our TensorFlow server on each; images with a TPU runtime have one."""
        return self.request.slice.hosts > 1

    def environment(self):
        """dict of variables that the trainer needs on this service's workers."""
        return {}

    def until_gone(self):
        """Returns when there is no slice any more. Raises InputError after `MOST_LOOKS`."""
        for _ in range(MOST_LOOKS):
            if self.calls.dry_run or self.status().state is State.ABSENT:
                return
            self.wait(self.poll)
        raise InputError(f"--name={self.request.name}: is still being deleted")

    def dry_status(self):
        """What a dry run takes the slice for."""
        return Status(State.ACTIVE if self.made else State.ABSENT)

    def dry_workers(self):
        """Workers with invented addresses, for a dry run."""
        count = self.request.slice.hosts
        return [Worker(i, f"WORKER{i}", f"ADDRESS{i}") for i in range(count)]
