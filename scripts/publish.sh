#!/usr/bin/env bash
# Publishes weights of the zoo on Hugging Face's hub, and builds and checks axial's wheel. For the owner of the project.
#
#   scripts/publish.sh --name=NAME --folder=FOLDER [--data_dir=DATA] [--repository=OWNER/REPO]    see scripts/publish.py
#   scripts/publish.sh                                                                  only the wheel, build/*.whl
set -euo pipefail
here=$(realpath "$(dirname "$0")/..")
cd "$here"
source scripts/environment.sh
prepare publish
cd "$OLDPWD"
[ $# -eq 0 ] || python "$here/scripts/publish.py" "$@"
rm -f "$here"/build/*.whl
python -m build --wheel --outdir "$here/build" "$here"
twine check --strict "$here"/build/*.whl
