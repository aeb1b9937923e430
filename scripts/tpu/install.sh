#!/usr/bin/env bash
# Installs axial on a TPU VM, for the Python that runs as `python3` (a virtual environment is best): the checkout around
# this script or, where axial-tpu has sent one, the wheel.
#
#   scripts/tpu/install.sh             into the Python that runs
#   AXIAL_VENV=venv install.sh         into a virtual environment, made here if it is missing; the image's packages stay
#   AXIAL_PRINT=1 install.sh           prints the pip commands and runs none
#
# Images tpu-vm-tf-x.y.z have a TensorFlow that is built for their TPU runtime: it stays, and axial gets the tf-keras
# and tf-models-official of that version. On other images the package tensorflow-tpu replaces tensorflow. In both cases
# packages that depend on tensorflow are installed without their dependencies. Otherwise pip would install tensorflow
# too.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ ${AXIAL_VENV:-} ]]; then
  if [[ ! -x $AXIAL_VENV/bin/python3 ]]; then
    # Images of Ubuntu may lack ensurepip, which Debian has put into a package of its own.
    python3 -m venv --system-site-packages "$AXIAL_VENV" || {
      sudo apt-get update -q && sudo apt-get install -y -q python3-venv
      python3 -m venv --system-site-packages "$AXIAL_VENV"
    }
  fi
  PATH=$PWD/$AXIAL_VENV/bin:$PATH
fi
python3 -c 'import sys; assert (3, 10) <= sys.version_info < (3, 14), sys.version' || {
  echo "install.sh: axial runs on Python 3.10 to 3.13" >&2
  exit 2
}

install() {
  if [[ ${AXIAL_PRINT:-} ]]; then
    echo "pip install $*"
  else
    python3 -m pip install --disable-pip-version-check "$@"
  fi
}

# 'tensorflow 2.18.1' or 'tensorflow-tpu 2.20.0' of the image, or nothing.
found=$(python3 - <<'END'
import importlib.metadata

for name in ("tensorflow-tpu", "tensorflow"):
    try:
        print(name, importlib.metadata.version(name))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
END
)
version=${found##* }
install "pip>=25" # pip 23, of Ubuntu's Python 3.10, searches for fitting versions of all packages for hours
if [[ ! $found ]]; then
  version=2.20.0
  install "tensorflow-tpu==$version" libtpu==0.0.14
fi
minor=$(cut -d. -f2 <<<"$version")
case $version in
2.18.*) models=2.18.0 ;;
2.19.*) models=2.19.0 ;;
2.20.*) models=2.20.0 ;;
*)
  echo "install.sh: the image has $found; axial runs on TensorFlow 2.18 to 2.20: take another TPU software version" >&2
  exit 2
  ;;
esac
axial=$(compgen -G 'axial-*.whl' || echo .)
install --no-deps "tf-keras>=2.$minor.0,<2.$((minor + 1))" "tensorflow-text>=2.$minor.0,<2.$((minor + 1))" \
  "tf-models-official>=$models,<2.$((minor + 1))" tensorflow-hub tensorflow-model-optimization "tf-slim>=1.1.0" "$axial"
if [[ ${AXIAL_PRINT:-} ]]; then
  exit
fi

requirements=$(mktemp)
python3 - >"$requirements" <<'END'
# The requirements of axial and tf-models-official, except for packages that depend on tensorflow, and for TensorFlow's
# own protobuf and numpy, which it asks for itself.
import importlib.metadata
import re

WITHOUT = r"tensorflow($|[^-])|tensorflow-(text|hub|model-optimization)|tf[-_](keras|slim|models)|"
WITHOUT += "ai-edge-litert|oauth2client|kaggle"
for package in ("axial", "tf-models-official"):
    for requirement in importlib.metadata.requires(package):
        if "extra ==" not in requirement and not re.match(WITHOUT, requirement):
            print(requirement)
# What is there of TensorFlow's needs must stay as TensorFlow needs it.
for package in ("tensorflow", "tensorflow-tpu"):
    try:
        needs = importlib.metadata.requires(package)
    except importlib.metadata.PackageNotFoundError:
        continue
    for requirement in needs:
        if "extra ==" not in requirement and re.match("(numpy|protobuf)", requirement):
            print(requirement)
END
install -r "$requirements"
rm "$requirements"
# cloud-tpu-client pins a package that needs a protobuf too old for TensorFlow. It works without these dependencies.
install --no-deps cloud-tpu-client oauth2client
axial-doctor || true # its last line says what is wrong; a check that needs the TPU fails where the runtime holds it
python3 -c 'import axial, tensorflow, tf_keras, official; print("installed", axial.__version__, tensorflow.__version__)'
