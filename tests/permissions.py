"""Permissions that hold for whoever runs the tests: root may read and rename anything otherwise."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER = 1, 2, 3  # capabilities(7)
_VERSION = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


@contextlib.contextmanager
def permissions_hold() -> Iterator[None]:
    """Within, this thread and those that it starts are bound by permissions, as root too."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION, 0), (_Sets * 2)()
    _call(libc.capget(ctypes.byref(header), sets))
    before = sets[0].effective
    sets[0].effective &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH | 1 << FOWNER)
    _call(libc.capset(ctypes.byref(header), sets))
    try:
        yield
    finally:
        sets[0].effective = before
        _call(libc.capset(ctypes.byref(header), sets))


def _call(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "capset")
