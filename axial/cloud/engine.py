"""What every engine is: one file that turns a request and a `Run` into YAML or a script, and names its tool's commands.

An engine lives in the cloud: it makes the slice, starts the supervisors, starts them again where `runs` says so, and
takes the slice away at the end. The tool on this machine only hands over and asks.
"""

import dataclasses
import math
import re
import shlex
import subprocess

import yaml

from axial import slices
from axial.errors import InputError

MARGIN = 600.0  # seconds after the deadline at which an engine itself ends what the supervisors have not ended
PATH = 'export PATH="$HOME/axial/venv/bin:$PATH"'  # of what is installed on a VM
WHEEL = r"gs://[^/]+/(.+/)?axial_deeplab_tf-[\w.]+-py3-none-any\.whl"  # as scripts/tpu/install.sh looks for it


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user wants of an engine: the flags of axial-tpu, which say what each is. `slice` is a `Slice`, or None."""

    name: str
    slice: slices.Slice | None = None
    provisioning: str = "on_demand"
    namespace: str = "default"
    reservation: str = ""
    project: str = ""
    zone: str = ""
    runtime: str = ""
    wheel: str = ""
    service_account: str = ""
    network: str = ""
    subnetwork: str = ""
    context: str = ""
    queue: str = ""


class Engine:
    """An engine and what is wanted of it. Each has, beside what is here:

    body(run): of the YAML of a `Run`, or text(run): a script.
    launch(path, run): arguments of the command that hands over this text as the file `path`.
    status(): arguments of the command whose output describe(output) turns into (a line, whether it may cost money).
    logs(): arguments of the command that follows the first host's log.
    delete(): arguments of the command that ends the run and takes the slice away.

    Attributes:
        name: of the engine.
        tool: the program of this machine that speaks to it; `install` says how it is had.
        file: name of what it hands over.
        flags: names of the fields of `Request` that it reads; `needs` always, `needs_to_launch` for a launch.
        capacity: what it takes as `provisioning`.
        refusals: pairs of a pattern of what the tool says, and what that means, with fields of the request in braces.
        notes: what a user should know before a launch.
        by_hand: whether a launch is only printed, unless the user says --yes.
        kernels: whether its hosts have what axial's TPU kernels need.
    """

    name = tool = install = file = ""
    flags = needs = needs_to_launch = refusals = notes = ()
    capacity = ("on_demand", "spot")
    by_hand, kernels = False, True

    def __init__(self, request):
        """Raises InputError for a request that the engine cannot serve."""
        self.request = request
        for flag, pattern, expected in (
            ("name", r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", "at most 40 small letters, digits and hyphens"),
            ("zone", r"([a-z]+-[a-z]+\d+-[a-z]\w*)?", "the name of a zone, like us-central2-b"),
            ("wheel", f"({WHEEL})?", "gs://BUCKET/axial_deeplab_tf-VERSION-py3-none-any.whl, of pip wheel --no-deps"),
            ("provisioning", "|".join(self.capacity), f"one of {', '.join(self.capacity)} with --engine={self.name}"),
        ):
            value = getattr(request, flag)
            if not re.fullmatch(pattern, value):
                raise InputError(f"--{flag}={value}: expected {expected}")

    def text(self, run):
        return yaml.safe_dump(self.body(run), sort_keys=False, width=math.inf)

    def checks(self):
        """Pairs of arguments of a command that must succeed before a launch, and a function of its output or None."""
        return []

    def run_options(self):
        """dict of the fields of a `Run` that depend on the slice and its image."""
        return {"hosts": self.request.slice.hosts, "generation": self.request.slice.generation}

    @property
    def region(self):
        return self.request.zone.rpartition("-")[0]

    def not_installed(self):
        return InputError(f"--engine={self.name} needs {self.tool}: {self.install}")

    def explain(self, said):
        """The InputError that the tool's words mean."""
        for pattern, meaning in self.refusals:
            if re.search(pattern, said):
                return InputError(meaning.format(**dataclasses.asdict(self.request)))
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        marked = [line for line in lines if re.match(r"(?i)error", line)]
        return InputError(f"{self.tool}: {(marked or lines or ['no reason given'])[0][:400]}")

    def call(self, arguments):
        """What a command of the tool prints. Raises InputError if it fails, or is not installed."""
        try:
            done = subprocess.run(arguments, check=False, capture_output=True, text=True, errors="replace", input="")
        except FileNotFoundError:
            raise self.not_installed() from None
        if done.returncode:
            raise self.explain(done.stderr + done.stdout)
        return done.stdout


class OnVirtualMachines(Engine):
    """What the engines share whose hosts are TPU VMs: they boot a TPU software version and install a wheel."""

    def __init__(self, request):
        super().__init__(request)
        if request.slice:
            self.runtime = request.runtime or slices.default_runtime(request.slice)
            slices.check_runtime(request.slice, self.runtime)
            self.kernels = slices.tensorflow_of(self.runtime) is None

    def run_options(self):
        # How TensorFlow of Google's images finds the TPU of its own host, by "TensorFlow PJRT support" in
        # https://docs.cloud.google.com/tpu/docs/runtimes. On several hosts they start servers.
        library = {"NEXT_PLUGGABLE_DEVICE_USE_C_API": "true", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": "/lib/libtpu.so"}
        of_image = {"own_server": False} if self.request.slice.hosts > 1 else {"environment": library}
        return super().run_options() | ({} if self.kernels else of_image)

    def installation(self):
        """Shell commands that install the wheel in ~/axial/venv, once, and make it the Python that runs."""
        return f"""mkdir -p ~/axial && cd ~/axial
if [ ! -e installed ]; then
  gcloud storage cp {shlex.quote(self.request.wheel)} .
  rm -rf files && python3 -m zipfile -e axial_deeplab_tf-*.whl files
  mkdir -p scripts && cp -r files/axial/scripts/tpu scripts/
  AXIAL_VENV=venv bash scripts/tpu/install.sh
  touch installed
fi
{PATH}
"""
