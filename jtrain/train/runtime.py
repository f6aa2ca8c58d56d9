"""Runtime of a process: its allocator of memory, and garbage collection; it imports no JAX."""

import contextlib
import ctypes
import gc
import os
import platform
from collections.abc import Iterator

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # parameters of mallopt(3)
ARENAS = 4
"""Of one, the threads of XLA's compiler wait for one another: it took 1.7 times as long."""
LARGEST = 1 << 28
"""Bytes of an allocation above which it is returned to the system when it is freed."""


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
