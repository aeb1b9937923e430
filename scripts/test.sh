#!/usr/bin/env bash
# Installs axial and the packages that its tests need into .venv, then runs the tests.
#
#   scripts/test.sh                             the default suite, 15 to 30 minutes on 2 cores, by their speed
#   scripts/test.sh -n 0 -m "slow or not slow"  all of it: every registered model at every size
#   scripts/test.sh tests/layers                arguments go to pytest
#
# Tests run in two processes, because tracing a model keeps only one core busy. Each process runs one file of tests at a
# time, by name, so that no slow file of few tests is the last. -n 0 runs them in one process: for --pdb, and for slow
# tests, some of which need most of a machine's memory.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
prepare dev
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10 "$@"
