#!/usr/bin/env bash
# Runs the whole path on two cores, in under 15 minutes after installation: photos -> TFRecords -> training, killed and
# resumed once -> SavedModel -> pictures -> PQ. Another call reuses the files that are there, and resumes a killed demo.
#
#   scripts/demo.sh                the sixteen sample photos
#   scripts/demo.sh COCO OUT       photos of your own in COCO's layout: COCO/train2017, COCO/val2017 and
#                                  COCO/annotations/panoptic_{train,val}2017[.json]; eight of each are enough
set -euo pipefail
cd "$(dirname "$0")/.."
coco=${1:-axial/data/sample} out=${2:-demo}
if [ ! -f "$coco/annotations/panoptic_train2017.json" ]; then
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

splits=()
for split in train2017 val2017; do
  [ -f "$coco/annotations/panoptic_$split.json" ] && splits+=("--split=$split")
done

train() { exec axial-train --data_dir="$out/data" --model_dir="$out/run"; }

# A killed demo leaves its training running. It is stopped, because two runs must not write to one folder.
if pid=$(cat "$out/train.pid" 2>/dev/null) && grep -zqsxF -- "--model_dir=$out/run" "/proc/$pid/cmdline"; then
  kill -9 "$pid"
fi

say "Converting photos to TFRecords"
axial-convert coco --input_dir="$coco" --output_dir="$out/data" "${splits[@]}"

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

say "Segments of photos it never saw, from the SavedModel"
photos=("$coco"/val2017/*.jpg)
[ -f "${photos[0]}" ] || photos=("$coco"/train2017/*.jpg)
axial-predict --saved_model="$out/model" --output_dir="$out/predictions" "${photos[@]:0:8}"

say "Scores of the SavedModel on the photos it was trained on, then on those it never saw"
axial-evaluate --saved_model="$out/model" --data_dir="$out/data" "${splits[@]}" --json="$out/scores.json" \
  --picture="$out/picture.jpg" --caption="Axial-DeepLab, overfitted on purpose to the photos on the left" |
  tee "$out/scores.txt"

pq=$(sed -n 's/^PQ=\([0-9.]*\) .*split=train2017.*/\1/p' "$out/scores.txt")
echo "PQ=$pq picture=$(realpath "$out/picture.jpg")"
