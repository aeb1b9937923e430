"""The task that axial writes for SkyPilot has only fields of SkyPilot's schema."""

import re
import subprocess
import time

import pytest
import yaml

from axial import slices
from axial.cloud import runs
from axial.cloud.engines import Request, SkyPilot
from axial.errors import InputError

WHEEL = "gs://b/axial_deeplab_tf-1.0-py3-none-any.whl"
# Field names in get_task_schema and get_resources_schema of SkyPilot 0.11.2, sky/utils/schemas.py. 0.14.1 has them too.
# SkyPilot's clients accept unknown names below job_recovery, because a plugin of the server may have added them.
TASK = "name workdir num_nodes resources file_mounts setup run envs secrets config volumes".split()
RESOURCES = (
    "accelerators accelerator_args any_of autostop cloud cpus disk_size disk_tier image_id infra instance_type "
    "job_recovery labels memory network_tier ordered ports priority region use_spot volumes zone"
).split()
ACCELERATOR_ARGS = "runtime_version tpu_name tpu_vm gcp_queued_resource".split()
JOB_RECOVERY = "strategy max_restarts_on_errors recover_on_exit_codes".split()


def engine(name="v5e-16", **more):
    return SkyPilot(Request("run", slice=slices.find_slice(name), zone="us-west4-a", wheel=WHEEL, **more))


def task(name="v5e-16", **more):
    made = engine(name, **more)
    values = {"name": "run", "arguments": ["--a"], "model_dir": "gs://b/run", "deadline": time.time() + 3600}
    run = runs.Run(**values, **made.run_options())
    return yaml.safe_load(made.text(run))


@pytest.mark.parametrize("name, spot", [("v5e-16", True), ("v6e-8", False), ("v3-32", False)])
def test_all_names_are_those_of_the_schema(name, spot):
    made = task(name, provisioning="spot" if spot else "on_demand")
    resources = made["resources"]
    assert made.keys() <= {*TASK} and resources.keys() <= {*RESOURCES}
    assert resources["accelerator_args"].keys() <= {*ACCELERATOR_ARGS}
    assert resources["job_recovery"].keys() <= {*JOB_RECOVERY}
    assert made["resources"]["job_recovery"] == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [42]}
    assert made["resources"]["accelerators"] == f"tpu-{slices.find_slice(name).accelerator_type}:1"
    assert made["resources"]["use_spot"] == spot and made["resources"]["infra"] == "gcp/us-west4/us-west4-a"
    assert re.match("tpu-vm-tf-", made["resources"]["accelerator_args"]["runtime_version"])


def test_where_the_servers_are_those_of_the_image():
    assert not engine().run_options()["own_server"] and not engine().kernels
    with_kernels = engine(runtime="v2-alpha-tpuv5-lite")
    assert with_kernels.run_options() == {"hosts": 4, "generation": "v5e"} and with_kernels.kernels
    environment = engine("v5e-8").run_options()["environment"]
    assert environment["TF_PLUGGABLE_DEVICE_LIBRARY_PATH"] == "/lib/libtpu.so"


def test_the_commands_on_a_host_are_those_of_bash():
    made = task()
    for text in (made["setup"], made["run"]):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert made["run"].endswith("exec python3 -m axial.cloud.supervisor\n")


def test_a_wheel_that_it_cannot_install():
    with pytest.raises(InputError, match="--wheel=gs://b/axial.whl: expected gs://BUCKET/axial_deeplab_tf-VERSION"):
        SkyPilot(Request("run", wheel="gs://b/axial.whl"))


# Output of `sky jobs queue` in SkyPilot 0.11.2, as format_job_table of sky/jobs/utils.py writes it.
TABLE = """Fetching managed job statuses...
ID  TASK  NAME  REQUESTED  SUBMITTED  TOT. DURATION  JOB DURATION  #RECOVERIES  STATUS
3   -     run   1x[tpu-v5litepod-16:1]  1 hr ago  1h  50m  2  RUNNING
2   -     other 1x[tpu-v5litepod-16:1]  2 hrs ago  1h  50m  0  SUCCEEDED
1   -     done  1x[tpu-v5litepod-16:1]  2 hrs ago  1h  50m  0  FAILED_SETUP
"""


def test_states():
    line, costs = SkyPilot(Request("run")).describe(TABLE)
    assert line.startswith("3 - run") and line.endswith("2 RUNNING") and costs
    assert not SkyPilot(Request("other")).describe(TABLE)[1] and not SkyPilot(Request("done")).describe(TABLE)[1]
    with pytest.raises(InputError, match="--name=none: SkyPilot has no such run"):
        SkyPilot(Request("none")).describe(TABLE)


def test_a_name_in_use_and_an_old_version():
    (_, check_version), (_, check_name) = engine().checks()
    check_version("skypilot, version 0.11.2\n")
    with pytest.raises(
        InputError, match="0.11.1 is installed, 0.11.2 or later is needed: in an environment of its own"
    ):
        check_version("skypilot, version 0.11.1\n")
    with pytest.raises(InputError, match="--name=run: is in use; axial-tpu delete --engine=skypilot --name=run"):
        check_name(TABLE)
    check_name(TABLE.replace("run ", "xyz "))
