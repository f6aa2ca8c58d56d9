# shellcheck shell=bash
# What tpu_vm.sh and gpu_machine.sh share: a project on a machine elsewhere, and a run that is resumed until
# it is done. A script that sources this file defines
#   send FILE NAME       copy a file into the home folder of every host
#   receive NAME FILE    copy a file from the home folder of the first host
#   remote COMMAND       run a command on every host; return its exit code
#   remote_first COMMAND the same on the first host
#   ready                return once the machine is there, with the project on it
# and sets these. Bash 3.2 suffices, which macOS has.

: "${scratch:?a folder for archives}" "${dry_run:?yes or no}" "${wait:?seconds between two looks}"
: "${extra:?lines that set package, for uv}" "${nfs?HOST:/PATH, or nothing}"

work=jtrain-work # the project's folder in the home folder of a host
interrupted=no

say() { # WORDS: a line for the person who waits
  printf '== %s\n' "$*" >&2
}

quote() { # WORDS: the words as they are typed in a shell
  local word text=''
  for word; do
    case $word in
    '' | *[!A-Za-z0-9_./:=,@%+-]*) word="'$(printf %s "$word" | sed "s/'/'\\\\''/g")'" ;;
    esac
    text="$text${text:+ }$word"
  done
  printf %s "$text"
}

act() { # COMMAND: print it, and run it unless this is a dry run
  printf '+ %s\n' "$(quote "$@")" >&2
  [ "$dry_run" = yes ] || "$@"
}

upload() { # the folder in which this was typed, without its runs, to every host
  act tar -czf "$scratch/project.tgz" --exclude=./runs --exclude=./.git --exclude='./.venv*' . &&
    send "$scratch/project.tgz" jtrain-project.tgz &&
    remote "mkdir -p $work && tar -xzf jtrain-project.tgz -C $work"
}

install() { # jtrain in an environment of its own, with Python 3.12: a TPU VM has 3.10
  local mount=''
  if [ -n "$nfs" ]; then # runs/ of all hosts, which outlives them
    mount="mkdir -p runs
mountpoint -q runs || { sudo apt-get install -qq nfs-common && sudo mount -t nfs $(quote "$nfs") runs; }
sudo chown \"\$(id -u)\" runs
"
  fi
  remote "set -e
cd $work
${mount}command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
export PATH=\"\$HOME/.local/bin:\$PATH\"
uv venv --python 3.12 --allow-existing ~/jtrain-env
$extra
uv pip install --python ~/jtrain-env \"\$package\""
}

# A connection that breaks leaves the run at work, and Ctrl-C here does not reach it: both end it by this.
stop_lines="old=\$(cat ~/jtrain.pid 2> /dev/null || echo none)
if grep -qas jtrain \"/proc/\$old/cmdline\"; then
  kill -TERM \"\$old\"
  for _ in \$(seq 60); do [ -d \"/proc/\$old\" ] || break; sleep 1; done
  kill -KILL \"\$old\" 2> /dev/null || true
fi"

run_once() { # WORDS: `jtrain WORDS` on every host, to its end; return its exit code
  remote "$stop_lines
cd $work && echo \$\$ > ~/jtrain.pid && exec ~/jtrain-env/bin/jtrain $(quote "$@")"
}

fetch() { # runs/ of the first host into this folder
  remote_first "mkdir -p $work/runs && tar -czf jtrain-runs.tgz -C $work runs" &&
    receive jtrain-runs.tgz "$scratch/runs.tgz" &&
    act tar -xzf "$scratch/runs.tgz"
}

supervise() { # RESTARTS WORDS: `jtrain WORDS` until it is done or cannot be; return its exit code
  local left=$1 code why
  shift
  trap 'interrupted=yes' INT TERM
  while :; do
    ready || return $?
    run_once "$@" && code=0 || code=$?
    if [ "$interrupted" = yes ]; then
      say "stopping the run: it saves, and the same command resumes it"
      remote "$stop_lines" || true
      return 75
    fi
    case $code in # docs/processes.md has the table
    0) return 0 ;;
    2)
      say "an error in the command or the config (exit code 2), which repeating would not change"
      return 2
      ;;
    70) why="a fault (exit code 70)" ;;
    75) why="stopped by a signal, and saved (exit code 75)" ;;
    124) why="stuck (exit code 124)" ;;
    *) why="killed, or the machine or the connection was lost (exit code $code)" ;;
    esac
    if [ "$left" = 0 ]; then
      say "$why, and no restart is left: --restarts allows more"
      return "$code"
    fi
    say "$why: resuming from the newest checkpoint, restarts left: $((left - 1))"
    left=$((left - 1))
    sleep "$wait"
  done
}
