"""By hand: a queued resource of the Cloud TPU API whose hosts delete it. It does not recover a preempted slice.

The start-up script of every host installs axial, runs the supervisor, again after exit code 42, and deletes the queued
resource with its node at the end and at the deadline, whatever hangs. It runs at every boot: it goes on, or deletes.
Flags: https://docs.cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources/create and delete. Metadata of a
host: jax/_src/clusters/cloud_tpu_cluster.py of jax 0.10.
"""

import datetime
import shlex

from axial.cloud import runs
from axial.cloud.engine import MARGIN, OnVirtualMachines


class Gcloud(OnVirtualMachines):
    """See the module."""

    name, tool, file = "gcloud", "gcloud", "startup.sh"
    install = "https://docs.cloud.google.com/sdk/docs/install"
    flags = ("project", "zone", "runtime", "wheel", "service_account", "network", "subnetwork")
    needs, needs_to_launch = ("project", "zone"), ("wheel",)
    capacity = ("on_demand", "spot", "reserved")
    by_hand = True
    notes = (
        "this engine does not recover a preempted slice; the same command goes on from the checkpoint",
        "the hosts delete their slice by themselves; their service account needs the role roles/tpu.admin",
    )
    # Of gcloud's googlecloudsdk/calliope/exceptions and the codes of the API, google/rpc/code.proto.
    refusals = (
        (r"ALREADY_EXISTS|already exists", "--name={name}: is in use; axial-tpu delete --engine=gcloud frees it"),
        (r"NOT_FOUND", "--name={name}: there is no such queued resource in {zone}"),
        (r"(?i)active account|reauth|credentials|UNAUTHENTICATED", "no credentials: gcloud auth login"),
    )

    def _command(self, group, verb, *words):
        place = [f"--project={self.request.project}", f"--zone={self.request.zone}"]
        return ["gcloud", "compute", "tpus", group, verb, self.request.name, *place, *words]

    def text(self, run):
        end = round(run.deadline + MARGIN)
        several = """  meta() {
    curl -fsS -H "Metadata-Flavor: Google" "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
  }
  AXIAL_HOST=$(meta agent-worker-number)
  AXIAL_HOSTS=$(meta worker-network-endpoints | tr , "\\n" | cut -d: -f3 | paste -sd, -)
  export AXIAL_HOST AXIAL_HOSTS
"""
        installation = "".join(f"  {line}\n" for line in self.installation().splitlines())
        return f"""#!/bin/bash
# Made by axial-tpu launch --engine=gcloud. Every boot of every host runs it.
export HOME=/root PATH="/snap/bin:$PATH"
export {runs.VARIABLE}={shlex.quote(run.to_json())}
work() {{
  set -e
{installation}{several if run.hosts > 1 else ""}  while :; do
    {runs.SUPERVISOR} && exit 0 || code=$?
    if [ "$code" != {runs.PREEMPTED} ]; then exit "$code"; fi
    sleep 30
  done
}}
export -f work
left=$(({end} - $(date +%s)))
if [ "$left" -gt 0 ]; then
  timeout --kill-after=60 "$left" bash -c work
fi
echo "axial-tpu: ended with $?; the slice is deleted"
until {shlex.join(self.delete())}; do sleep 60; done
"""

    def launch(self, path, run):
        until = datetime.datetime.fromtimestamp(run.deadline, datetime.timezone.utc)
        kinds = {"spot": ["--spot"], "reserved": ["--reserved"]}
        own = [f"--{name.replace('_', '-')}={getattr(self.request, name)}" for name in self.flags[4:]]
        return self._command(
            *("queued-resources", "create", f"--node-id={self.request.name}", f"--runtime-version={self.runtime}"),
            *(f"--accelerator-type={self.request.slice.accelerator_type}", *kinds.get(self.request.provisioning, ())),
            *(f"--metadata-from-file=startup-script={path}", f"--labels=axial-run={self.request.name}", "--async"),
            *(
                "--scopes=https://www.googleapis.com/auth/cloud-platform",
                f"--valid-until-time={until:%Y-%m-%dT%H:%M:%SZ}",
            ),
            *(word for word in own if not word.endswith("=")),
        )

    def status(self):
        return self._command("queued-resources", "describe", "--format=value(state.state)")

    def describe(self, output):
        state = output.strip() or "unknown"
        return state.lower(), state not in ("FAILED", "DELETING")

    def logs(self):
        journal = "sudo journalctl --follow --lines=all --output=cat --unit=google-startup-scripts"
        return self._command("tpu-vm", "ssh", "--worker=0", f"--command={journal}")

    def delete(self):
        return self._command("queued-resources", "delete", "--force", "--async", "--quiet")
