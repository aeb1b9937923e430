#!/usr/bin/env bash
# Installs axial with what its tests need into .venv, then runs the tests.
#
#   scripts/test.sh                             the default suite, under 15 minutes on 2 cores
#   scripts/test.sh -n 0 -m "slow or not slow"  all of it: every registered model at every size
#   scripts/test.sh tests/layers                arguments go to pytest
#
# Two processes, a file of tests each at a time: to trace a model keeps one core busy, not two. With -n 0 one process,
# for --pdb, and for slow tests, some of which need most of a machine's memory.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
prepare dev
exec python -m pytest -n 2 --dist loadfile --durations=10 "$@"
