"""Timed stages of a dry run, logged one by one."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass
class Stage:
    """A completed stage."""

    name: str
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.name:10} {self.detail:56} {self.seconds:7.2f} s"


class Stages:
    """Consecutive stages, each logged when it completes or fails."""

    def __init__(self, log: Callable[[str], None]):
        self.done: list[Stage] = []
        self._log = log

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Time a block; the block may set `detail`."""
        stage, start = Stage(name), time.perf_counter()
        try:
            yield stage
        except BaseException:
            self._log(f"{name:10} failed after {time.perf_counter() - start:.2f} s:")
            raise
        stage.seconds = time.perf_counter() - start
        self.done.append(stage)
        self._log(str(stage))
