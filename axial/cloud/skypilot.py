"""SkyPilot 0.11.2 or later: a managed job on TPU VMs, whose controller lives in the cloud.

It makes the slice again after a preemption, and after exit code 42. Every other code ends the job: the supervisor has
tried by itself what another try may change. Names are those of `sky/utils/schemas.py` of SkyPilot 0.11.2 and 0.14.1.
Clients after 0.11.2 let unknown names below `job_recovery` pass, so a test holds ours to the schema.
"""

import re

from axial.cloud import runs
from axial.cloud.engine import PATH, OnVirtualMachines
from axial.errors import InputError, pip_install

OLDEST = (0, 11, 2)


class SkyPilot(OnVirtualMachines):
    """See the module."""

    name, tool, file = "skypilot", "sky", "task.yaml"
    flags = ("zone", "runtime", "wheel")
    needs_to_launch = ("zone", "wheel")
    # Of sky/client/cli/command.py and sky/exceptions.py of SkyPilot 0.14.1.
    refusals = (
        (r"(?i)no cloud (access|is enabled)|not enabled|sky check", "--engine=skypilot: no credentials: sky check gcp"),
        (r"(?i)no (running )?managed jobs? (with name|found)", "--name={name}: SkyPilot has no such run"),
    )

    @property
    def install(self):
        return f"in an environment of its own, {pip_install('skypilot')}"

    def body(self, run):
        """The task."""
        request = self.request
        resources = {
            "infra": f"gcp/{request.zone.rpartition('-')[0]}/{request.zone}",
            "accelerators": f"tpu-{request.slice.accelerator_type}:1",
            "accelerator_args": {"tpu_vm": True, "runtime_version": self.runtime},
            "use_spot": request.provisioning == "spot",
            "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [runs.PREEMPTED]},
            "labels": {"axial-run": request.name},
        }
        # The hosts of a slice are SkyPilot's nodes: sky/backends/task_codegen.py
        hosts = 'export AXIAL_HOST="$SKYPILOT_NODE_RANK" AXIAL_HOSTS="$SKYPILOT_NODE_IPS"'
        commands = {"setup": f"set -e\n{self.installation()}", "run": f"{PATH}\n{hosts}\nexec {runs.SUPERVISOR}\n"}
        return {"name": request.name, "resources": resources, "envs": {runs.VARIABLE: run.to_json()}, **commands}

    def checks(self):
        return [(["sky", "--version"], self._check_version), (["sky", "jobs", "queue", "-s", "-v"], self._check_name)]

    def _check_version(self, said):
        found = re.search(r"(\d+)\.(\d+)\.(\d+)", said)
        if not found or tuple(map(int, found.groups())) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise InputError(
                f"--engine=skypilot: {said.strip()} is installed, {oldest} or later is needed: {self.install}"
            )

    def _check_name(self, said):
        if self._rows(said):
            name = f"--name={self.request.name}"
            raise InputError(f"{name}: is in use; axial-tpu delete --engine=skypilot {name} frees it")

    def _rows(self, said):
        """The lines of a table of jobs on those of this name."""
        return [line for line in said.splitlines() if self.request.name in line.split()]

    def launch(self, path, run):
        return ["sky", "jobs", "launch", "--yes", "--detach-run", f"--name={self.request.name}", path]

    def status(self):
        return ["sky", "jobs", "queue", "-v"]

    def describe(self, output):
        rows = self._rows(output)
        if not rows:
            raise InputError(f"--name={self.request.name}: SkyPilot has no such run")
        ended = re.search(r"\b(SUCCEEDED|CANCELLED|FAILED\w*)\b", rows[0])
        return " ".join(rows[0].split()), not ended

    def logs(self):
        return ["sky", "jobs", "logs", f"--name={self.request.name}"]

    def delete(self):
        return ["sky", "jobs", "cancel", "--yes", f"--name={self.request.name}"]
