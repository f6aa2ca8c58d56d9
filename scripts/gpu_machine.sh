#!/usr/bin/env bash
# Train on one machine with NVIDIA GPUs, over ssh: docs/clusters/one_machine.md explains each step.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
usage() {
  cat << 'END'
usage: scripts/gpu_machine.sh HOST [options] run CONFIG [KEY=VALUE ...]

Copy this folder to a machine with NVIDIA GPUs, train on all of them, resume after each fault, and fetch
runs/. HOST is what ssh takes: user@address, or a name in ~/.ssh/config.

  --install PACKAGE what uv installs; default jtrain[cuda13], or jtrain[cuda12] where the driver is older
                    than 580. In a clone of jtrain: .[cuda12]
  --restarts N      restarts of the run, lost connections among them; default 20
  --wait SECONDS    before a restart; default 30
  --dry-run         print the commands, and do nothing
END
}

fail() {
  printf 'scripts/gpu_machine.sh: %s\n' "$*" >&2
  exit 2
}

# shellcheck disable=SC2034 # remote_run.sh reads dry_run, nfs and wait
host='' package='' restarts=20 wait=30 dry_run=no nfs=''
while [ $# -gt 0 ]; do
  case $1 in
  --help | -h) usage && exit 0 ;;
  --dry-run) dry_run=yes && shift ;;
  --install | --restarts | --wait)
    [ $# -gt 1 ] || fail "$1 needs a value"
    case $1 in
    --install) package=$2 ;;
    --restarts) restarts=$2 ;;
    --wait) wait=$2 ;;
    esac
    shift 2
    ;;
  -*) fail "no option $1; --help lists the options" ;;
  run) break ;;
  *)
    [ -z "$host" ] || fail "found $1 after the host $host; the command of jtrain begins with run"
    host=$1 && shift
    ;;
  esac
done

[ -n "$host" ] || fail "the machine is missing: scripts/gpu_machine.sh HOST run CONFIG"
[ $# -gt 1 ] || fail "the command is missing: write run CONFIG at the end"
case "$restarts$wait" in *[!0-9]*) fail "--restarts and --wait are numbers: --restarts 20 --wait 30" ;; esac
# shellcheck disable=SC2034 # remote_run.sh reads it
if [ -n "$package" ]; then
  extra="package='$package'"
else # evaluated there, where the driver is
  extra="command -v nvidia-smi > /dev/null || { echo 'this machine has no NVIDIA driver' >&2; exit 1; }
driver=\$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
[ \"\${driver%%.*}\" -ge 580 ] && package='jtrain[cuda13]' || package='jtrain[cuda12]'"
fi
installed=no
# shellcheck source=scripts/remote_run.sh
source "$(dirname "${BASH_SOURCE[0]}")/remote_run.sh"

# A connection that answers nothing for two minutes is over.
remote() { act ssh -n -o ServerAliveInterval=30 -o ServerAliveCountMax=4 "$host" "$1"; }
remote_first() { remote "$1"; }
send() { act scp -q "$1" "$host:$2"; }
receive() { act scp -q "$host:$1" "$2"; }

ready() { # wait until the machine answers; then the project is on it
  until remote true; do
    [ "$interrupted" = no ] || return 75
    say "$host does not answer"
    sleep "$wait"
  done
  [ "$installed" = no ] || return 0
  upload || return $?
  install || return $?
  installed=yes
}

supervise "$restarts" "$@" && code=0 || code=$?
[ "$interrupted" = yes ] || [ "$installed" = no ] || fetch || {
  say "runs/ could not be fetched: scp -r $host:$work/runs ."
  [ "$code" != 0 ] || code=1
}
exit "$code"
