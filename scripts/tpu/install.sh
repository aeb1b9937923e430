#!/usr/bin/env bash
# Installs axial on a TPU VM, into the Python that `python3 -m pip` serves (a virtual environment is best).
#
# TensorFlow for TPUs is a package of its own, tensorflow-tpu, in place of tensorflow. What depends on tensorflow
# must therefore come without its dependencies, or pip brings the other one in beside it.
set -euo pipefail
cd "$(dirname "$0")/../.."
install() { python3 -m pip install --disable-pip-version-check "$@"; }
install tensorflow-tpu==2.20.0 libtpu==0.0.14
install --no-deps "tf-keras>=2.20.1,<2.21" "tensorflow-text>=2.20,<2.21" "tf-models-official>=2.20.0,<2.21" \
  tensorflow-hub tensorflow-model-optimization "tf-slim>=1.1.0" .
python3 - >/tmp/axial-requirements.$$ <<'END'
# What axial and tf-models-official want, but for all that wants tensorflow.
import importlib.metadata
import re

WITHOUT = r"tensorflow($|[^-])|tensorflow-(text|hub|model-optimization)|tf[-_](keras|slim|models)|"
WITHOUT += "ai-edge-litert|oauth2client|kaggle"
for package in ("axial", "tf-models-official"):
    for requirement in importlib.metadata.requires(package):
        if "extra ==" not in requirement and not re.match(WITHOUT, requirement):
            print(requirement)
END
install -r /tmp/axial-requirements.$$
rm /tmp/axial-requirements.$$
# cloud-tpu-client pins a client that pulls in a protobuf too old for TensorFlow; without its pins it works.
install --no-deps cloud-tpu-client oauth2client
axial-doctor
