#!/usr/bin/env bash
# Installs axial with what its tests need into .venv, then runs the tests.
#
#   scripts/test.sh                       the default suite, under 15 minutes on 2 cores
#   scripts/test.sh -m "slow or not slow" all of it: every registered model at every size
#   scripts/test.sh tests/layers          arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
prepare dev
exec python -m pytest --durations=10 "$@"
