"""Scheduled functions: which worker has which, what is tried again, and what ends them.

Pure logic: no processes and no connections. Items are numbered from 1 on.
"""

import collections
import concurrent.futures
import dataclasses
import heapq
import threading
import time
from collections.abc import Callable
from typing import Any

from jtrain.errors import CodeError
from jtrain.server.transport.wire import Message

CancelledError = concurrent.futures.CancelledError
TRIES = 3  # deaths of a worker by one item after which the item is taken for their cause


class RemoteError(CodeError):
    """Exception of a function in a worker."""

    def __init__(self, words: str, *, worker: int, item: int, kind: str = ""):
        super().__init__(words)
        self.worker, self.item = worker, item
        """Where it was computed, and its number: 1 for the first that was scheduled."""
        self.kind = kind
        """Name of the exception's class; empty where the process ended or was too slow."""


class PendingErrors(Exception):  # noqa: N818  (they are several)
    """Errors of earlier items."""


class RemoteValue:
    """Result of a scheduled function, some time."""

    def __init__(self, number: int, name: str):
        self.number, self.name = number, name
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "pending"
        if self._done.is_set():
            state = "done" if self._error is None else type(self._error).__name__
        return f"RemoteValue({self.name}, item {self.number}, {state})"

    def done(self) -> bool:
        """Return whether there is a result, an error or a cancellation."""
        return self._done.is_set()

    def fetch(self, timeout: float | None = None) -> Any:
        """Return the result; wait for it.

        Args:
            timeout: seconds; None: without end.

        Raises:
            RemoteError: if the function raised.
            concurrent.futures.CancelledError: if it was cancelled, since another one raised.
            TimeoutError: if there is no result in time.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self.name} (item {self.number}) has no result in {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self._value

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """Set the result or the error, once."""
        if not self._done.is_set():
            self._value, self._error = value, error
            self._done.set()


@dataclasses.dataclass
class Item:
    """A scheduled function."""

    call: Message
    value: RemoteValue
    deadline: float = 0.0
    """Seconds that it may take; 0: any."""
    began: float = 0.0
    deaths: int = 0


class Items:
    """Queue of items, and those that run; safe for several threads.

    Args:
        most: items that may wait; `add` waits beyond.
    """

    def __init__(self, most: int):
        self.changed = threading.Condition()
        self.running: dict[int, Item] = {}
        """Items by worker."""
        self.finished = 0
        """Number of items that have ended, whichever way."""
        self.errors: list[BaseException] = []
        """Errors since the last `join`."""
        self.closed = False
        self.fatal: BaseException | None = None
        """Error after which nothing runs any more."""
        self._most, self._number = most, 0
        self._queue: collections.deque[Item] = collections.deque()
        self._early: list[int] = []  # numbers that ended before a lower one
        self._low = 0  # all up to this one have ended

    @property
    def low(self) -> int:
        """Number up to which all items have ended."""
        return self._low

    def add(self, name: str, make: Callable[[int], Message], deadline: float) -> RemoteValue:
        """Queue an item; wait for room.

        Raises:
            PendingErrors: if there are errors to raise first.
            BaseException: the fatal one, if there is one.
        """
        with self.changed:
            self.changed.wait_for(lambda: len(self._queue) < self._most or self.errors)
            if self.fatal is not None:
                raise self.fatal
            if self.errors:
                raise PendingErrors
            self._number += 1
            value = RemoteValue(self._number, name)
            self._queue.append(Item(make(self._number), value, deadline))
            self.changed.notify_all()
            return value

    def take(self, worker: int) -> Item | None:
        """Return the item of a worker, the one that it has or the next; None: there is none."""
        with self.changed:
            if worker not in self.running and self._queue:
                self.running[worker] = self._queue.popleft()
                self.running[worker].began = time.monotonic()
                self.changed.notify_all()
            return self.running.get(worker)

    def finish(
        self, worker: int, number: int, value: Any = None, error: BaseException | None = None
    ) -> None:
        """End the item of a worker with a result or an error; one of another worker is ignored."""
        with self.changed:
            item = self.running.get(worker)
            if item is None or item.value.number != number:
                return
            del self.running[worker]
            self._end(item, value, error)
            if error is not None:
                self.fail(error)
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Keep an error for `join`, and cancel what waits."""
        with self.changed:
            self.errors.append(error)
            self.cancel()

    def cancel(self) -> None:
        """Cancel what waits."""
        with self.changed:
            while self._queue:
                item = self._queue.popleft()
                words = f"{item.value.name} (item {item.value.number}) was cancelled"
                self._end(item, None, CancelledError(words))
            self.changed.notify_all()

    def put_back(self, worker: int, why: str) -> None:
        """Queue the item of a worker that died, before all others; give up at the third death."""
        with self.changed:
            item = self.running.get(worker)
            if item is None:
                return
            item.deaths += 1
            if item.deaths >= TRIES:
                words = (
                    f"{item.value.name} (item {item.value.number}) ended its worker {TRIES} times, "
                    f"the last one {why}: it is taken for the cause"
                )
                error = RemoteError(words, worker=worker, item=item.value.number)
                self.finish(worker, item.value.number, error=error)
                return
            del self.running[worker]
            if self.errors:  # all that wait are cancelled
                words = f"{item.value.name} (item {item.value.number}) was cancelled"
                self._end(item, None, CancelledError(words))
            else:
                self._queue.appendleft(item)
            self.changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        with self.changed:
            return not self._queue and not self.running

    def _end(self, item: Item, value: Any, error: BaseException | None) -> None:
        self.finished += 1
        item.value.settle(value, error)
        heapq.heappush(self._early, item.value.number)
        while self._early and self._early[0] == self._low + 1:
            self._low = heapq.heappop(self._early)
