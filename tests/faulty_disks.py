"""Disks that refuse: full, without permission, away or without open files."""

import contextlib
import ctypes
import os
import resource
from collections.abc import Callable, Iterator

import pytest

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


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to let a file grow past `size` bytes, as it does on a full disk.

    Within a test and not around it: pytest's own output may go to a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Disk:
    """The operations on names that end so, `times` of which fail."""

    def __init__(self, patch: pytest.MonkeyPatch, ending: str, number: int, times: float):
        self.ending, self.number, self.times = ending, number, times
        for name in ("open", "stat", "listdir", "scandir"):
            patch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, call: Callable) -> Callable:
        def failing(path, *args, **kwargs):
            if self.times > 0 and str(path).endswith(self.ending):
                self.times -= 1
                raise OSError(self.number, os.strerror(self.number), str(path))
            return call(path, *args, **kwargs)

        return failing
