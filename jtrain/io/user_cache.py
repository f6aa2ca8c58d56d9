"""User's cache directory: the folder above what jtrain downloads and compiles."""

import os
from pathlib import Path


def user_cache_dir() -> Path:
    """Return `XDG_CACHE_HOME`, or `.cache` in the user's home; without a home, in this folder.

    A container whose user is a number without a name has no home if HOME is unset.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return Path.cwd() / ".cache"
