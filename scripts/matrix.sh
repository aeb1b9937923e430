#!/usr/bin/env bash
# Runs some of the tests twice: with the oldest versions of the dependencies that setup.py allows, on the oldest
# installed Python, and with the newest versions on the newest Python. On Python 3.10, the Python of TPU images, pytest
# skips the tests of the Pallas kernels, whose jax needs Python 3.11.
#
#   scripts/matrix.sh                      both runs
#   scripts/matrix.sh oldest               one run: oldest or newest
#   scripts/matrix.sh newest -n 0 tests    passes further arguments to pytest, in place of the default tests
#
# The environments are build/venv-oldest and build/venv-newest, 3 GB each. AXIAL_VENV replaces build/venv in these
# names. Both environments hold the extra dev. From Python 3.11 on, its jax needs NumPy 2: only 3.10 tests NumPy 1.26.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
kinds=(oldest newest) failed=0
if [[ ${1:-} == @(oldest|newest) ]]; then
  kinds=("$1")
  shift
fi
[ $# -gt 0 ] || set -- tests/tasks/segmentation tests/{data,io,layers,metrics,serving}
unset PYTHONPATH
for kind in "${kinds[@]}"; do
  venv=${AXIAL_VENV:-$PWD/build/venv}-$kind
  pythons=(python3.10 python3.11 python3.12 python3.13) resolution=lowest-direct
  [ "$kind" = oldest ] || pythons=(python3.13 python3.12 python3.11 python3.10) resolution=highest
  make_venv "$venv" "${pythons[@]}"
  export PATH=$venv/bin:$PATH
  pip install --disable-pip-version-check --quiet "uv>=0.5,<1"
  forget_axial
  uv pip install --python "$venv/bin/python" --upgrade --resolution "$resolution" --editable ".[dev]"
  python -m pytest -n 2 --dist loadfile --durations=10 "$@" || failed=1
done
exit $failed
