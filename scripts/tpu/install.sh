#!/usr/bin/env bash
# Installs axial on a TPU VM, for the Python that runs as `python3` (a virtual environment is best). The source is the
# checkout around this script or, on the hosts of axial-tpu, the wheel in the folder above scripts.
#
#   scripts/tpu/install.sh             installs for the Python that runs as `python3`
#   AXIAL_VENV=venv install.sh         installs into a virtual environment, and makes it if it is missing
#   AXIAL_PRINT=1 install.sh           prints the pip commands and runs none
#
# Images tpu-vm-tf-x.y.z have a TensorFlow that is built for their TPU runtime: the script keeps it, and installs the
# tf-keras and tf-models-official of that version. On images without TensorFlow the script installs tensorflow-tpu and,
# on Python 3.11 and later, the jax and the libtpu of axial's Pallas kernels. On Ubuntu 22.04 images without TensorFlow,
# whose Python is 3.10, it makes the virtual environment with Python 3.11, which apt installs.
#
# In all cases packages that depend on tensorflow are installed without their dependencies. Otherwise pip would install
# tensorflow too.
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/tpu/venv.sh

# Prints the TensorFlow of `python3`, like 'tensorflow 2.18.1' or 'tensorflow-tpu 2.20.0', or nothing without one.
find_tensorflow() {
  python3 - <<'END'
import importlib.metadata

for name in ("tensorflow-tpu", "tensorflow"):
    try:
        print(name, importlib.metadata.version(name))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
END
}

# These run commands as root. apt waits 600 seconds for its lock: a machine that has just booted may update itself.
as_root() { if [[ $EUID == 0 ]]; then "$@"; else sudo "$@"; fi; }
apt() { as_root apt-get -q -o DPkg::Lock::Timeout=600 "$@"; }

make_venv() {
  claim_venv "$1"
  if [[ ! $(find_tensorflow) && $(. /etc/os-release && echo "$ID $VERSION_ID") == "ubuntu 22.04" ]]; then
    apt update && apt install -y python3.11-venv
    python3.11 -m venv "$1"
    return
  fi
  # Images of Ubuntu may lack ensurepip, which Debian has put into a package of its own.
  python3 -m venv --system-site-packages "$1" || {
    apt update && apt install -y python3-venv
    python3 -m venv --system-site-packages "$1"
  }
}

if [[ ${AXIAL_VENV:-} ]]; then
  [[ -x $AXIAL_VENV/bin/pip ]] || make_venv "$AXIAL_VENV"
  PATH=$(realpath -m "$AXIAL_VENV")/bin:$PATH
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

found=$(find_tensorflow)
version=${found##* }
install "pip>=25" # pip 23, which Ubuntu's Python 3.10 has, takes hours to find package versions that fit together
if [[ ! $found ]]; then
  version=2.20.0 of_tpu=(libtpu==0.0.14)
  if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then of_tpu=(libtpu==0.0.24 jax==0.7.2); fi
  install "tensorflow-tpu==$version" "${of_tpu[@]}"
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
[[ ${AXIAL_PRINT:-} ]] || forget_axial
rm -rf build/lib # setuptools would install the files of an earlier version that are left there
axial=$(compgen -G 'axial_deeplab_tf-*.whl' || echo .)
install --no-deps "tf-keras>=2.$minor.0,<2.$((minor + 1))" "tensorflow-text>=2.$minor.0,<2.$((minor + 1))" \
  "tf-models-official>=$models,<2.$((minor + 1))" tensorflow-hub tensorflow-model-optimization "tf-slim>=1.1.0" "$axial"
if [[ ${AXIAL_PRINT:-} ]]; then
  exit
fi

requirements=$(mktemp)
python3 - >"$requirements" <<'END'
# Prints the requirements of axial and tf-models-official, except for packages that depend on tensorflow. Then it prints
# TensorFlow's own requirements on numpy and protobuf.
import importlib.metadata
import re

WITHOUT = r"tensorflow($|[^-])|tensorflow-(text|hub|model-optimization)|tf[-_](keras|slim|models)|"
WITHOUT += "ai-edge-litert|oauth2client|kaggle"
for package in ("axial-deeplab-tf", "tf-models-official"):
    for requirement in importlib.metadata.requires(package):
        if "extra ==" not in requirement and not re.match(WITHOUT, requirement):
            print(requirement)
# The versions of numpy and protobuf must still fit the installed TensorFlow.
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
install --no-deps cloud-tpu-client oauth2client rsa
axial-doctor --step || true # its last line names the fault; --step fails if the TPU runtime's process holds the TPU
python3 -c 'import axial, tensorflow, tf_keras, official; print("installed", axial.__version__, tensorflow.__version__)'
