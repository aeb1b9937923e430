"""What a machine of Google Cloud says about itself: its TPU, the software that it has booted, its maintenance."""

import contextlib
import http.client
import os
import re
import urllib.request

HOST_VARIABLE = "GCE_METADATA_HOST"  # as google-auth and TensorFlow read it
PRODUCT_FILE = "/sys/class/dmi/id/product_name"  # of the machine's maker
NOTICES = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}


def tpu_environment():
    """dict of the variables of the attribute tpu-env, of a TPU VM; {} on another machine.

    Known names: ACCELERATOR_TYPE, RUNTIME_VERSION, WORKER_ID, NODE_ID, ZONE, TYPE, TOPOLOGY.
    """
    text = instance("attributes/tpu-env")
    return dict(re.findall(r"^(\w+): '(.*)'$", text or "", re.MULTILINE))


def notice():
    """The notice of a maintenance or a preemption of this virtual machine, as text, or None."""
    for name, value in NOTICES.items():
        if (instance(name) or "").strip() == value:
            return f"{name} {value}"
    return None


def instance(name):
    """A value about this virtual machine, as text, or None if there is none or the machine is not of Google Cloud."""
    if not host():
        return None
    url = f"http://{host()}/computeMetadata/v1/instance/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with (
        contextlib.suppress(OSError, http.client.HTTPException),
        urllib.request.urlopen(request, timeout=2.0) as answer,
    ):
        return answer.read(2**16).decode(errors="replace")
    return None


def host():
    """Host of the metadata server, or None on another machine, where a look at the server's name may take long."""
    if os.environ.get(HOST_VARIABLE):
        return os.environ[HOST_VARIABLE]
    with contextlib.suppress(OSError), open(PRODUCT_FILE, encoding="utf-8") as file:
        return "metadata.google.internal" if "Google" in file.read() else None
