# What .ci/run and .ci/weekly share: fresh virtual environments, and the newest Python of this machine.
# shellcheck shell=bash
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PIP_NO_BUILD_ISOLATION=false # pip's spelling of "without": hatchling and hatch-vcs are among the locked ones

enter() { # PYTHON NAME EXTRAS: a fresh virtual environment with jtrain, active from here on
  "$1" -m venv "$scratch/$2"
  # shellcheck disable=SC1091
  source "$scratch/$2/bin/activate"
  python3 -c 'import sys; print("==", "Python", *sys.version_info[:3])'
  # Every package by its digest (requirements/renew writes them); what follows finds all that it asks for.
  local lock
  lock=requirements/ci-$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
  python3 -m pip install --require-hashes -r "$lock"
  python3 -m pip install -e ".[$3]"
}

newer() { # the newest of Python 3.13 and 3.12, if there is one that can be started
  local candidate
  for candidate in python3.13 "$HOME"/.pyenv/versions/3.13.*/bin/python3 python3.12 \
    "$HOME"/.pyenv/versions/3.12.*/bin/python3; do
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

numeric() { # ISA MARKS FILES: numeric tests with the instructions of another processor: sums round otherwise
  local isa=$1 marks=$2
  shift 2
  echo "== numeric tests, --xla_cpu_max_isa=$isa"
  XLA_FLAGS="--xla_cpu_max_isa=$isa --xla_backend_optimization_level=1" python3 -m pytest \
    -m "$marks" "$@"
}
