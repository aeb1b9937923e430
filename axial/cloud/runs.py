"""The description of a run on a slice. Engines pass it to each host as JSON, in the environment variable AXIAL_RUN."""

import os

import msgspec

from axial.errors import InputError
from axial.io.schemas import Strict

VARIABLE = "AXIAL_RUN"
SUPERVISOR = "python3 -m axial.cloud.supervisor"
# Exit codes of a run on a slice. The first three are axial-train's; 124 is the code of coreutils' timeout.
PREEMPTED, BAD_INPUT, FAULT, DEADLINE = 42, 2, 70, 124
SERVER_PORT = 8470  # port of TensorFlow's server on a TPU worker (see tensorflow/python/tpu/client/client.py)


class Run(Strict, kw_only=True):
    """A training on a slice.

    Attributes:
        name: name of the run and of its slice.
        arguments: arguments of axial-train, without --strategy, --tpu and --model_dir.
        model_dir: folder of the run, which outlives the slice.
        deadline: end of the run, in seconds since 1970; no restart extends it.
        hosts, generation: number of hosts, and generation of the chips, such as 'v5e'.
        gin: text of a gin file that the slice does not have; '' for none.
        own_server: whether supervisors start TensorFlow's servers; otherwise the image starts them.
        environment: environment variables of the trainer.
        port: port of TensorFlow's servers. The first supervisor listens for the others on port - 1.
        pace: factor that multiplies all waiting times of supervisors; small in tests.
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
    """Returns (the `Run` in `VARIABLE`, number of this host, addresses of all hosts).

    AXIAL_HOST is the number of this host, by default 0. AXIAL_HOSTS has the addresses, separated by commas or spaces;
    the default is localhost.

    Raises:
        InputError: a variable is invalid, or the variables do not fit together.
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
