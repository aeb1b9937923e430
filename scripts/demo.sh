#!/usr/bin/env bash
# Runs the whole workflow on two cores, in 11 to about 30 minutes: photos -> TFRecords -> training, killed and resumed
# once -> SavedModel -> PQ and pictures of unseen photos. A later call reuses existing files and resumes a killed demo.
#
#   scripts/demo.sh                cell nuclei: trains on 97 photos, and scores 33 others
#   scripts/demo.sh '' OUT         the same, in the folder OUT instead of demo
#   scripts/demo.sh COCO OUT       overfits to your own photos in COCO's layout:
#                                  COCO/train2017, COCO/val2017 and COCO/annotations/panoptic_{train,val}2017[.json];
#                                  eight photos in each photo folder are enough
set -euo pipefail
# Prints a path as an absolute path; a relative path starts at the caller's folder.
absolute() { case ${1:-/} in /*) printf '%s' "${1:-}" ;; *) printf '%s' "$PWD/$1" ;; esac; }
coco=$(absolute "${1:-}") out=$(absolute "${2:-}")
cd "$(dirname "$0")/.."
out=${out:-demo}
if [ -n "$coco" ] && [ ! -f "$coco/annotations/panoptic_train2017.json" ]; then
  echo "$coco/annotations/panoptic_train2017.json: no such file; the first argument takes a folder in COCO's layout" >&2
  exit 2
fi
# A demo makes the folder data first. Without that folder, no demo has made files of these names: the script keeps them.
for name in run model predictions train.pid scores.json scores.txt picture.jpg; do
  if [ ! -d "$out/data" ] && [ -e "$out/$name" ]; then
    echo "$out/$name: is there, and no demo has made it; the second argument takes another folder" >&2
    exit 2
  fi
done
source scripts/environment.sh
prepare
export TF_CPP_MIN_LOG_LEVEL=3
mkdir -p "$out"

say() { printf '\n== %s\n' "$*"; }

if [ -z "$coco" ]; then
  convert=(nuclei) recipe=nuclei/demo.gin scored=(--split=test) name=nuclei_PQ score=PQ_things split=test
  photos=(axial/data/nuclei_sample/test/photos/*)
else
  convert=(coco "--input_dir=$coco") recipe=sample/overfit.gin scored=() name=PQ score=PQ split=train2017
  for subset in train2017 val2017; do
    [ -f "$coco/annotations/panoptic_$subset.json" ] && convert+=("--split=$subset") scored+=("--split=$subset")
  done
  photos=("$coco"/val2017/*.jpg)
  [ -f "${photos[0]}" ] || photos=("$coco"/train2017/*.jpg)
fi

train() { exec axial-train --gin_file="$recipe" --data_dir="$out/data" --model_dir="$out/run"; }

# A killed demo leaves its training running. These lines stop that training: two runs must not write to one folder.
if pid=$(cat "$out/train.pid" 2>/dev/null) && grep -zqsxF -- "--model_dir=$out/run" "/proc/$pid/cmdline"; then
  kill -9 "$pid"
fi

say "Converting photos to TFRecords"
axial-convert "${convert[@]}" --output_dir="$out/data"

if [ ! -f "$out/run/checkpoint" ]; then
  say "Training; killed at its first checkpoint (kill -9)"
  train &
  pid=$!
  echo $pid >"$out/train.pid"
  while [ ! -f "$out/run/checkpoint" ] && kill -0 $pid 2>/dev/null; do sleep 1; done
  kill -9 $pid 2>/dev/null || true
  wait $pid 2>/dev/null || true
  say "Training; the same command resumes it"
else
  say "Training, from where it stands"
fi
train &
echo $! >"$out/train.pid"
wait $!

if [ ! -d "$out/model" ]; then
  say "Exporting a SavedModel"
  axial-export --model_dir="$out/run" --output_dir="$out/model"
fi

say "Segments of eight photos, from the SavedModel"
axial-predict --model="$out/model" --output_dir="$out/predictions" "${photos[@]:0:8}"

say "Scores of the SavedModel"
axial-evaluate --model="$out/model" --data_dir="$out/data" "${scored[@]}" --json="$out/scores.json" \
  --picture="$out/picture.jpg" | tee "$out/scores.txt"

pq=$(sed -nE "/ split=$split /s/(^|.* )$score=([0-9.]*) .*/\2/p" "$out/scores.txt")
echo "$name=$pq picture=$(realpath "$out/picture.jpg")"
