"""Cluster coordinator: pure functions in processes of their own, as TensorFlow's class of the name.

A function that is scheduled runs in one of the workers. If a worker dies, its function runs again
in another one, which is the same result since the function is pure; whoever asks gets one result.
"""

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jtrain.errors import ConfigError, PeerError
from jtrain.server.engines.engine import LocalProcess
from jtrain.server.pool.child import MOST, start_child
from jtrain.server.pool.items import CancelledError, Items, PendingErrors, RemoteError, RemoteValue
from jtrain.server.pool.values import decode, encode, function_name
from jtrain.server.transport.listener import Listener
from jtrain.server.transport.wire import Message

QUEUE = 256 * 1024  # functions that may wait, as in TensorFlow
PATIENCE = 2.0  # seconds after which a waiting worker is told to ask again
POLL = 0.02  # seconds between two looks at the processes


class ClusterCoordinator:
    """Workers that run pure functions, in a `with` block.

    ```python
    with jt.ClusterCoordinator(workers=4) as coordinator:
        results = [coordinator.schedule(simulate, (seed,)) for seed in range(100)]
        coordinator.join()
        found = [result.fetch() for result in results]
    ```

    A function is one of a module or of the script that runs, or its name, `module:function`. Its
    arguments and its result are trees (lists, tuples, dicts) of arrays and plain values. Each
    worker is a process with a JAX of its own, on the CPU unless JAX_PLATFORMS says otherwise.

    Args:
        workers: number of processes.
        queue: functions that may wait; `schedule` waits beyond.
        deadline: seconds that a function may take, unless `schedule` gives it others; 0: any.
        start_timeout: seconds within which a worker must have imported JAX.
        log: takes a line for each worker that is started again.

    Raises:
        ConfigError: if a number is out of range.
    """

    def __init__(
        self,
        workers: int,
        *,
        queue: int = QUEUE,
        deadline: float = 0.0,
        start_timeout: float = 120.0,
        log: Callable[[str], object] = lambda line: None,
    ):
        _check_at_least("workers", workers, 1)
        _check_at_least("queue", queue, 1)
        _check_at_least("deadline", deadline, 0)
        _check_at_least("start_timeout", start_timeout, 0)
        self.workers, self.restarts = workers, 0
        """Number of workers, and how often one was started again."""
        self._deadline, self._start_timeout, self._log = deadline, start_timeout, log
        self._items = Items(queue)
        self._token = secrets.token_hex(16)
        self._processes: dict[int, LocalProcess] = {}
        self._started: dict[int, float] = {}  # time of the start, of those that have not asked yet
        self._failures = 0  # starts in a row without a request
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "ClusterCoordinator":
        listener = Listener(self._handle, token=self._token, most=MOST)
        self._stack.callback(listener.close)
        self._port = listener.port
        self._stack.callback(self._end)
        with self._items.changed:  # a worker that asks finds itself among the processes
            for worker in range(self.workers):
                self._start(worker)
        threading.Thread(target=self._watch, name="jtrain coordinator", daemon=True).start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._items.fatal is None:
                self.join()
        finally:
            self._stack.close()

    def schedule(
        self,
        fn: Callable | str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        deadline: float | None = None,
    ) -> RemoteValue:
        """Queue a function for the next free worker, and return its result-to-be.

        Args:
            deadline: seconds that it may take; a worker that takes longer is started again.

        Raises:
            ConfigError: if the function or an argument cannot be sent.
            ExceptionGroup: the errors of functions that were scheduled before, as `join`.
        """
        self._check_open()
        if isinstance(args, str | bytes) or not isinstance(args, Sequence):
            raise ConfigError(
                f"schedule takes the arguments of a function as a tuple, and {type(args).__name__} "
                f"was given: write schedule(fn, (x,))."
            )
        name = function_name(fn)
        if deadline is not None:
            _check_at_least("deadline", deadline, 0)
        what = f"an argument of {name}"
        given, arrays = encode([list(args), dict(kwargs or {})], what)

        def call(number: int) -> Message:
            return Message("call", {"item": number, "function": name, "given": given}, arrays)

        limit = self._deadline if deadline is None else deadline
        try:
            return self._items.add(name.rpartition(":")[2], call, limit)
        except PendingErrors:
            self.join()
            raise AssertionError("join raises the errors") from None

    def join(self, timeout: float | None = None) -> None:
        """Wait until every scheduled function has ended.

        After an error the functions that wait are cancelled, and those that run are waited for:
        when this raises, nothing runs, and more can be scheduled.

        Args:
            timeout: seconds; None: without end.

        Raises:
            ExceptionGroup: of the errors since the last `join`, each once, with worker and item.
            PeerError: if workers cannot be started.
            TimeoutError: if functions are still running then.
        """
        self._check_open()
        items = self._items
        with items.changed:
            ended = items.changed.wait_for(lambda: items.is_idle or items.fatal, timeout)
            if items.fatal is not None:
                raise items.fatal
            if not ended:
                raise TimeoutError(
                    f"{len(items.running)} functions are running after {timeout:g} s, the first "
                    f"one {next(iter(items.running.values())).value!r}"
                    if items.running
                    else f"functions are waiting after {timeout:g} s, and no worker has begun"
                )
            errors, items.errors = items.errors, []
        if errors:
            plural = "s" if len(errors) > 1 else ""
            raise BaseExceptionGroup(f"{len(errors)} scheduled function{plural} failed", errors)

    def done(self) -> bool:
        """Return whether every scheduled function has ended.

        Raises:
            ExceptionGroup: as `join`.
        """
        idle = self._items.is_idle
        if idle:
            self.join()
        return idle

    def fetch(self, values: Any, timeout: float | None = None) -> Any:
        """Return a tree with the result in the place of each `RemoteValue`; wait for them.

        Raises:
            RemoteError, CancelledError, TimeoutError: as `RemoteValue.fetch`.
        """
        is_remote = lambda x: isinstance(x, RemoteValue)
        get = lambda x: x.fetch(timeout) if is_remote(x) else x
        return jax.tree.map(get, values, is_leaf=is_remote)

    @property
    def pids(self) -> Mapping[int, int]:
        """Process id of each worker."""
        return {worker: process.pid for worker, process in self._processes.items()}

    def _check_open(self) -> None:
        if self._items.fatal is not None:
            raise self._items.fatal
        if not self._processes or self._items.closed:
            raise ConfigError(
                "a ClusterCoordinator has workers in its `with` block only: write "
                "`with jt.ClusterCoordinator(workers=4) as coordinator:`."
            )

    def _start(self, worker: int) -> None:
        self._processes[worker] = start_child(
            "pool_process", worker, port=self._port, token=self._token
        )
        self._started[worker] = time.monotonic()

    def _end(self) -> None:
        with self._items.changed:
            self._items.closed = True
            self._items.cancel()
            for worker, item in list(self._items.running.items()):
                error = CancelledError(f"{item.value.name} was running when the block ended")
                item.value.settle(error=error)
                del self._items.running[worker]
        for process in self._processes.values():
            process.kill()

    def _watch(self) -> None:
        """Start workers again that died, or whose function takes longer than its deadline."""
        while True:
            time.sleep(POLL)
            with self._items.changed:
                if self._items.closed or self._items.fatal is not None:
                    return
                for worker in range(self.workers):
                    try:
                        self._look_at(worker)
                    except PeerError as error:
                        self._items.fatal = error
                        self._items.cancel()
                        for item in self._items.running.values():
                            item.value.settle(error=error)

    def _look_at(self, worker: int) -> None:
        process, now = self._processes[worker], time.monotonic()
        item = self._items.running.get(worker)
        if item and item.deadline and now - item.began > item.deadline and not process.end:
            words = (
                f"{item.value.name} (item {item.value.number}) did not end within its deadline of "
                f"{item.deadline:g} s in worker {worker}, which is started again"
            )
            error = RemoteError(words, worker=worker, item=item.value.number, kind="TimeoutError")
            process.kill()
            self._items.finish(worker, item.value.number, error=error)
            self._restart(worker, "its function took too long")
        elif process.end:
            process.kill()  # its children
            last = process.output().strip().rpartition("\n")[2]
            why = f"{process.end}{f': {last}' if last else ''}"
            self._count_failures(worker, process)
            self._items.put_back(worker, f"by {why}")
            self._restart(worker, why)
        elif worker in self._started and now - self._started[worker] > self._start_timeout:
            raise PeerError(
                f"{process.output()}worker {worker} has not begun within start_timeout="
                f"{self._start_timeout:g} s. Its output is above."
            )

    def _count_failures(self, worker: int, process: LocalProcess) -> None:
        self._failures += worker in self._started
        if self._failures > 2 * self.workers:
            raise PeerError(
                f"{process.output()}worker {worker} ended ({process.end}) before it asked for "
                f"work, as {self._failures - 1} others did before. Its last output is above."
            )

    def _restart(self, worker: int, why: str) -> None:
        self.restarts += 1
        self._log(f"worker {worker} is started again: {why}")
        self._start(worker)

    def _handle(self, request: Message) -> Message:
        """Answer a worker; called in a thread of its own."""
        worker, pid = request.fields["worker"], request.fields["pid"]
        if request.name != "next":
            self._finish(request)
            return Message("thanks")
        end = time.monotonic() + PATIENCE
        items = self._items
        with items.changed:
            for _ in itertools.count():
                if items.closed:
                    return Message("end")
                if pid != self._processes[worker].pid:  # another has taken its place
                    return Message("end")
                self._started.pop(worker, None)
                self._failures = 0
                if item := items.take(worker):
                    fields = {**item.call.fields, "low": items.low, "token": self._token[:8]}
                    return Message("call", fields, item.call.arrays)
                left = end - time.monotonic()
                if left <= 0:
                    return Message("wait")
                items.changed.wait(left)
        raise AssertionError("endless")

    def _finish(self, request: Message) -> None:
        fields = request.fields
        worker, number = fields["worker"], fields["item"]
        value, error = None, None
        if request.name == "error":
            words = f"worker {worker}, item {number}: {fields['kind']}: {fields['why']}"
            words += f"\n{fields['frames'].rstrip()}" if fields["frames"] else ""
            error = RemoteError(words, worker=worker, item=number, kind=fields["kind"])
        else:
            value = decode(fields["value"], list(map(np.asarray, request.arrays)))
        with self._items.changed:
            if fields["pid"] == self._processes[worker].pid:
                self._items.finish(worker, number, value, error)


def _check_at_least(name: str, value: float, least: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value < float("inf"):
        raise ConfigError(f"ClusterCoordinator: {name}={value!r} is no number from {least} on.")
