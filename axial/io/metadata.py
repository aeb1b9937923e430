"""Metadata of a Google Cloud machine: its TPU, its booted software, its maintenance events."""

import contextlib
import http.client
import os
import re
import urllib.request

HOST_VARIABLE = "GCE_METADATA_HOST"  # google-auth and TensorFlow read it too
PRODUCT_FILE = "/sys/class/dmi/id/product_name"  # the machine's product name
NOTICES = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}


def tpu_environment():
    """dict of a TPU VM's variables, from its attribute tpu-env; {} on another machine.

    Known names: ACCELERATOR_TYPE, RUNTIME_VERSION, WORKER_ID, NODE_ID, ZONE, TYPE, TOPOLOGY.
    """
    text = instance("attributes/tpu-env")
    return dict(re.findall(r"^(\w+): '(.*)'$", text or "", re.MULTILINE))


def notice():
    """Text of a notice that this virtual machine will be maintained or preempted, or None."""
    for name, value in NOTICES.items():
        if (instance(name) or "").strip() == value:
            return f"{name} {value}"
    return None


def instance(name):
    """A metadata value of this virtual machine as text; None if it is missing or the machine is not Google Cloud's."""
    if not host():
        return None
    url = f"http://{host()}/computeMetadata/v1/instance/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    failures = OSError, http.client.HTTPException
    with contextlib.suppress(*failures), urllib.request.urlopen(request, timeout=2.0) as answer:
        return answer.read(2**16).decode(errors="replace")
    return None


def host():
    """Host of the metadata server, or None outside Google Cloud, where resolving the name may take long."""
    if os.environ.get(HOST_VARIABLE):
        return os.environ[HOST_VARIABLE]
    with contextlib.suppress(OSError), open(PRODUCT_FILE, encoding="utf-8") as file:
        return "metadata.google.internal" if "Google" in file.read() else None
