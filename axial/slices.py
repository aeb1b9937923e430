"""TPU slices, named as on Cloud TPU, and the software that they boot.

A *slice* is the unit that is rented: chips of one generation, their hosts, and the network between the chips.

Sources, at https://docs.cloud.google.com unless another address is given:
- Topologies and hosts: /tpu/docs/v2 to /tpu/docs/v6e, each with a table of configurations, and
  /tpu/docs/supported-tpu-configurations.
- Numbers in names count TensorCores for v2, v3, v4 and v5p, and chips for v5e and v6e; same pages.
- Labels of GKE: /kubernetes-engine/docs/concepts/plan-tpus, and https://github.com/AI-Hypercomputer/xpk,
  system_characteristics.py.
- TPU software versions: `RUNTIMES_PAGE`.
- The last generation with TensorFlow is v6e: `NO_TENSORFLOW_PAGE`; tensorflow-tpu 2.20 is the last on PyPI.
"""

import dataclasses
import math
import re

from axial.errors import InputError, nearest

RUNTIMES_PAGE = "https://docs.cloud.google.com/tpu/docs/runtimes"
NO_TENSORFLOW_PAGE = "https://docs.cloud.google.com/tpu/docs/tpu7x"
# TensorFlow of the newest supported TPU software version with TensorFlow, according to `RUNTIMES_PAGE`.
TENSORFLOW_RUNTIME = "2.18.0"
OLDEST_TENSORFLOW, NEWEST_TENSORFLOW = (2, 18), (2, 20)


@dataclasses.dataclass(frozen=True)
class Generation:
    """Properties of all slices of a TPU generation.

    Attributes:
        cores: TensorCores per chip if the number in a slice's name counts TensorCores; 1 if it counts chips.
        topologies: topologies of its slices, separated by spaces.
        api: prefix of its accelerator types in the Cloud TPU API.
        base: name of the TPU software version without a framework.
        gke: value of the label cloud.google.com/gke-tpu-accelerator; '' if GKE does not offer the generation.
        one_host: number of chips of the largest slice with a single host.
    """

    cores: int
    topologies: str
    api: str
    base: str
    gke: str = ""
    one_host: int = 4


_FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16"
_BASE = "tpu-ubuntu2204-base"
GENERATIONS = {
    "v2": Generation(2, "2x2 4x4 8x8 8x16 16x16", "v2-", _BASE),
    "v3": Generation(2, "2x2 4x4 8x8 8x16 16x16 16x32 32x32", "v3-", _BASE),
    "v4": Generation(2, _CUBES, "v4-", _BASE, gke="tpu-v4-podslice"),
    "v5e": Generation(1, _FLAT, "v5litepod-", "v2-alpha-tpuv5-lite", gke="tpu-v5-lite-podslice", one_host=8),
    "v5p": Generation(2, f"{_CUBES} 16x16x16 16x16x24", "v5p-", "v2-alpha-tpuv5", gke="tpu-v5p-slice"),
    "v6e": Generation(1, _FLAT, "v6e-", "v2-alpha-tpuv6e", gke="tpu-v6e-slice", one_host=8),
}
_EXAMPLES = ("v4-32", "v5e-16", "v5p-32", "v6e-16")
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e"}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice.

    Attributes:
        name: name such as 'v5e-16'.
        generation: key of `GENERATIONS`.
        topology: number of chips along each axis of the torus, such as '4x4'.
        chips, cores, hosts: numbers of chips, TensorCores and hosts.
        accelerator_type: its name in the Cloud TPU API, such as 'v5litepod-16'.
    """

    name: str
    generation: str
    topology: str
    chips: int
    cores: int
    hosts: int
    accelerator_type: str

    @property
    def kind(self):
        """Its `Generation`."""
        return GENERATIONS[self.generation]

    @property
    def devices(self):
        """Number of its devices for TensorFlow: the cores of a v2 or v3, otherwise the chips."""
        return self.cores if self.generation in ("v2", "v3") else self.chips


def _slice(generation, topology):
    kind = GENERATIONS[generation]
    chips = math.prod(int(side) for side in topology.split("x"))
    number = chips * kind.cores
    return Slice(
        *(f"{generation}-{number}", generation, topology),
        chips=chips,
        cores=number,
        hosts=1 if chips <= kind.one_host else chips // 4,
        accelerator_type=f"{kind.api}{number}",
    )


_ALL = (_slice(name, topology) for name, kind in GENERATIONS.items() for topology in kind.topologies.split())
SLICES = {slice_.name: slice_ for slice_ in _ALL}


def find_slice(name):
    """The `Slice` with a name.

    Args:
        name: 'v5e-16', 'v5litepod-16' or, with a topology, 'v5e-4x4'.

    Raises:
        InputError: there is no such slice; the message suggests the nearest name.

    >>> find_slice("v5e-16").hosts, find_slice("v4-32").topology, find_slice("v5p-2x2x1").name
    (4, '2x2x4', 'v5p-8')
    """
    generation, _, size = name.strip().lower().rpartition("-")
    generation = _ALIASES.get(generation, generation)
    if re.match(r"(tpu|v)?[78]", generation):
        raise InputError(f"--slice={name}: TensorFlow on TPUs ends at v6e ({NO_TENSORFLOW_PAGE})")
    by_topology = [s for s in SLICES.values() if (s.generation, s.topology) == (generation, size)]
    slice_ = by_topology[0] if by_topology else SLICES.get(f"{generation}-{size}")
    if slice_ is None:
        names = [s.name for s in SLICES.values() if s.generation == generation]
        near = nearest(f"{generation}-{size}", SLICES)
        if names and size.isdigit():
            best = min(names, key=lambda candidate: abs(int(candidate.rpartition("-")[2]) - int(size)))
            near = f" (did you mean {best!r}?)"
        raise InputError(f"--slice={name}: no such slice{near}; for example {', '.join(names or _EXAMPLES)}")
    return slice_


# === Software ===


def tensorflow_of(runtime):
    """(major, minor, patch) of the TensorFlow in a TPU software version, or None if it has no TensorFlow.

    >>> tensorflow_of("tpu-vm-tf-2.18.0-pod-pjrt"), tensorflow_of("v2-alpha-tpuv6e")
    ((2, 18, 0), None)
    """
    match = re.match(r"tpu-vm-tf-(\d+)\.(\d+)\.(\d+)", runtime)
    return tuple(map(int, match.groups())) if match else None


def default_runtime(slice_):
    """TPU software version with TensorFlow for a slice's VMs. Google documents no other for several hosts."""
    return f"tpu-vm-tf-{TENSORFLOW_RUNTIME}{'-pod' if slice_.hosts > 1 else ''}-pjrt"


def check_runtime(slice_, runtime):
    """Raises InputError if a TPU software version does not suit the slice, or axial does not run on it."""
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST_TENSORFLOW, NEWEST_TENSORFLOW))
    # The first has TensorFlow; on the second one axial installs it.
    expected = f"expected {default_runtime(slice_)} or {slice_.kind.base} ({RUNTIMES_PAGE})"
    version = tensorflow_of(runtime)
    if version is None and (runtime.startswith("tpu-vm-tf") or not re.fullmatch(r"[a-z0-9][a-z0-9.-]{2,62}", runtime)):
        raise InputError(f"--runtime={runtime}: not the name of a TPU software version; {expected}")
    if version and not OLDEST_TENSORFLOW <= version[:2] <= NEWEST_TENSORFLOW:
        raise InputError(f"--runtime={runtime}: axial runs on TensorFlow {oldest} to {newest}; {expected}")
    if version and (("-pod" in runtime) != (slice_.hosts > 1) or not runtime.endswith("-pjrt")):
        hosts = f"{slice_.hosts} host{'s' if slice_.hosts > 1 else ''}"
        raise InputError(f"--runtime={runtime}: {slice_.name} has {hosts}; {expected}")
