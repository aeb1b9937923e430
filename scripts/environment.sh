# shellcheck shell=bash
# demo.sh, test.sh and matrix.sh source this file.
#
#   prepare [EXTRA]             makes a virtual environment with axial and that extra, unless it exists, and puts its
#                               commands on the PATH. AXIAL_VENV names its folder; the default is .venv.
#                               AXIAL_LOCKED=1 installs the versions of requirements.lock, whose hashes pip checks.
#   make_venv FOLDER PYTHON...  makes an empty virtual environment, unless it exists, with the first of these Pythons
#                               that is installed. It deletes only the files of an earlier, unfinished call.
source scripts/tpu/venv.sh

make_venv() {
  local venv=$1 python
  local suits='import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'
  shift
  [ ! -x "$venv/bin/pip" ] || return 0
  claim_venv "$venv"
  for python in "$@" python3 python ""; do
    [ -n "$python" ] && "$python" -c "$suits" 2>/dev/null && break
  done
  if [ -z "$python" ]; then
    echo "axial needs Python 3.10 to 3.13 with its venv module (Debian: apt install python3-venv)" >&2
    exit 2
  fi
  find "$venv/" -mindepth 1 -maxdepth 1 ! -name axial-venv -exec rm -rf {} +
  "$python" -m venv "$venv"
}

prepare() {
  local extra=${1:-} venv=${AXIAL_VENV:-$PWD/.venv} files=(setup.py) stamp
  [ "${AXIAL_LOCKED:-0}" != 1 ] || files+=(requirements.lock)
  make_venv "$venv" python3.11 python3.12 python3.13 python3.10
  export PATH=$venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
  unset PYTHONPATH
  stamp="$PWD $(cat "${files[@]}" | cksum)"
  if [ "$(cat "$venv/axial-installed$extra" 2>/dev/null)" != "$stamp" ]; then
    echo "installing axial into $venv: about 3 GB, a few minutes"
    forget_axial
    if [ "${AXIAL_LOCKED:-0}" = 1 ]; then
      pip install --require-hashes --requirement requirements.lock
      pip install --no-deps --no-build-isolation --editable .
    else
      pip install --editable ".${extra:+[$extra]}"
    fi
    echo "$stamp" >"$venv/axial-installed$extra"
  fi
}
