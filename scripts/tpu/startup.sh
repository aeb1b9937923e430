# shellcheck shell=bash
# Every host runs this script at every boot under axial-tpu launch --engine=gcloud. The command puts lines before this
# text that set the variables AXIAL_RUN, AXIAL_HOST_COUNT, AXIAL_END (seconds since 1970) and AXIAL_DELETE (the command
# that deletes the slice), and that define the function install with the text of wheel.sh.
export HOME=/root PATH="/snap/bin:$PATH"
meta() {
  curl -fsS -H "Metadata-Flavor: Google" "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
work() {
  set -e
  install
  if [ "$AXIAL_HOST_COUNT" -gt 1 ]; then
    AXIAL_HOST=$(meta agent-worker-number)
    AXIAL_HOSTS=$(meta worker-network-endpoints | tr , "\n" | cut -d: -f3 | paste -sd, -)
    export AXIAL_HOST AXIAL_HOSTS
  fi
  while :; do
    python3 -m axial.cloud.supervisor && exit 0 || code=$?
    if [ "$code" != 42 ]; then exit "$code"; fi # 42: preempted
    sleep 30
  done
}
export -f install meta work
left=$((AXIAL_END - $(date +%s)))
if [ "$left" -gt 0 ]; then
  timeout --kill-after=60 "$left" bash -c work
fi
echo "axial-tpu: ended with $?; the slice is deleted"
until eval "$AXIAL_DELETE"; do sleep 60; done
