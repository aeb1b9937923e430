"""What a machine of Google Cloud says about itself: the TPU it is part of and the software that it has booted."""

import contextlib
import os
import re
import urllib.request

HOST_VARIABLE = "GCE_METADATA_HOST"  # as google-auth and TensorFlow read it
PRODUCT_FILE = "/sys/class/dmi/id/product_name"


def tpu_environment(timeout=2.0):
    """dict of the variables of the attribute tpu-env, of a TPU VM; {} on another machine.

    Known names: ACCELERATOR_TYPE, RUNTIME_VERSION, WORKER_ID, NODE_ID, ZONE, TYPE, TOPOLOGY.
    """
    text = attribute("tpu-env", timeout)
    return dict(re.findall(r"^(\w+): '(.*)'$", text or "", re.MULTILINE))


def attribute(name, timeout=2.0):
    """An attribute of this machine, or None on a machine that has none or is not of Google Cloud."""
    if not _on_google_cloud():
        return None
    host = os.environ.get(HOST_VARIABLE, "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/attributes/{name}", headers={"Metadata-Flavor": "Google"}
    )
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.read(2**16).decode(errors="replace")
    return None


def _on_google_cloud():
    """Whether there is a metadata server. On other machines a look at its name may take long."""
    if os.environ.get(HOST_VARIABLE):
        return True
    with contextlib.suppress(OSError), open(PRODUCT_FILE, encoding="utf-8") as file:
        return "Google" in file.read()
    return False
