# shellcheck shell=bash
# environment.sh and install.sh source this file.
#
#   claim_venv FOLDER  makes the folder of a virtual environment, and writes axial-venv as its first file. So a folder
#                      with that file holds only an environment, possibly unfinished, that axial's scripts have made. A
#                      folder with other contents stays as it is: the script prints one line and exits with code 2.
#   forget_axial       uninstalls this package from the environment of `python3` if it is installed under its former
#                      name, axial: the old package would hide a new one of another folder. The package axial of PyPI,
#                      which belongs to another project and has no command axial-train, stays.

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
