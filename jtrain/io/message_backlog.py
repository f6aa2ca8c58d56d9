"""Lines that wait until there is somebody to tell them to."""

from collections.abc import Callable


class MessageBacklog:
    """Takes lines on any thread, and tells them in order once it knows by whom."""

    def __init__(self):
        self._waiting: list[str] = []
        self._tell: Callable[[str], object] | None = None

    def __call__(self, line: str) -> None:
        """Tell a line, or keep it until somebody tells it."""
        self._waiting.append(line)
        self._tell_all()

    def tell_by(self, tell: Callable[[str], object]) -> None:
        """Have all lines told to `tell` from now on, those that wait first."""
        self._tell = tell
        self._tell_all()

    def _tell_all(self) -> None:
        while self._tell is not None and self._waiting:
            self._tell(self._waiting.pop(0))
