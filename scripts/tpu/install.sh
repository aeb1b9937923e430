#!/usr/bin/env bash
# Installs axial on a TPU VM, for the Python that runs as `python3` (a virtual environment is best).
#
# On TPUs the package tensorflow-tpu replaces tensorflow. Packages that depend on tensorflow are therefore installed
# without their dependencies. Otherwise pip would install tensorflow too.
set -euo pipefail
cd "$(dirname "$0")/../.."
install() { python3 -m pip install --disable-pip-version-check "$@"; }
install tensorflow-tpu==2.20.0 libtpu==0.0.14
install --no-deps "tf-keras>=2.20.1,<2.21" "tensorflow-text>=2.20,<2.21" "tf-models-official>=2.20.0,<2.21" \
  tensorflow-hub tensorflow-model-optimization "tf-slim>=1.1.0" .
python3 - >/tmp/axial-requirements.$$ <<'END'
# The requirements of axial and tf-models-official, except for packages that depend on tensorflow.
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
# cloud-tpu-client pins a package that needs a protobuf too old for TensorFlow. It works without these dependencies.
install --no-deps cloud-tpu-client oauth2client
axial-doctor
