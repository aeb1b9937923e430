# shellcheck shell=bash
# demo.sh and test.sh source this file. It makes the virtual environment once and puts its commands on the path.
#
#   prepare [EXTRA]     AXIAL_VENV names the folder; the default is .venv

prepare() {
  local extra=${1:-} venv=${AXIAL_VENV:-$PWD/.venv} python wanted
  local suits='import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
  if [ ! -x "$venv/bin/pip" ]; then
    for python in python3.11 python3.12 python3.13 python3 python ""; do
      [ -n "$python" ] && "$python" -c "$suits" 2>/dev/null && break
    done
    if [ -z "$python" ]; then
      echo "axial needs Python 3.11, 3.12 or 3.13 with its venv module (Debian: apt install python3-venv)" >&2
      exit 2
    fi
    rm -rf "$venv"
    "$python" -m venv "$venv"
  fi
  export PATH=$venv/bin:$PATH
  unset PYTHONPATH
  wanted="$PWD $(cksum <setup.py)"
  if [ "$(cat "$venv/axial-installed$extra" 2>/dev/null)" != "$wanted" ]; then
    echo "installing axial into $venv: about 3 GB, a few minutes"
    pip install --disable-pip-version-check --editable ".${extra:+[$extra]}"
    echo "$wanted" >"$venv/axial-installed$extra"
  fi
}
