#!/usr/bin/env bash
# Rewrites requirements.lock: for every package that the extra dev needs, the newest version that setup.py allows, for
# Python 3.11 to 3.13 on every platform, with the hashes of its files.
#
#   pip install uv && scripts/lock.sh
#
# The hashes cover every file in the lock. They do not cover setuptools, with which pip builds promise, seqeval and
# typing: these exist as sources only, and pip takes its newest version.
set -euo pipefail
cd "$(dirname "$0")/.."
# uv ignores a package's upper bound on Python. pip does not, and refuses the newest versions of these two.
printf '%s\n' 'backports.strenum<1.3' 'typing<3.10' |
  UV_CUSTOM_COMPILE_COMMAND="pip install uv && scripts/lock.sh" uv pip compile setup.py --extra dev --constraints - \
    --universal --python-version 3.11 --upgrade --generate-hashes --no-config --default-index https://pypi.org/simple \
    --output-file requirements.lock --quiet
