#!/usr/bin/env bash
# Builds a static site of the pages and of the public docstrings, with search. A reader needs no network.
#
#   scripts/docs.sh [SITE]       writes the folder SITE, by default build/site, and tests its links
#
# Browsers search only in pages of a server: python -m http.server --directory build/site
set -euo pipefail
site=$(realpath -m "${1:-build/site}")
cd "$(dirname "$0")/.."
source scripts/environment.sh
command -v zensical >/dev/null || prepare docs
# The generator takes one folder of pages. The pages keep their places, so that their links stay as they are.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/pages"
find ./*.md LICENSE docs experiments axial \( -name '*.md' -o -name LICENSE -o -name photos.txt -o -name zoo.csv \
  -o -name '*.png' -o -name '*.jpg' -o -name '*.safetensors' \) -print0 |
  xargs -0 cp --parents --target-directory="$work/pages"
# The pages link to some source files. A browser shows these as text.
grep -rhoE '\]\((\.\./)*(axial|experiments)/[^)]+\.py\)' README.md docs |
  sed -E 's/.*\]\((\.\.\/)*(.*)\)/\2/' | sort -u |
  xargs cp --parents --target-directory="$work/pages"
cp -r scripts/docs/api "$work/pages"
sed "s|ROOT|$PWD|" scripts/docs/mkdocs.yml >"$work/mkdocs.yml"
(cd "$work" && NO_COLOR=1 zensical build --strict --config-file mkdocs.yml)
rm -rf "$site"
mkdir -p "$(dirname "$site")"
mv "$work/site" "$site"
echo "$site/index.html"
