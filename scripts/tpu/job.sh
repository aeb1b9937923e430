#!/usr/bin/env bash
# Runs a command on a worker so that it outlives the connection that starts it. axial-tpu calls it through ssh.
#
#   job.sh start NAME COMMAND...    starts it, unless it runs; its output goes to NAME.log
#   job.sh ask NAME COMMAND...      says whether it runs, in the words of start
#                                   Both exit with 3 if NAME runs with another command.
#   job.sh follow NAME BYTE         prints the log from a byte on, counted from 1, until the command ends, then its code
#   job.sh stop NAME                sends it SIGTERM
set -euo pipefail
verb=$1 name=$2
shift 2

runs() { [[ -e $name.pid && ! -e $name.code ]] && kill -0 "$(cat "$name.pid")" 2>/dev/null; }

case $verb in
start | ask)
  command=$(printf '%q ' "$@")
  if runs; then
    if [[ $command != "$(cat "$name.command" 2>/dev/null)" ]]; then
      echo "$name runs already, with another command"
      exit 3
    fi
    echo "$name runs already"
    exit 0
  fi
  if [[ $verb == ask ]]; then exit 0; fi
  rm -f "$name.code"
  printf '%s' "$command" >"$name.command"
  # The inner shell waits for the command and writes its code. On SIGTERM it lets the command end by itself.
  # shellcheck disable=SC2016
  setsid bash -c 'name=$1; shift
    "$@" >>"$name.log" 2>&1 &
    trap "kill -TERM $! 2>/dev/null" TERM
    while :; do wait $! && code=0 || code=$?; kill -0 $! 2>/dev/null || break; done
    echo "$code" >"$name.code.partial" && mv "$name.code.partial" "$name.code"' \
    job "$name" "$@" </dev/null >/dev/null 2>&1 &
  echo $! >"$name.pid"
  ;;
follow)
  touch "$name.log"
  # tail does not wait for the job itself: one that has ended is there until a container's first process reads its code.
  while runs; do sleep 0.2; done &
  watch=$!
  trap 'kill "$watch" 2>/dev/null || true' EXIT
  tail -c "+$1" -s 0.2 --pid="$watch" -f "$name.log"
  # 137: something killed the whole job, so that it could not write its code.
  echo "axial-tpu: $name ended with $(cat "$name.code" 2>/dev/null || echo 137)"
  ;;
stop)
  if runs; then kill -TERM "$(cat "$name.pid")"; fi
  ;;
*)
  echo "job.sh: start, ask, follow or stop, not $verb" >&2
  exit 2
  ;;
esac
