# shellcheck shell=bash
# Installs the wheel at the bucket path AXIAL_WHEEL into ~/axial/venv, once, and puts that environment first in PATH.
# axial-tpu puts this text into the script that the hosts of a slice run.
mkdir -p ~/axial && cd ~/axial || exit
if [ ! -e installed ]; then
  gcloud storage cp "$AXIAL_WHEEL" .
  rm -rf files && python3 -m zipfile -e axial_deeplab_tf-*.whl files
  mkdir -p scripts && cp -r files/axial/scripts/tpu scripts/
  AXIAL_VENV=venv bash scripts/tpu/install.sh
  touch installed
fi
export PATH="$HOME/axial/venv/bin:$PATH"
