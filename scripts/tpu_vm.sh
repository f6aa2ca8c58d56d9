#!/usr/bin/env bash
# Train on a slice of TPU VMs, from here: docs/clusters.md explains each step.
set -euo pipefail
usage="usage: scripts/tpu_vm.sh NAME --zone ZONE --type TYPE [options] run CONFIG [KEY=VALUE ...]

Ask for a slice, copy this folder to it, train, resume after each preemption, fetch runs/, delete the slice.

  --type TYPE       v5litepod-16, v6e-8, v5p-8: the name of a slice in gcloud
  --zone ZONE       europe-west4-b and so on
  --spot            a slice that may be taken away at any time, for less money
  --nfs HOST:/PATH  file system with runs/ for all hosts, such as Filestore; needed by several hosts
  --install PACKAGE what uv installs; default jtrain[tpu]. In a clone of jtrain: .[tpu]
  --restarts N      restarts of the run, preemptions among them; default 50
  --keep            do not delete the slice at the end
  --dry-run         print the commands, and do nothing"
work=jtrain-work # the project's folder on a host
zone='' type='' nfs='' install='jtrain[tpu]' restarts=50 spot='' keep='' dry_run=''

fail() { printf 'scripts/tpu_vm.sh: %s\n' "$*" >&2 && exit 2; }
say() { printf '== %s\n' "$*" >&2; }

name=${1:-}
case $name in '' | -*) printf '%s\n' "$usage" && [ "$name" = --help ] && exit 0 || exit 2 ;; esac
shift
while [ $# -gt 0 ] && [ "$1" != run ]; do
  case $1 in
  --spot) spot=--spot ;;
  --keep) keep=yes ;;
  --dry-run) dry_run=yes ;;
  --zone | --type | --nfs | --install | --restarts)
    [ $# -gt 1 ] || fail "$1 needs a value"
    printf -v "${1#--}" %s "$2" && shift ;;
  *) fail "no option $1; --help lists the options" ;;
  esac
  shift
done
[ $# -gt 1 ] || fail "the command is missing: write run CONFIG at the end"
[ -n "$zone" ] || fail "the zone is missing: --zone europe-west4-b; gcloud compute tpus locations list"
case $type in
v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
v5p-*) runtime=v2-alpha-tpuv5 ;;
v6e-*) runtime=v2-alpha-tpuv6e ;;
v4-*) runtime=tpu-ubuntu2204-base ;;
*) fail "the type of the slice is missing or unknown: --type v4-8, v5litepod-16, v5p-8, v6e-8" ;;
esac
if [ -z "$nfs" ] && [ "${type##*-}" -gt 8 ]; then # in all generations 8 is the largest number of one host
  fail "the hosts of $type share runs/: write --nfs HOST:/PATH, a file system such as Filestore's"
fi
case " $spot$nfs $*" in
' --spot '*' checkpoint.store='*) ;;
' --spot '*) fail "a spot slice takes runs/ with it when it goes: add checkpoint.store=gs://BUCKET/runs, or --nfs HOST:/PATH" ;;
esac

tpu() { # GROUP COMMAND WORDS: print `gcloud compute tpus`, and run it unless this is a dry run
  set -- gcloud compute tpus "$@" --zone="$zone"
  printf '+ %s\n' "$*" >&2
  [ -n "$dry_run" ] || "$@"
}
send() { tpu tpu-vm scp "$1" "$name:" --worker=all; }
remote() { tpu tpu-vm ssh "$name" --worker="$1" --command="$2"; }
create() {
  tpu queued-resources create "$name" --node-id="$name" --accelerator-type="$type" \
    --runtime-version="$runtime" $spot
}
delete() { tpu queued-resources delete "$name" --force --quiet; }
state() { # state of the request, or of its slice where the request is filled; nothing: there is none
  found=$(tpu queued-resources describe "$name" '--format=value(state.state)' 2> /dev/null) || return 0
  [ "$found" != ACTIVE ] ||
    found=$(tpu tpu-vm describe "$name" '--format=value(state)' 2> /dev/null) || found=SUSPENDED
  printf %s "$found"
}

archive=$(mktemp) gone=$dry_run
trap 'rm -f "$archive"; [ -n "$gone" ] || say "the slice costs money while it is there: gcloud compute tpus queued-resources delete $name --force --zone=$zone"' EXIT

ready() { # wait for the slice, and replace one that was taken away; then the project is on it
  while [ -z "$dry_run" ] && found=$(state) && [ "$found" != READY ]; do
    say "slice $name: ${found:-none}"
    case $found in
    '') create ;;
    SUSPENDED | PREEMPTED | TERMINATED | STOPPED) delete ;;
    FAILED) fail "the request was refused: gcloud compute tpus queued-resources describe $name --zone=$zone" ;;
    esac
    sleep 30
  done
  [ -z "$dry_run" ] || create
  [ -n "$dry_run" ] || tar -czf "$archive" --exclude=./runs --exclude=./.git --exclude='./.venv*' .
  send "$archive"
  remote all "set -e; mkdir -p $work/runs; tar -xzf ${archive##*/} -C $work; cd $work
if [ -n '$nfs' ] && ! mountpoint -q runs; then
  sudo apt-get install -qq nfs-common; sudo mount -t nfs '$nfs' runs; sudo chown \$(id -u) runs
fi
export PATH=~/.local/bin:\$PATH
command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
uv venv --python 3.12 --allow-existing ~/jtrain-env
uv pip install --python ~/jtrain-env '$install'"
}

# A connection that breaks leaves the run at work, and Ctrl-C does not reach it: SIGTERM makes it save. The
# brackets keep the shell that runs this from finding itself.
stop='pkill -TERM -f "[j]train-env/bin/jtrain"; for _ in $(seq 60); do
  pgrep -f "[j]train-env/bin/jtrain" > /dev/null || break; sleep 1
done; pkill -KILL -f "[j]train-env/bin/jtrain" || true'
trap 'remote all "$stop" || true; exit 75' INT TERM
while :; do
  ready
  remote all "$stop" || true
  code=0
  remote all "cd $work; exec ~/jtrain-env/bin/jtrain$(printf ' %q' "$@")" || code=$?
  case $code in 0 | 2) break ;; esac # done, or a mistake that repeating would not mend
  [ "$restarts" -gt 0 ] || break
  restarts=$((restarts - 1))
  say "exit code $code: resuming from the newest checkpoint, restarts left: $restarts"
  sleep 30
done
remote 0 "tar -czf jtrain-runs.tgz -C $work runs"
tpu tpu-vm scp "$name:jtrain-runs.tgz" . --worker=0
[ -n "$dry_run" ] || tar -xzf jtrain-runs.tgz
[ -n "$keep" ] || { delete && gone=yes; }
exit "$code"
