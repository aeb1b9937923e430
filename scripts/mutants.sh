#!/usr/bin/env bash
# Mutation testing: makes one change at a time in axial/io, the metrics, the losses, the grouping or the TFRecords, and
# checks that a test of the changed module fails. tests/mutants.py defines the changes and the tests.
#
#   scripts/mutants.sh                       300 mutants; prints the score and the survivors
#   scripts/mutants.sh --sample=40 --seed=1  other mutants, drawn with that seed
#
# The script changes a copy of the tree in build/mutants. The virtual environment is build/venv-mutants, 3 GB;
# AXIAL_VENV replaces build/venv in this name.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
export AXIAL_VENV=${AXIAL_VENV:-$PWD/build/venv}-mutants
prepare dev
pip install --quiet cosmic-ray==8.7.0
exec python tests/mutants.py "$@"
