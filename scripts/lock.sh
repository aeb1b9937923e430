#!/usr/bin/env bash
# Writes requirements.lock anew: the newest versions that setup.py allows, of every package that the extra dev
# needs, for Python 3.11 to 3.13 on every platform, with the hashes of their files.
#
#   pip install uv && scripts/lock.sh
#
# The hashes cover every file in the lock. They do not cover what builds promise, seqeval and typing, which exist as
# sources only: pip takes the newest setuptools for that.
set -euo pipefail
cd "$(dirname "$0")/.."
# uv takes no notice of a package's upper bound on Python. pip does, and refuses the newest version of these two.
printf '%s\n' 'backports.strenum<1.3' 'typing<3.10' |
  UV_CUSTOM_COMPILE_COMMAND="pip install uv && scripts/lock.sh" uv pip compile setup.py --extra dev --constraints - \
    --universal --python-version 3.11 --upgrade --generate-hashes --no-config --default-index https://pypi.org/simple \
    --output-file requirements.lock --quiet
