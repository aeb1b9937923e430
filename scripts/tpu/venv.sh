# shellcheck shell=bash
# environment.sh and install.sh source this file.
#
#   claim_venv FOLDER  makes the folder of a virtual environment, and writes the mark axial-venv before anything else is
#                      in it. So a folder with the mark holds nothing but an environment of axial's scripts, which may
#                      be half-made. A folder that holds something else stays as it is: one line, and exit code 2.
#   forget_axial       uninstalls this package from the Python that runs if it has its name of earlier versions, axial:
#                      the old one would hide a new one of another folder. PyPI's axial, which is another project's and
#                      has no command axial-train, stays.

claim_venv() {
  local venv=$1
  [ ! -f "$venv/axial-venv" ] || return 0
  if [ -x "$venv/bin/python" ]; then
    echo "$venv: an environment without pip; '$venv/bin/python -m ensurepip --default-pip' adds it," \
      "or AXIAL_VENV names another folder" >&2
    exit 2
  fi
  if [ -n "$(ls -A -- "$venv" 2>/dev/null)" ]; then
    echo "$venv: holds what axial's scripts have not made; AXIAL_VENV names another folder, new or empty" >&2
    exit 2
  fi
  mkdir -p -- "$venv"
  echo "An environment of axial's scripts. Without bin/pip they delete what is here, and make it again." \
    >"$venv/axial-venv"
}

forget_axial() {
  if python3 -m pip show --verbose axial 2>/dev/null | grep axial-train >/dev/null; then
    python3 -m pip uninstall --yes axial
  fi
}
