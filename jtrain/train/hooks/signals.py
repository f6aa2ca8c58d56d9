"""Ends a run where it can go on again when a signal asks it to end."""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils

from jtrain.core.loop import Hook, Stop, StoppedError
from jtrain.core.types import Metrics
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.heartbeat.early_signals import SignalGuard, leave
from jtrain.distributed.heartbeat.shutdown_request import ShutdownRequest, shutdown_signals, warning

T = TypeVar("T")
# Of all runs of this process: JAX wants numbers that rise, and a run that goes back has lower ones.
_CALLS = itertools.count(1)
_ANY = "asked to end (a signal to one of the processes)"


class Signals(Hook):
    """Stops the loop after the step in which SIGINT, SIGTERM, SIGUSR1 or SIGHUP came.

    While a batch is waited for, or in an evaluation before its next batch, it stops at once. The
    handler itself does nothing but note the signal, or raise `StoppedError` where that is allowed.

    In several processes one that gets a signal is enough: all stop after the same step, which they
    agree on within about a second.

    A second signal acts at once, as it would without this: KeyboardInterrupt, or the end of the
    process. One that comes within two seconds of the warning repeats the first and changes nothing,
    also after the block (`ShutdownRequest`). Within `with Signals() as signals:` only; the handlers
    of before are put back after it. Python handles signals in the main thread only: entered in
    another, this does nothing. SIGHUP is left alone where it is ignored, as under `nohup`.

    A process of the command line, which nothing else depends on, ends with 75 at once where nothing
    is to be lost, and in any case within its grace.

    Args:
        every: steps; those of a call where one takes several.
        grace: seconds within which a process of the command line has ended.
    """

    def __init__(self, *, every: int = 1, grace: float = 25.0):
        self.every = every
        self.why: str | None = None
        """What came, None while nothing has: also for a signal after the last step."""
        self.fits: Callable[[], bool] = lambda: True
        """Says whether a step and a save fit into the grace."""
        self._grace = grace
        self._before: dict[signal.Signals, Any] = {}
        self._request = ShutdownRequest()
        self._several = self._may_raise = False
        self._guard: SignalGuard | None = None

    def __enter__(self) -> "Signals":
        self._several = jax.distributed.is_initialized()  # process_count() would start the devices
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) is leave and not self._several:
                self._guard = SignalGuard(self._grace, self._nothing_to_lose).__enter__()
            for number in shutdown_signals():
                # Of several processes JAX listens for SIGTERM, and tells the others.
                if not (self._several and number == signal.SIGTERM):
                    before = signal.signal(number, self._came)
                    spent = isinstance(before, _UnlessRepeated)  # of a run that was stopped
                    self._before[number] = before.before if spent else before
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            before = _default(number) if handler is None else handler
            repeats = self._request.repeats
            signal.signal(number, _UnlessRepeated(self._request, before) if repeats else before)
        self._before.clear()
        if self._guard is not None:
            self._guard.__exit__()
            self._guard = None

    def on_state(self, step: int, state: Any, metrics: Metrics) -> Stop | None:
        """Asks to stop if a signal came; at several processes, to any of them."""
        if self._several:  # 29 us; JAX counts calls, one by one
            agreed = multihost_utils.reached_preemption_sync_point(next(_CALLS))
            return Stop(self.why or _ANY) if agreed else None
        return None if self.why is None else Stop(self.why)

    def through(self, batches: Iterable[T], then: str = "step") -> Iterator[T]:
        """The same batches; a signal that comes while one is waited for raises `StoppedError`.

        In several processes it does not, for they stop together. The pulse says while one is
        waited for, and that the phase `then` goes on.
        """
        left = iter(batches)
        while True:
            HEARTBEAT.phase("data")
            self._may_raise = not self._several  # as `interruptible`, which takes 2 us
            try:
                if self._may_raise and self.why is not None:
                    raise StoppedError(Stop(self.why))
                batch = next(left)
            except StopIteration:
                return
            finally:
                self._may_raise = False
            HEARTBEAT.phase(then)
            yield batch

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within it a signal raises `StoppedError`, or has; not in one of several processes."""
        self._may_raise = not self._several
        try:
            if self._may_raise and self.why is not None:
                raise StoppedError(Stop(self.why))
            yield
        finally:
            self._may_raise = False

    def _nothing_to_lose(self) -> bool:
        return HEARTBEAT.now().step == 0 or not self.fits()

    def _came(self, number: int, frame: FrameType | None) -> None:
        which, name = self._request.signalled(), signal.Signals(number).name
        if which == "repeat":
            return
        if which == "second":
            if self._guard is None:  # which ends the process otherwise
                _act(number, _default(number), frame)
            return
        self.why = "interrupted (Ctrl-C)" if number == signal.SIGINT else f"asked to end ({name})"
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._guard is None:  # which warns otherwise
            with contextlib.suppress(OSError):  # not print: what was interrupted may be printing
                os.write(2, warning(name).encode())
        self._request.warned()
        if self._may_raise:
            raise StoppedError(Stop(self.why))


class _UnlessRepeated:
    """A handler that puts the one of before back at the first signal that is no repetition."""

    def __init__(self, request: ShutdownRequest, before: Any):
        self.before = before
        self._request = request

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._request.repeats:
            signal.signal(number, self.before)
            _act(number, self.before, frame)


def _default(number: int) -> Any:
    """What Python does at a signal that nobody handles; also where another library handled it.

    Python cannot put back a handler that was set outside Python.
    """
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _act(number: int, handler: Any, frame: FrameType | None) -> None:
    """Do what a handler does at a signal, the kernel's default among them."""
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
