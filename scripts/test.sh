#!/usr/bin/env bash
# Installs axial and the packages that its tests need into .venv, then runs the tests.
#
#   scripts/test.sh                             the default suite, about 15 minutes on 2 quiet cores
#   scripts/test.sh -n 0 -m "slow or not slow"  all tests: every registered model at every size
#   scripts/test.sh tests/layers                passes arguments to pytest
#
# Tests run in two processes, because tracing a model uses only one core. Each process runs one test file at a time. The
# files are in the order of their names: pytest-xdist's own order would put slow files of few tests last. Use -n 0, a
# single process, for --pdb and for slow tests, some of which need most of a machine's memory.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
prepare dev
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10 "$@"
