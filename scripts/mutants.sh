#!/usr/bin/env bash
# Mutation testing: makes one change in axial/io, the metrics, the losses, the grouping or the TFRecords at a time, and
# checks that a test of that module fails. tests/mutants.py says which changes and which tests.
#
#   scripts/mutants.sh                       300 mutants; prints the score and the survivors
#   scripts/mutants.sh --sample=40 --seed=1  other mutants, drawn with that seed
#
# It changes a copy of the tree in build/mutants. The environment is build/venv-mutants, 3 GB; AXIAL_VENV replaces
# build/venv in this name.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
export AXIAL_VENV=${AXIAL_VENV:-$PWD/build/venv}-mutants
prepare dev
pip install --quiet cosmic-ray==8.7.0
exec python tests/mutants.py "$@"
