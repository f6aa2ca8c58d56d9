"""Memory that a run uses: of its devices where the backend says, else of the process."""

import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_PAGE = resource.getpagesize()
_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


class MemoryUse(NamedTuple):
    """Bytes in use, and the most that were in use so far."""

    in_use: int
    peak: int
    of: str
    """device: the fullest device of this process; process: its resident memory."""


def measure_memory(devices: Sequence[Any]) -> MemoryUse:
    """Return the memory of the fullest of the devices, or the resident memory of this process.

    A CPU has no statistics of its own: its arrays are in the memory of the process, with all else.
    """
    stats = [stats for device in devices if (stats := device.memory_stats())]
    if stats:
        in_use = max(each.get("bytes_in_use", 0) for each in stats)
        return MemoryUse(in_use, max(each.get("peak_bytes_in_use", 0) for each in stats), "device")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):  # not Linux
        resident = peak
    return MemoryUse(resident, max(peak, resident), "process")
