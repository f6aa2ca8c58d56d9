"""Signals: a run that a signal asks to end stops where it can be resumed."""

import contextlib
import dataclasses
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils

from jtrain.core.loop import IN_FLIGHT, Stop, StoppedError
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.shutdown import (
    ShutdownRequest,
    SignalGuard,
    handle_early_signal,
    shutdown_signals,
    warning,
)
from jtrain.io.formatting import format_duration
from jtrain.io.log import LOG


@dataclasses.dataclass
class GraceBudget:
    """Measured times of what a run does when it is asked to end, beside its grace period."""

    seconds: float = 25.0
    """The grace period."""
    call: Callable[[], float] = lambda: 0.0
    """Gives the seconds of a call of the step; 0 until measured."""
    save: float | None = None
    """Seconds of a save; None until measured."""
    in_flight: int = IN_FLIGHT
    warned: bool = False

    @property
    def needed(self) -> float:
        """Seconds for the calls in flight, one more, and a save; 0 until both are measured."""
        call = self.call()
        return (self.in_flight + 1) * call + self.save if call and self.save else 0.0

    def fits(self) -> bool:
        """Return whether a save fits into the grace period; True until it is known."""
        return self.needed <= self.seconds

    def warn(self) -> None:
        """Log once if a save would not fit."""
        if self.warned or self.fits():
            return
        self.warned = True
        LOG.warning(
            f"checkpoint.grace: {format_duration(self.seconds)} are too short for the steps in "
            f"flight and a save, about {format_duration(self.needed)}. Asked to end, this run ends "
            f"at once and later resumes from its last checkpoint. Lower checkpoint.every, or set "
            f"checkpoint.grace={self.needed * 1.5:.0f} if the scheduler waits that long before it "
            f"kills the run."
        )


T = TypeVar("T")
# Shared by all runs of this process: JAX wants increasing numbers, and a rollback lowers the step.
_CALLS = itertools.count(1)
_ANY = "asked to end (a signal to one of the processes)"


class Signals:
    """Handlers that stop the loop after the step in which SIGINT, SIGTERM, SIGUSR1 or SIGHUP came.

    The run stops at once while it waits for a batch, also in an evaluation. The signal handler only
    records the signal, or raises `StoppedError` where that is allowed.

    In several processes a signal to one is enough: all stop after the same step, which they agree
    on within about a second.

    A second signal has its usual effect at once: KeyboardInterrupt, or the end of the process. A
    signal within two seconds of the warning counts as a repetition and changes nothing, also after
    the block (`ShutdownRequest`). Handlers are installed within `with Signals() as signals:` and
    restored after it. Python handles signals in the main thread only; in another thread the block
    does nothing. SIGHUP is left alone if it is ignored, as under `nohup`.

    A process of the command line, which nothing else depends on, exits with 75: at once if nothing
    would be lost, and always within the grace period.

    Args:
        budget: the seconds within which a process of the command line exits, and those that a save
            takes; 25 s by default.
    """

    def __init__(self, *, budget: GraceBudget | None = None):
        self.why: str | None = None
        """The signal that came, also after the last step; None before."""
        self.budget = budget or GraceBudget()
        """Times that decide whether a save fits into the grace period."""
        self._before: dict[signal.Signals, Any] = {}
        self._request = ShutdownRequest()
        self._several = self._may_raise = False
        self._guard: SignalGuard | None = None

    def __enter__(self) -> "Signals":
        self._several = jax.distributed.is_initialized()  # process_count() would start the devices
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) is handle_early_signal and not self._several:
                self._guard = SignalGuard(self.budget.seconds, self._nothing_to_lose).__enter__()
            for number in shutdown_signals():
                # With several processes JAX handles SIGTERM and informs the other processes.
                if not (self._several and number == signal.SIGTERM):
                    before = signal.signal(number, self._handle)
                    stale = isinstance(before, _UnlessRepeated)  # left by a run that was stopped
                    self._before[number] = before.before if stale else before
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

    def check(self) -> None:
        """Raise `StoppedError` if a signal came, to any of several processes; before each call.

        With several processes it takes 29 us; JAX counts the calls, one by one.
        """
        asked = self.why is not None
        if self._several:
            asked = multihost_utils.reached_preemption_sync_point(next(_CALLS))
        if asked:
            raise StoppedError(Stop(self.why or _ANY))

    def through(self, batches: Iterable[T], then: str = "step") -> Iterator[T]:
        """Yield the same batches; a signal while waiting for one raises `StoppedError`.

        Several processes do not raise, because they stop together. The heartbeat gets the phase
        `data` while a batch is awaited, and then the phase `then`.
        """
        remaining = iter(batches)
        while True:
            HEARTBEAT.phase("data")
            self._may_raise = not self._several  # inlined `interruptible`, which takes 2 us
            try:
                if self._may_raise and self.why is not None:
                    raise StoppedError(Stop(self.why))
                batch = next(remaining)
            except StopIteration:
                return
            finally:
                self._may_raise = False
            HEARTBEAT.phase(then)
            yield batch

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal raise `StoppedError` in the block, unless there are several processes."""
        self._may_raise = not self._several
        try:
            if self._may_raise and self.why is not None:
                raise StoppedError(Stop(self.why))
            yield
        finally:
            self._may_raise = False

    def _nothing_to_lose(self) -> bool:
        return HEARTBEAT.now().step == 0 or not self.budget.fits()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        which, name = self._request.signalled(), signal.Signals(number).name
        if which == "repeat":
            return
        if which == "second":
            if self._guard is None:  # a guard ends the process itself
                _run_handler(number, _default(number), frame)
            return
        self.why = "interrupted (Ctrl-C)" if number == signal.SIGINT else f"asked to end ({name})"
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._guard is None:  # a guard warns itself
            with contextlib.suppress(OSError):  # not print: the interrupted code may be printing
                os.write(2, warning(name).encode())
        self._request.warned()
        if self._may_raise:
            raise StoppedError(Stop(self.why))


class _UnlessRepeated:
    """Handler that restores the previous one at the first signal that is not a repetition."""

    def __init__(self, request: ShutdownRequest, before: Any):
        self.before = before
        self._request = request

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._request.repeats:
            signal.signal(number, self.before)
            _run_handler(number, self.before, frame)


def _default(number: int) -> Any:
    """Return Python's default handler; Python cannot restore a handler that C code had set."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _run_handler(number: int, handler: Any, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
