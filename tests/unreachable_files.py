"""Operations on files that fail as on a share that is away, or without open files."""

import os
from collections.abc import Callable

import pytest


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
