"""Compile cache: where compiled programs are kept between runs, so that the second start is quick.

What lies in it is machine code, and JAX runs what it finds there. So the directory belongs to this
user, and nobody else may write to it, to a folder above it, or to a file in it.
"""

import contextlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jtrain.io.private_files import OTHERS

_log = logging.getLogger(__name__)
_WRITERS = stat.S_IWGRP | stat.S_IWOTH


def keep_compiled_programs() -> Path | None:
    """Turn JAX's persistent compile cache on, for programs of any size; return its directory.

    `JAX_COMPILATION_CACHE_DIR` is taken as it is: who shares a cache trusts those who write to it.
    Otherwise the cache is `jtrain/compiled` in the user's cache directory, of mode 0700. Where
    somebody else made it, or could write to it, a directory beside the temporary files takes its
    place, with a warning; where that is not this user's alone either, the cache is off (None).
    """
    import jax

    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if named:
        where = Path(named)
        if "://" not in named:  # gs://... is no folder to make
            _make(where)
    else:
        where = _own_directory()
    settings = jax.config
    settings.update("jax_compilation_cache_dir", named or (str(where) if where else None))
    # By default only programs that took a second to compile are kept: none of a small model.
    settings.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return where


def distrusted(directory: Path) -> str:
    """Return why programs in a directory are not run, a sentence's end; empty if they may be.

    Every folder above it counts, since who may rename one decides what lies under its name; one
    that all may write to is no matter if it is sticky, as /tmp is. The user's own group may write
    above the last two folders, and to files in a directory that nobody else may enter.
    """
    try:
        place = directory.resolve(strict=True)
        own = (place, place.parent)
        for folder in (place, *place.parents):
            if fault := _fault(folder, strict=folder in own):
                return fault
        closed = not place.stat().st_mode & OTHERS
        faults = (_fault(path, strict=True, closed=closed) for path in _content(place))
        return next(filter(None, faults), "")
    except OSError as error:
        return f"{error.filename or directory} cannot be read ({error.strerror})"


def _own_directory() -> Path | None:
    """The first of two directories whose programs may be run, made if need be."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    usual = home / "jtrain" / "compiled"
    other = Path(tempfile.gettempdir()) / f"jtrain-{os.getuid()}" / "compiled"
    faults = []
    for directory in (usual, other):
        _make(directory)
        if fault := distrusted(directory):
            faults.append(fault)
            continue
        directory.chmod(0o700)
        if faults:
            _warn(usual, faults[0], f"{directory} is used instead")
        return directory
    _warn(usual, faults[0], "each run compiles anew")
    return None


def _make(directory: Path) -> None:
    """Make a folder of mode 0700 below one of that mode, where it can be made."""
    with contextlib.suppress(OSError):  # what is not there, or not as it should be, is found later
        directory.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (directory.parent, directory):
            folder.mkdir(0o700, exist_ok=True)


def _fault(path: Path, *, strict: bool, closed: bool = False) -> str:
    """What makes a file or folder another user's to change.

    Args:
        strict: it is this user's, and only this user may write to it; otherwise it may be root's
            too, or sticky, or writable by this user's own group.
        closed: it lies where nobody else may enter, so that its mode is no matter.
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
    """The files of a cache, and those in its folder of single processes' programs."""
    for path in directory.iterdir():
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from path.iterdir()


def _warn(usual: Path, fault: str, instead: str) -> None:
    if not os.path.lexists(usual):  # no cache could be made there, and nobody's is refused
        return
    _log.warning(
        f"compile cache: another user may have put programs into {usual}: {fault}. None of them "
        f"is run; {instead}. To have a cache of your own: mv {usual.parent} {usual.parent}.old, or "
        f"set XDG_CACHE_HOME to a directory that only you may write to."
    )
