"""The parts of a rehearsal, told one by one with the time that each took."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass
class Stage:
    """Something that was done."""

    name: str
    said: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.name:10} {self.said:56} {self.seconds:7.2f} s"


class Stages:
    """Does things one after the other, and tells each when it is done or has failed."""

    def __init__(self, tell: Callable[[str], None]):
        self.done: list[Stage] = []
        self._tell = tell

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """A block that is timed; what it has to say goes into `said`."""
        stage, begun = Stage(name), time.perf_counter()
        try:
            yield stage
        except BaseException:
            self._tell(f"{name:10} failed after {time.perf_counter() - begun:.2f} s:")
            raise
        stage.seconds = time.perf_counter() - begun
        self.done.append(stage)
        self._tell(str(stage))
