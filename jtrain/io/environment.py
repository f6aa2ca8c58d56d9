"""Around a process: folders of runs, the cache of the user, and installed versions.

A run may be a stranger's, and no code in it is imported: only modules that Python itself has loaded
are imported here at the top, as any other may lie in the run.
"""

import os
import sys

RUNS = "runs"
"""Name of the directory of all runs."""


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder is of a run: it has a config.yaml and what a run writes beside it."""
    has = lambda name: os.path.lexists(os.path.join(folder, name))
    if not has("config.yaml"):
        return False
    try:
        steps = os.listdir(os.path.join(folder, "checkpoints"))
    except OSError:
        steps = []
    return has("run.json") or has("metrics.jsonl") or any(name.isdigit() for name in steps)


def in_runs(folder: str) -> bool:
    """Return whether an absolute path is a run, is within one, or is within a directory `runs`.

    `runs` counts anywhere below the folders that the path shares with the current directory; of
    those, which the user chose, only the last two names count: `/data/runs/me/study` is a study.
    """
    names = folder.split(os.sep)
    shared = os.path.commonpath([folder, os.getcwd()])
    if RUNS in {*names[-2:], *folder[len(shared) :].split(os.sep)}:
        return True
    return any(is_run(os.sep.join(names[:n]) or os.sep) for n in range(1, len(names) + 1))


def distrust_current_directory() -> None:
    """Within a run, import nothing from the current directory, here and in child processes.

    `python -m` puts the current directory before all others on the search path.
    """
    here = os.getcwd()
    if in_runs(here):
        if sys.path[:1] == [here]:
            del sys.path[0]
        os.environ["PYTHONSAFEPATH"] = "1"


def user_cache_dir() -> str:
    """Return `XDG_CACHE_HOME`, or `.cache` in the user's home; without a home, in this folder.

    A container whose user is a number without a name has no home if HOME is unset.
    """
    home = os.path.expanduser("~")  # stays "~" without a home
    cache = os.path.join(os.getcwd() if home == "~" else home, ".cache")
    return os.environ.get("XDG_CACHE_HOME") or cache


def jtrain_version() -> str:
    """Return the installed version; "0.0" if the source is on the path and not installed."""
    return installed_version("jtrain") or "0.0"


def installed_version(package: str) -> str:
    """Return the installed version of a package; "" if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
