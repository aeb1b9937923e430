#!/usr/bin/env bash
# Rewrites requirements.lock. The lock names, for every package that setup.py's extra dev needs, the newest version that
# setup.py allows, and the hashes of its files. It holds for Python 3.11 to 3.13 on every platform.
#
#   pip install uv && scripts/lock.sh
#
# The hashes cover every file in the lock. They do not cover setuptools: pip takes its newest version to build promise,
# seqeval and typing, which exist as sources only.
set -euo pipefail
cd "$(dirname "$0")/.."
# uv ignores a package's upper bound on the Python version. pip obeys it: it refuses newer versions of these packages.
printf '%s\n' 'backports.strenum<1.3' 'typing<3.10' |
  UV_CUSTOM_COMPILE_COMMAND="pip install uv && scripts/lock.sh" uv pip compile setup.py --extra dev --constraints - \
    --universal --python-version 3.11 --upgrade --generate-hashes --no-config --default-index https://pypi.org/simple \
    --output-file requirements.lock --quiet
