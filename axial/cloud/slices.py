"""TPU slices, as users of Cloud TPU name them, and the software that they boot.

Sources, of https://docs.cloud.google.com unless named:
- Topologies and hosts: /tpu/docs/v2 to /tpu/docs/tpu7x, each with its table of configurations, and
  /tpu/docs/supported-tpu-configurations.
- Numbers in names: TensorCores for v2, v3, v4 and v5p, chips for v5e and v6e, the same pages. TPU7x has no such name in
  the Cloud TPU API; xpk (https://github.com/AI-Hypercomputer/xpk, system_characteristics.py) counts TensorCores.
- Machine types and labels of GKE: /kubernetes-engine/docs/concepts/plan-tpus, and the same file of xpk.
- Machine types of Compute Engine: /compute/docs/tpus/tpu-machines. Images: project ubuntu-os-accelerator-images.
- TPU software versions: `RUNTIMES_PAGE`.
"""

import dataclasses
import math
import re

from axial.errors import InputError, nearest

RUNTIMES_PAGE = "https://docs.cloud.google.com/tpu/docs/runtimes"
NO_TENSORFLOW_PAGE = "https://docs.cloud.google.com/tpu/docs/tpu7x"
QUEUED, COMPUTE, GKE = BACKENDS = ("queued_resources", "compute_engine", "gke")
IMAGE_PROJECT = "ubuntu-os-accelerator-images"
# The newest TPU software version with TensorFlow that the page supports.
TENSORFLOW_RUNTIME = "2.18.0"
OLDEST_TENSORFLOW, NEWEST_TENSORFLOW = (2, 18), (2, 20)


@dataclasses.dataclass(frozen=True)
class Generation:
    """What the slices of a TPU generation share.

    Attributes:
        cores: TensorCores of a chip.
        counts_cores: whether the number in a slice's name counts TensorCores; if not, it counts chips.
        api: prefix of its accelerator types in the Cloud TPU API; '' if that API does not have it.
        machine: machine type without the number of chips, 'ct6e-standard-'; '' if only the Cloud TPU API has it.
        gke: label cloud.google.com/gke-tpu-accelerator.
        base: TPU software version without a framework.
        image: image family of Compute Engine; '' if Compute Engine does not have it.
        topologies: of its slices, with spaces between them.
        one_host: chips of the largest slice with one host.
        disk: type of boot disk that the machine takes.
    """

    cores: int
    topologies: str
    counts_cores: bool = False
    api: str = ""
    machine: str = ""
    gke: str = ""
    base: str = ""
    image: str = ""
    one_host: int = 4
    disk: str = "pd-balanced"


_CUBES = "4x4x4 4x4x8 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16"
_FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_BASE_IMAGE = "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
_TPU_V2 = {"cores": 2, "counts_cores": True, "base": "tpu-ubuntu2204-base"}
GENERATIONS = {
    "v2": Generation(**_TPU_V2, api="v2-", topologies="2x2 4x4 8x8 8x16 16x16"),
    "v3": Generation(**_TPU_V2, api="v3-", topologies="2x2 4x4 8x8 8x16 16x16 16x32 32x32"),
    "v4": Generation(
        **_TPU_V2,
        api="v4-",
        machine="ct4p-hightpu-",
        gke="tpu-v4-podslice",
        topologies=f"2x2x1 2x2x2 2x2x4 2x4x4 {_CUBES}",
    ),
    "v5e": Generation(
        cores=1,
        api="v5litepod-",
        machine="ct5lp-hightpu-",
        gke="tpu-v5-lite-podslice",
        base="v2-alpha-tpuv5-lite",
        image=_BASE_IMAGE,
        topologies=_FLAT,
        one_host=8,
    ),
    "v5p": Generation(
        cores=2,
        counts_cores=True,
        api="v5p-",
        machine="ct5p-hightpu-",
        gke="tpu-v5p-slice",
        base="v2-alpha-tpuv5",
        image=_BASE_IMAGE,
        topologies=f"2x2x1 2x2x2 2x2x4 2x4x4 {_CUBES} 16x16x16 16x16x24",
    ),
    "v6e": Generation(
        cores=1,
        api="v6e-",
        machine="ct6e-standard-",
        gke="tpu-v6e-slice",
        base="v2-alpha-tpuv6e",
        image=_BASE_IMAGE,
        topologies=_FLAT,
        one_host=8,
        disk="hyperdisk-balanced",
    ),
    "tpu7x": Generation(
        cores=2,
        counts_cores=True,
        machine="tpu7x-standard-",
        gke="tpu7x",
        image="ubuntu-accel-2404-amd64-tpu-tpu7x",
        topologies="1x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16",
        disk="hyperdisk-balanced",
    ),
}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "tpu7x", "7x": "tpu7x"}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice.

    Attributes:
        name: like 'v5e-16'.
        generation: key of `GENERATIONS`.
        topology: chips along each axis of the torus, '4x4'.
        chips, cores, hosts: how many; cores are TensorCores.
        chips_per_host: of each host.
        accelerator_type: its name in the Cloud TPU API, 'v5litepod-16'; '' if that API does not have it.
        machine_type: of Compute Engine and GKE, 'ct5lp-hightpu-4t'; '' if they do not have it.
        backends: names of the back ends that serve it.
    """

    name: str
    generation: str
    topology: str
    chips: int
    cores: int
    hosts: int
    chips_per_host: int
    accelerator_type: str
    machine_type: str
    backends: tuple

    @property
    def kind(self):
        """Its `Generation`."""
        return GENERATIONS[self.generation]


def _slice(name, generation, topology):
    kind = GENERATIONS[generation]
    chips = math.prod(int(side) for side in topology.split("x"))
    hosts = 1 if chips <= kind.one_host else chips // 4
    number = chips * kind.cores if kind.counts_cores else chips
    per_host = chips // hosts
    served = {QUEUED: kind.api, COMPUTE: kind.image, GKE: kind.gke}
    return Slice(
        name=f"{name}-{number}",
        generation=generation,
        topology=topology,
        chips=chips,
        cores=chips * kind.cores,
        hosts=hosts,
        chips_per_host=per_host,
        accelerator_type=f"{kind.api}{number}" if kind.api else "",
        machine_type=f"{kind.machine}{per_host}t" if kind.machine else "",
        backends=tuple(backend for backend in BACKENDS if served[backend]),
    )


SLICES = {
    slice_.name: slice_
    for generation, kind in GENERATIONS.items()
    for slice_ in (_slice(generation, generation, topology) for topology in kind.topologies.split())
}


def find_slice(name, backend=None):
    """A `Slice`.

    Args:
        name: like 'v5e-16', 'v5litepod-16' or, with a topology, 'v5e-4x4'.
        backend: name of the back end that must serve it, or None.

    Raises:
        InputError: no such slice, with the nearest name, or the back end does not serve it.

    >>> find_slice("v5e-16").hosts, find_slice("v4-32").topology, find_slice("tpu7x-2x2x1").name
    (4, '2x2x4', 'tpu7x-8')
    """
    generation, _, size = name.strip().lower().rpartition("-")
    generation = _ALIASES.get(generation, generation)
    by_topology = [s for s in SLICES.values() if (s.generation, s.topology) == (generation, size)]
    found = by_topology[0] if by_topology else SLICES.get(f"{generation}-{size}")
    if found is None:
        raise InputError(f"--slice={name}: no such slice{_nearest(generation, size)}; for example {_some(generation)}")
    if backend and backend not in found.backends:
        served = " or ".join(f"--backend={other}" for other in found.backends)
        raise InputError(f"--slice={name}: --backend={backend} does not serve {found.generation}; use {served}")
    return found


def _nearest(generation, size):
    """The slice of this generation whose number is nearest, or the nearest name."""
    own = [s for s in SLICES.values() if s.generation == generation]
    if own and size.isdigit() and int(size):
        number = int(size)
        best = min(own, key=lambda s: abs(math.log(int(s.name.rpartition("-")[2]) / number)))
        return f" (did you mean {best.name!r}?)"
    return nearest(f"{generation}-{size}", SLICES)


def _some(generation):
    names = [s.name for s in SLICES.values() if s.generation == generation] or ["v4-32", "v5e-16", "v5p-32", "v6e-16"]
    return ", ".join(names)


# === Software ===


def tensorflow_of(runtime):
    """(major, minor, patch) of the TensorFlow in a TPU software version, or None if it has no TensorFlow.

    >>> tensorflow_of("tpu-vm-tf-2.18.0-pod-pjrt"), tensorflow_of("v2-alpha-tpuv6e")
    ((2, 18, 0), None)
    """
    found = re.match(r"tpu-vm-tf-(\d+)\.(\d+)\.(\d+)", runtime)
    return tuple(map(int, found.groups())) if found else None


def default_runtime(slice_):
    """TPU software version of a slice of the Cloud TPU API."""
    return f"tpu-vm-tf-{TENSORFLOW_RUNTIME}{'-pod' if slice_.hosts > 1 else ''}-pjrt"


def supported_runtimes(slice_):
    """TPU software versions that axial runs on: with TensorFlow, and without, where axial installs its own."""
    return default_runtime(slice_), slice_.kind.base


def check_runtime(slice_, runtime):
    """Raises InputError if a TPU software version does not fit a slice or axial."""
    where = f"--runtime={runtime}"
    expected = " or ".join(supported_runtimes(slice_))
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{2,62}", runtime):
        raise InputError(f"{where}: not the name of a TPU software version; expected {expected} ({RUNTIMES_PAGE})")
    version = tensorflow_of(runtime)
    if version is None:
        if runtime.startswith("tpu-vm-tf"):
            raise InputError(f"{where}: expected tpu-vm-tf-x.y.z[-pod]-pjrt, as in {expected} ({RUNTIMES_PAGE})")
        return
    if not OLDEST_TENSORFLOW <= version[:2] <= NEWEST_TENSORFLOW:
        oldest, newest = (".".join(map(str, v)) for v in (OLDEST_TENSORFLOW, NEWEST_TENSORFLOW))
        raise InputError(f"{where}: axial runs on TensorFlow {oldest} to {newest}; expected {expected}")
    if ("-pod" in runtime) != (slice_.hosts > 1):
        hosts = f"{slice_.hosts} host{'s' if slice_.hosts > 1 else ''}"
        raise InputError(f"{where}: {slice_.name} has {hosts}; expected {expected}")
    if not runtime.endswith("-pjrt"):
        raise InputError(f"{where}: expected a name that ends in -pjrt, as in {expected} ({RUNTIMES_PAGE})")
