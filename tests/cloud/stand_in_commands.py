"""Shell scripts in the place of gcloud and kubectl, of the trainer, and of a worker's Python."""

GCLOUD = """#!/usr/bin/env bash
# gcloud compute [tpus tpu-vm] ssh|scp, kubectl exec|cp: in the folder of a worker.
root=$(dirname "$(dirname "$0")") command='' worker='' words=()
for word; do
  case $word in
  --command=*) command=${word#--command=} ;;
  --worker=*) worker=-${word#--worker=} ;;
  --*) ;;
  *) words+=("$word") ;;
  esac
done
case "${words[*]}" in
"compute tpus tpu-vm ssh"*) name=${words[4]} ;;
"compute tpus tpu-vm scp"*) path=${words[4]} name=${words[5]} ;;
"compute ssh"*) name=${words[2]} ;;
"compute scp"*) path=${words[2]} name=${words[3]} ;;
"exec"*) name=${words[1]} command=${words[-1]} ;;
"cp"*) path=${words[1]} name=${words[2]} ;;
*) echo "stand-in: ${words[*]}?" >&2; exit 3 ;;
esac
folder=$root/workers/${name%%:*}$worker
[[ -d $folder ]] || { echo "no route to ${name%%:*}$worker" >&2; exit 255; }
if [[ -n ${path:-} ]]; then cp "$path" "$folder/${name#*:}"; exit; fi
cd "$folder" && HOME=$folder PATH=$root/worker_bin:$PATH TPU_WORKER_HOSTNAMES=left,over exec bash -c "$command"
"""

TRAINER = """#!/usr/bin/env bash
# axial-train: does what the next line of the plan says, "STEP WORD", and writes status.json.
trap 'exit 42' TERM
root=$(dirname "$(dirname "$0")")
echo "$*" >>"$root/starts"
env | grep -E '^(TPU|CLOUD_TPU|TF_PLUG|NEXT_PLUG)' >>"$root/environments"
for word; do case $word in --model_dir=file://*) model_dir=${word#--model_dir=file://} ;; esac; done
read -r step word <"$root/plan" || { step=0 word=1; }
sed -i 1d "$root/plan"
state=training; [[ $word == 0 ]] && state=done; [[ $word == 42 ]] && state=preempted
mkdir -p "$model_dir"
printf '{"state": "%s", "step": %s, "steps": 100, "seconds_per_step": 0.5, "images_per_second": 64.0,
"updated": "2026-11-23T12:00:00Z", "host": "w"}' "$state" "$step" >"$model_dir/status.$$"
mv "$model_dir/status.$$" "$model_dir/status.json"
echo "step $step of 100, then $word"
case $word in
[0-9]*) exit "$word" ;;
hang) while :; do sleep 0.05; done ;;
*) echo "$word" >"$root/taken.$$"; mv "$root/taken.$$" "$root/taken"; sleep 60 ;;
esac
"""

PYTHON = """#!/usr/bin/env bash
# python3 -m axial.cloud.server: a process that serves nothing.
root=$(dirname "$(dirname "$0")")
echo "$(basename "$HOME") $*" >>"$root/servers"
exec sleep 60
"""
