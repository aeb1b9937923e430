#!/usr/bin/env bash
# Runs a part of the tests twice: with the oldest version that setup.py allows of each dependency, on the oldest Python
# that is there, then with the newest versions, on the newest Python. On Python 3.10, which TPU images have, the tests
# of the kernels are left out: their jax is for Python 3.11.
#
#   scripts/matrix.sh                      both
#   scripts/matrix.sh oldest               one of them: oldest or newest
#   scripts/matrix.sh newest -n 0 tests    further arguments go to pytest, in place of that part of the tests
#
# The environments are build/venv-oldest and build/venv-newest, 3 GB each. AXIAL_VENV replaces build/venv in these
# names. Both environments hold the extra dev, whose jax needs NumPy 2 from Python 3.11 on: only 3.10 tries NumPy 1.26.
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
