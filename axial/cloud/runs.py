"""The description of a run on a slice: what every engine gets, and what travels to each host in `VARIABLE` as JSON."""

import os

import msgspec

from axial.errors import InputError
from axial.io.schemas import Strict

VARIABLE = "AXIAL_RUN"
SUPERVISOR = "python3 -m axial.cloud.supervisor"
# How a run on a slice ends. The first three are axial-train's own; 124 is what coreutils' timeout ends with.
PREEMPTED, BAD_INPUT, FAULT, DEADLINE = 42, 2, 70, 124
SERVER_PORT = 8470  # of TensorFlow's server on a TPU worker; tensorflow/python/tpu/client/client.py


class Run(Strict, kw_only=True):
    """A training on a slice.

    Attributes:
        name: of the run and of its slice.
        arguments: of axial-train, without --strategy, --tpu and --model_dir.
        model_dir: its folder, which outlives the slice.
        deadline: seconds since 1970 at which it ends; no restart renews it.
        hosts, generation: of the slice and its chips, as 'v5e'.
        gin: text of a gin file that the slice does not have; '' for none.
        own_server: whether supervisors start TensorFlow's servers, or the image has.
        environment: variables of the trainer.
        port: of TensorFlow's servers; the first host's supervisor holds the others at the port before it.
        pace: factor of all waits of the supervisors; tests make it small.
    """

    name: str
    arguments: list[str]
    model_dir: str
    deadline: float
    hosts: int = 1
    generation: str = ""
    gin: str = ""
    own_server: bool = True
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    port: int = SERVER_PORT
    pace: float = 1.0

    def to_json(self):
        return msgspec.json.encode(self).decode()


def from_environment():
    """(the `Run` of `VARIABLE`, number of this host, addresses of all hosts). Raises InputError.

    A slice of several hosts has AXIAL_HOST, a number, and AXIAL_HOSTS, addresses with commas between them.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        run = msgspec.json.decode(text, type=Run)
    except msgspec.DecodeError as error:
        raise InputError(f"{VARIABLE}: not the description of a run ({error}); axial-tpu launch writes it") from None
    host, hosts = os.environ.get("AXIAL_HOST") or "0", os.environ.get("AXIAL_HOSTS") or "localhost"
    addresses = hosts.replace(",", " ").split()
    if not host.isdigit() or len(addresses) != run.hosts or int(host) >= run.hosts:
        raise InputError(f"AXIAL_HOST={host} AXIAL_HOSTS={hosts}: expected one of {run.hosts} hosts and all addresses")
    return run, int(host), addresses
