#!/usr/bin/env bash
# Runs the whole path on two cores, in 15 minutes to about half an hour: photos -> TFRecords -> training, killed and
# resumed once -> SavedModel -> PQ and pictures of photos that the network has never seen. Another call reuses the files
# that are there, and resumes a killed demo.
#
#   scripts/demo.sh                cell nuclei: 97 photos to learn from, and 33 others that are scored
#   scripts/demo.sh '' OUT         the same in another folder than demo
#   scripts/demo.sh COCO OUT       photos of your own in COCO's layout, which the network is overfitted to:
#                                  COCO/train2017, COCO/val2017 and COCO/annotations/panoptic_{train,val}2017[.json];
#                                  eight of each are enough
set -euo pipefail
# A path relative to the caller's folder, as an absolute one.
absolute() { case ${1:-/} in /*) printf '%s' "${1:-}" ;; *) printf '%s' "$PWD/$1" ;; esac; }
coco=$(absolute "${1:-}") out=$(absolute "${2:-}")
cd "$(dirname "$0")/.."
out=${out:-demo}
if [ -n "$coco" ] && [ ! -f "$coco/annotations/panoptic_train2017.json" ]; then
  echo "$coco/annotations/panoptic_train2017.json: no such file; the first argument takes a folder in COCO's layout" >&2
  exit 2
fi
# A demo makes the folder data first. Without it, files of the demo's names are somebody else's, and stay.
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
  caption="Axial-DeepLab on photos that it has never seen"
else
  convert=(coco "--input_dir=$coco") recipe=sample/overfit.gin scored=() name=PQ score=PQ split=train2017
  for part in train2017 val2017; do
    [ -f "$coco/annotations/panoptic_$part.json" ] && convert+=("--split=$part") scored+=("--split=$part")
  done
  photos=("$coco"/val2017/*.jpg)
  [ -f "${photos[0]}" ] || photos=("$coco"/train2017/*.jpg)
  caption="Axial-DeepLab, overfitted on purpose to the photos on the left"
fi

train() { exec axial-train --gin_file="$recipe" --data_dir="$out/data" --model_dir="$out/run"; }

# A killed demo leaves its training running. It is stopped, because two runs must not write to one folder.
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
  --picture="$out/picture.jpg" --caption="$caption" | tee "$out/scores.txt"

pq=$(sed -nE "/ split=$split /s/(^|.* )$score=([0-9.]*) .*/\2/p" "$out/scores.txt")
echo "$name=$pq picture=$(realpath "$out/picture.jpg")"
