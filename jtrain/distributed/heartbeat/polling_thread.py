"""Thread that runs a check at intervals."""

import threading


class PollingThread:
    """Base of a thread that runs `_watch` in a `with` block and ends when `_over` is set.

    Args:
        name: name of the thread.
        tick: seconds between two checks.
    """

    def __init__(self, name: str, tick: float):
        self._tick, self._over = tick, threading.Event()
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        """Check until `_over` is set; subclasses implement this."""
        raise NotImplementedError
