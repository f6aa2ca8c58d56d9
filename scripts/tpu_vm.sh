#!/usr/bin/env bash
# Train on a slice of TPU VMs, from here: docs/clusters/tpu_vm.md explains each step.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
usage() {
  cat << 'END'
usage: scripts/tpu_vm.sh NAME --zone ZONE --type TYPE [options] run CONFIG [KEY=VALUE ...]

Ask for a slice of TPU VMs, copy this folder to it, train, resume after each preemption, fetch runs/, and
delete the slice.

  --type TYPE       v5litepod-16, v6e-8, v5p-8: the name of a slice in gcloud
  --zone ZONE       europe-west4-b and so on
  --spot            a slice that may be taken away at any time, for less money
  --project NAME    project of Google Cloud; default gcloud's own
  --version NAME    runtime version; default that of the type
  --nfs HOST:/PATH  file system with runs/ for all hosts, such as Filestore; needed by several hosts
  --install PACKAGE what uv installs; default jtrain[tpu]. In a clone of jtrain: .[tpu]
  --restarts N      restarts of the run, preemptions among them; default 50
  --wait SECONDS    between two looks at the slice, and before a restart; default 30
  --keep            do not delete the slice at the end
  --dry-run         print the commands, and do nothing
END
}

fail() {
  printf 'scripts/tpu_vm.sh: %s\n' "$*" >&2
  exit 2
}

name='' zone='' type='' project='' version='' nfs='' restarts=50 wait=30
spot=no keep=no dry_run=no package='jtrain[tpu]'
while [ $# -gt 0 ]; do
  case $1 in
  --help | -h) usage && exit 0 ;;
  --spot) spot=yes && shift ;;
  --keep) keep=yes && shift ;;
  --dry-run) dry_run=yes && shift ;;
  --zone | --type | --project | --version | --nfs | --install | --restarts | --wait)
    [ $# -gt 1 ] || fail "$1 needs a value"
    case $1 in
    --zone) zone=$2 ;;
    --type) type=$2 ;;
    --project) project=$2 ;;
    --version) version=$2 ;;
    --nfs) nfs=$2 ;;
    --install) package=$2 ;;
    --restarts) restarts=$2 ;;
    --wait) wait=$2 ;;
    esac
    shift 2
    ;;
  -*) fail "no option $1; --help lists the options" ;;
  run) break ;;
  *)
    [ -z "$name" ] || fail "found $1 after the name $name; the command of jtrain begins with run"
    name=$1 && shift
    ;;
  esac
done

[ -n "$name" ] || fail "the name of the slice is missing: scripts/tpu_vm.sh NAME --zone ZONE --type TYPE run CONFIG"
[ $# -gt 1 ] || fail "the command is missing: write run CONFIG at the end"
[ -n "$zone" ] || fail "the zone is missing: --zone europe-west4-b; gcloud compute tpus locations list"
case $type in
v5litepod-*) default=v2-alpha-tpuv5-lite ;;
v5p-*) default=v2-alpha-tpuv5 ;;
v6e-*) default=v2-alpha-tpuv6e ;;
v4-*) default=tpu-ubuntu2204-base ;;
'') fail "the type of the slice is missing: --type v5litepod-16, v6e-8, v5p-8" ;;
tpu7x* | ironwood*) fail "$type is no TPU VM, only GKE has it: jtrain launch --engine k8s --topology tpu7x:2x2x1" ;;
*) fail "no type $type is known: v4-8, v5litepod-16, v5p-8, v6e-8; gcloud compute tpus accelerator-types list" ;;
esac
version=${version:-$default}
size=${type##*-}
case $size in '' | *[!0-9]*) fail "--type $type does not end with a number: v5litepod-16" ;; esac
case "$restarts$wait" in *[!0-9]*) fail "--restarts and --wait are numbers: --restarts 50 --wait 30" ;; esac
[ -z "$nfs" ] || [ "${nfs#*:/}" != "$nfs" ] || fail "--nfs $nfs is not HOST:/PATH: --nfs 10.0.0.2:/share"
if [ -z "$nfs" ] && [ "$size" -gt 8 ]; then # in all generations 8 is the largest number of one host
  fail "the hosts of $type share runs/: write --nfs HOST:/PATH, a file system such as Filestore's"
fi
if [ -z "$nfs" ] && [ "$spot" = yes ]; then
  case " $*" in
  *' checkpoint.store='*) ;;
  *) fail "a spot slice takes runs/ with it when it goes: add checkpoint.store=gs://BUCKET/runs, or --nfs HOST:/PATH" ;;
  esac
fi
# shellcheck disable=SC2034 # remote_run.sh reads it
extra="package='$package'"
installed=no
# shellcheck source=scripts/remote_run.sh
source "$(dirname "${BASH_SOURCE[0]}")/remote_run.sh"

flags() { # the flags of every command
  printf '%s\n' "--zone=$zone"
  [ -z "$project" ] || printf '%s\n' "--project=$project"
}

tpu() { # GROUP COMMAND WORDS: gcloud compute tpus GROUP COMMAND WORDS, with the flags of every command
  local words=() flag
  while read -r flag; do words+=("$flag"); done < <(flags)
  act gcloud compute tpus "$@" "${words[@]}"
}

send() { tpu tpu-vm scp "$1" "$name:$2" --worker=all; }
receive() { tpu tpu-vm scp "$name:$1" "$2" --worker=0; }
remote() { tpu tpu-vm ssh "$name" --worker=all --command="$1"; }
remote_first() { tpu tpu-vm ssh "$name" --worker=0 --command="$1"; }

state() { # state of the request, or of its slice where the request is filled; nothing: there is none
  local found
  found=$(tpu queued-resources describe "$name" '--format=value(state.state)' 2> /dev/null) || return 0
  if [ "$found" = ACTIVE ]; then
    found=$(tpu tpu-vm describe "$name" '--format=value(state)' 2> /dev/null) || found=SUSPENDED
  fi
  printf %s "$found"
}

create() {
  local more=''
  [ "$spot" = no ] || more=--spot
  # shellcheck disable=SC2086 # one word or none
  tpu queued-resources create "$name" --node-id="$name" --accelerator-type="$type" \
    --runtime-version="$version" $more
}

delete() {
  installed=no
  tpu queued-resources delete "$name" --force --quiet
}

ready() { # wait for the slice, replacing one that was taken away; then the project is on it
  local found last=''
  while [ "$dry_run" = no ]; do
    found=$(state)
    [ "$found" = "$last" ] || say "slice $name: ${found:-none}"
    last=$found
    [ "$interrupted" = no ] || return 75
    case $found in
    READY) break ;;
    '') create || return $? ;;
    SUSPENDED | PREEMPTED | TERMINATED | STOPPED) delete || return $? ;;
    FAILED)
      say "Google Cloud refused the request: gcloud compute tpus queued-resources describe $name --zone=$zone"
      return 1
      ;;
    *) sleep "$wait" ;; # in the queue, being made, being taken away
    esac
  done
  [ "$dry_run" = no ] || create
  [ "$installed" = no ] || return 0
  upload || return $?
  install || return $?
  installed=yes
}

left_behind() { # what the user has to know where the slice is not deleted here
  say "a slice costs money while it is there; to delete it: gcloud compute tpus queued-resources delete" \
    "$name --force $(flags | tr '\n' ' ')"
}

supervise "$restarts" "$@" && code=0 || code=$?
if [ "$interrupted" = yes ] || [ "$installed" = no ]; then
  left_behind
elif ! fetch; then
  say "runs/ could not be fetched, so the slice is left as it is"
  left_behind
  [ "$code" != 0 ] || code=1
elif [ "$keep" = yes ]; then
  left_behind
else
  delete
fi
if [ "$dry_run" = yes ]; then
  say "after a preemption the slice is replaced, and the run resumes:"
  delete
  create
fi
exit "$code"
