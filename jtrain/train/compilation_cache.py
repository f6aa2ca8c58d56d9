"""Compilation cache: programs on disk between runs, so that the second start is quick.

The cache holds machine code, which JAX runs without a check. Its directory therefore belongs to
this user, and nobody else may write to it, to a folder above it, or to a file in it.
"""

import contextlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain.errors import ConfigError
from jtrain.io.environment import user_cache_dir

_log = logging.getLogger(__name__)
_WRITERS = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = 0o077


def enable_compilation_cache() -> Path | None:
    """Enable JAX's persistent compilation cache, for programs of any size; return its directory.

    `JAX_COMPILATION_CACHE_DIR` is used unchecked: sharing a cache means trusting its writers.
    Otherwise the cache is `jtrain/compiled` in the user's cache directory, with mode 0700. If
    another user made it, or could write to it, a directory beside the temporary files is used
    instead, with a warning; if that is not safe either, the cache is off (None).

    Raises:
        ConfigError: if JAX does not compile.
    """
    import jax

    check_jit_enabled()
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if named:
        directory = Path(named)
        if "://" not in named:  # gs://... is no local folder
            _make(directory)
    else:
        directory = _own_directory()
    settings = jax.config
    settings.update("jax_compilation_cache_dir", named or (str(directory) if directory else None))
    # By default only programs that took a second to compile are kept: none of a small model.
    settings.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return directory


def check_jit_enabled() -> None:
    """Raise ConfigError under `jax.disable_jit()`: shapes are traced and programs are compiled."""
    import jax

    settings: Any = jax.config
    if settings.jax_disable_jit:
        raise ConfigError(
            "jit is disabled, by JAX_DISABLE_JIT or jax.disable_jit(), and jtrain compiles what it "
            "computes. Enable it: unset JAX_DISABLE_JIT. To step through a loss without jit, type "
            "jtrain run CONFIG --eager; in a script call the loss, or the step of jt.make_step, in "
            "jax.disable_jit()."
        )


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compile in a `with` block whatever JAX's persistent cache has: a hit writes no dump files."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    settings: Any = jax.config
    directory = settings.jax_compilation_cache_dir
    settings.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        settings.update("jax_compilation_cache_dir", directory)
        compilation_cache.reset_cache()


def find_trust_problem(directory: Path) -> str:
    """Return why programs in a directory must not be run, as the end of a sentence; "" if they may.

    Every folder above the directory counts, since whoever may rename it controls its content. A
    world-writable folder is accepted if it is sticky, as /tmp is. The user's own group may write
    above the last two folders, and to files in a directory that nobody else may enter.
    """
    try:
        place = directory.resolve(strict=True)
        own = (place, place.parent)
        for folder in (place, *place.parents):
            if fault := _fault(folder, strict=folder in own):
                return fault
        closed = not place.stat().st_mode & _OTHERS
        for path in _content(place):
            # A temporary file of another process may be gone since it was listed.
            with contextlib.suppress(FileNotFoundError):
                if fault := _fault(path, strict=True, closed=closed):
                    return fault
        return ""
    except OSError as error:
        return f"{error.filename or directory} cannot be read ({error.strerror})"


def usual_directory() -> Path:
    """Return `jtrain/compiled` in the user's cache directory, where programs usually are."""
    return Path(user_cache_dir()) / "jtrain" / "compiled"


def _own_directory() -> Path | None:
    """Return the first of two directories that is safe, created if missing; None if neither is."""
    usual = usual_directory()
    other = Path(tempfile.gettempdir()) / f"jtrain-{os.getuid()}" / "compiled"
    faults = []
    for directory in (usual, other):
        _make(directory)
        if fault := find_trust_problem(directory):
            faults.append(fault)
            continue
        directory.chmod(0o700)
        if faults:
            _warn(usual, faults[0], f"{directory} is used instead")
        return directory
    _warn(usual, faults[0], "each run compiles again")
    return None


def _make(directory: Path) -> None:
    """Create a folder of mode 0700 below one of that mode, if possible."""
    with contextlib.suppress(OSError):  # `distrusted` finds a missing or unsafe folder
        directory.parent.parent.mkdir(0o700, parents=True, exist_ok=True)
        for folder in (directory.parent, directory):
            folder.mkdir(0o700, exist_ok=True)


def _fault(path: Path, *, strict: bool, closed: bool = False) -> str:
    """Return why another user could change a file or folder; "" if nobody could.

    Args:
        strict: only this user may own it and write to it; otherwise it may also be owned by root,
            sticky, or writable by this user's own group.
        closed: nobody else may enter its folder, so its mode does not matter.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link"
    if found.st_uid not in ({os.getuid()} if strict else {os.getuid(), 0}):
        return f"{path} belongs to user {found.st_uid}"
    writers = 0 if closed else found.st_mode & _WRITERS
    if not strict:
        sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        own_group = stat.S_IWGRP if found.st_gid == os.getgid() else 0
        writers = 0 if sticky else writers & ~own_group
    return f"{path} may be written by others (mode {found.st_mode & 0o7777:04o})" if writers else ""


def _content(directory: Path) -> Iterator[Path]:
    """Yield the files of a cache and of its folders, which hold programs of single processes."""
    for path in directory.iterdir():
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from path.iterdir()


def _warn(usual: Path, fault: str, instead: str) -> None:
    if not os.path.lexists(usual):  # no cache could be made there, so there is nothing to distrust
        return
    _log.warning(
        f"compile cache: another user may have put programs into {usual}: {fault}. None of them "
        f"is run; {instead}. To have a cache of your own: mv {usual.parent} {usual.parent}.old, or "
        f"set XDG_CACHE_HOME to a directory that only you may write to."
    )
