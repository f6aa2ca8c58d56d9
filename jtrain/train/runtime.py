"""Runtime of a process: memory, garbage collection, the compilation cache, leaked tracers.

The compilation cache holds machine code, which JAX runs without a check. Its directory therefore
belongs to this user, and nobody else may write to it, to a folder above it (but the user's own
group, which has no other member on most systems), or to a file in it.
Nothing here imports JAX before it is called.
"""

import contextlib
import ctypes
import gc
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain.errors import ConfigError, LossError
from jtrain.io.environment import user_cache_dir

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # parameters of mallopt(3)
ARENAS = 4
"""With one, on which its threads wait for one another, XLA took 1.7 times as long to compile."""
LARGEST = 1 << 28
"""Bytes of an allocation above which it is returned to the system when it is freed."""
_log = logging.getLogger(__name__)


def reuse_memory() -> bool:
    """Make glibc reuse the memory of allocations up to 256 MiB; return whether it does.

    XLA:CPU allocates the temporaries of a program anew at every call. By default glibc maps an
    allocation of more than 32 MiB afresh, and in another thread than the first one of more than
    64 MiB, so each page of it faults at every step: a quarter of the time of a small transformer's
    step (docs/decisions.md). Here all come from few arenas, and 512 MiB at their ends
    are not returned. Arenas must be limited before JAX starts its threads; afterwards allocations
    of more than 64 MiB are mapped as before.

    Nothing is changed where the C library is another one, where `JAX_PLATFORMS` names an
    accelerator, or where the user has set `GLIBC_TUNABLES` or a variable `MALLOC_...`:
    `MALLOC_TRIM_THRESHOLD_=131072` turns it off.
    """
    decided = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    on_cpu = os.environ.get("JAX_PLATFORMS", "").split(",")[0] in ("", "cpu")
    if decided or not on_cpu or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    if not mallopt(MMAP_THRESHOLD, LARGEST):
        return False  # of an older glibc, whose limit is 32 MiB: the others would gain nothing
    return all([mallopt(TRIM_THRESHOLD, 2 * LARGEST), mallopt(ARENA_MAX, ARENAS)])


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Collect no cycles in a `with` block: tracing makes objects, and drops few of them."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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


def enable_compilation_cache() -> str | None:
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
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR") or _own_directory()
    jax.config.update("jax_compilation_cache_dir", directory)
    # By default only programs that took a second to compile are kept: none of a small model.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return directory


def usual_directory() -> Path:
    """Return `jtrain/compiled` in the user's cache directory, where programs usually are."""
    return Path(user_cache_dir()) / "jtrain" / "compiled"


def _own_directory() -> str | None:
    """Return the first of two directories that is safe, created if missing; None if neither is."""
    usual, faults, safe = usual_directory(), [], None
    for directory in (usual, Path(tempfile.gettempdir()) / f"jtrain-{os.getuid()}" / "compiled"):
        fault = _make_private(directory)
        if not fault:
            safe = str(directory)
            break
        faults.append(fault)
    if faults and os.path.lexists(usual):  # else there is nothing to distrust
        instead = f"{safe} is used instead" if safe else "each run compiles again"
        _log.warning(
            f"compile cache: another user may have put programs into {usual}: {faults[0]}. None of "
            f"them is run; {instead}. To have a cache of your own: mv {usual.parent} "
            f"{usual.parent}.old, or set XDG_CACHE_HOME to a directory that only you may write to."
        )
    return safe


def _make_private(directory: Path) -> str:
    """Create a directory that only this user may enter; return why it is unsafe, or ""."""
    with contextlib.suppress(OSError):  # a missing or unsafe folder is found below
        directory.parent.parent.mkdir(0o700, parents=True, exist_ok=True)
        for folder in (directory.parent, directory):
            folder.mkdir(0o700, exist_ok=True)
    fault = _find_fault(directory)
    if not fault:
        directory.chmod(0o700)
    return fault


def _find_fault(directory: Path) -> str:
    """Return why programs in a directory must not be run, as the end of a sentence; "" if they may.

    Every folder above the directory counts, since whoever may rename it controls its content.
    """
    me, group = os.getuid(), os.getgid()
    try:
        place = directory.resolve(strict=True)
        for folder in (place, place.parent):
            if fault := _fault(folder, {me}, stat.S_IWGRP | stat.S_IWOTH):
                return fault
        for folder in place.parent.parents:
            found = folder.stat()
            others = stat.S_IWOTH | (stat.S_IWGRP if found.st_gid != group else 0)
            writers = 0 if found.st_mode & stat.S_ISVTX else others  # sticky, as /tmp is
            if fault := _fault(folder, {me, 0}, writers):
                return fault
        closed = not place.stat().st_mode & 0o077  # nobody else may enter: modes do not matter
        for path in place.iterdir():
            with contextlib.suppress(FileNotFoundError):  # a temporary file of another process
                if fault := _fault(path, {me}, 0 if closed else stat.S_IWGRP | stat.S_IWOTH):
                    return fault
    except OSError as error:
        return f"{error.filename or directory} cannot be read ({error.strerror})"
    return ""


def _fault(path: Path, owners: set[int], writers: int) -> str:
    """Return why another user could change a file or folder; "" if nobody could."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link"
    if found.st_uid not in owners:
        return f"{path} belongs to user {found.st_uid}"
    if found.st_mode & writers:
        return f"{path} may be written by others (mode {found.st_mode & 0o7777:04o})"
    return ""


def explain_leaked_tracer(error: Exception) -> LossError | None:
    """Return an explanation of an error that a value of an earlier trace caused; None for others.

    A loss may store such a value in a global, closure, list or attribute, and use it in the next
    trace. That program needs one input more than it gets.
    """
    if not (isinstance(error, TypeError) and "Computation compiled for" in str(error)):
        return None
    return LossError(
        "the loss uses a value that it stored, in a global, a list or an attribute, while it was "
        "traced before, and which holds no numbers. Return values that are needed later as "
        'metrics: return loss, {"name": jt.Mean.of(values, batch["mask"])}; or print it: '
        'jax.debug.print("{}", x).'
    )
