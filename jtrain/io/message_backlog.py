"""Message backlog: lines that wait until a log takes them."""

from collections.abc import Callable


class MessageBacklog:
    """Queue of log lines, filled on any thread and sent in order once a log is set."""

    def __init__(self):
        self._waiting: list[str] = []
        self._log: Callable[[str], object] | None = None

    def __call__(self, line: str) -> None:
        """Log a line, or queue it until `send_to` sets the log."""
        self._waiting.append(line)
        self._send_all()

    def send_to(self, log: Callable[[str], object]) -> None:
        """Send all lines to `log` from now on, the queued ones first."""
        self._log = log
        self._send_all()

    def _send_all(self) -> None:
        while self._log is not None and self._waiting:
            self._log(self._waiting.pop(0))
