"""Memory of large messages and updates: used again, since new pages cost more than their contents.

100 MB of new pages of 4 KB take 30 ms, and of 2 MB 10 ms; to copy 100 MB takes 8 ms.
"""

import sys
import threading
from collections.abc import Mapping

import numpy as np

TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb=1"
SMALL = 1 << 20  # bytes; malloc has smaller blocks at hand
ALIGNMENT = 64  # bytes at which JAX takes an array of numpy without a copy, on the CPU


def with_huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a process whose malloc asks the kernel for pages of 2 MB.

    XLA allocates what an update needs anew each time. glibc 2.35 or newer reads the variable;
    others ignore it. A choice that is made in `environ` stands.
    """
    chosen = environ.get(TUNABLES, "")
    if "glibc.malloc.hugetlb" in chosen:
        return {}
    return {TUNABLES: f"{chosen}:{HUGE_PAGES}" if chosen else HUGE_PAGES}


class BufferPool:
    """Buffers for the arrays of frames; one is used again when no array lies in it any more.

    A pool has as many buffers as were in use at once.
    """

    def __init__(self):
        self._buffers: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray:
        """Return `size` bytes at a multiple of 64, with any contents."""
        if size < SMALL:
            return _aligned(np.empty(size + ALIGNMENT, np.uint8), size)
        space = size + ALIGNMENT
        with self._lock:
            unused = [i for i in range(len(self._buffers)) if self._is_unused(i)]
            fits = [i for i in unused if space <= len(self._buffers[i]) <= 2 * space]
            if fits:
                return _aligned(self._buffers[fits[0]], size)
            if unused:  # for messages of another size
                del self._buffers[unused[0]]
            self._buffers.append(np.empty(space, np.uint8))
            return _aligned(self._buffers[-1], size)

    def _is_unused(self, index: int) -> bool:
        return _references(self._buffers, index) == _UNUSED


def _aligned(buffer: np.ndarray, size: int) -> np.ndarray:
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size]


def _references(buffers: list[np.ndarray], index: int) -> int:
    """Return the references to a buffer: every view of it, however it was made, is one."""
    return sys.getrefcount(buffers[index])


_UNUSED = _references([np.empty(1, np.uint8)], 0)
