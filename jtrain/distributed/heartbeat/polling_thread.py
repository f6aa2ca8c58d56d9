"""A thread that looks at something every now and then."""

import threading


class PollingThread:
    """While it is entered its `_watch` runs on a thread, which is to end when `_over` is set.

    Args:
        name: of the thread.
        tick: seconds between two looks.
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
        """Each kind of looker has its own."""
        raise NotImplementedError
