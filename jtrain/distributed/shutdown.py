"""Ends of a process: on a shutdown signal, within the grace period, and without its peers."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Literal, NoReturn

from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.errors import STOPPED, DeviceError, PeerError, UserError

# Ctrl-C, a scheduler, Slurm's `--signal=USR1@60`, a closed terminal.
ASKS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
REPEATS = 2.0  # seconds after the warning within which a signal repeats the first


def shutdown_signals() -> tuple[signal.Signals, ...]:
    """Return the shutdown signals of this process; without SIGHUP if `nohup` ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in ASKS if not (ignored and number == signal.SIGHUP))


def warning(name: str) -> str:
    """Return the line that answers the first signal and announces the effect of a second one."""
    return (
        f"\n{name}: stopping after this step. From {REPEATS:g} s on a second signal stops at once, "
        f"and saves nothing.\n"
    )


class ShutdownRequest:
    """One request to shut down, however often its sender repeats the signal.

    Supervisors send a signal twice within milliseconds: `timeout` to its child and to the child's
    process group, Slurm to all processes of a step. So a signal counts as a second one only if a
    warning answered the first one at least `REPEATS` seconds before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._received = False
        self._warned: float | None = None

    def signalled(self) -> Literal["first", "repeat", "second"]:
        """Record a signal, and return which one it is."""
        if not self._received:
            self._received = True
            return "first"
        return "repeat" if self.repeats else "second"

    def warned(self) -> None:
        """Record that the user has been warned of the effect of a second signal."""
        self._warned = self._clock()

    @property
    def repeats(self) -> bool:
        """True if a signal now would repeat the first one."""
        warned = self._warned
        return self._received and (warned is None or self._clock() < warned + REPEATS)


MARGIN = 1.0  # seconds before the end of the grace period
_OVER = 0  # written to the pipe to stop the thread: no signal has this number


def exit_on_early_signals() -> None:
    """Exit with 75 on a shutdown signal from now on: nothing can be lost yet.

    A run that begins to train installs its own handlers and restores these at its end. Call this in
    the main thread of a process that does nothing else.
    """
    for number in shutdown_signals():
        signal.signal(number, handle_early_signal)


def handle_early_signal(number: int, frame: FrameType | None) -> None:
    """Exit, since nothing can be lost."""
    del frame
    when = "after the last step" if HEARTBEAT.now().step else "before the first step"
    exit_now(f"received {signal.Signals(number).name} {when}")


def exit_now(why: str) -> None:
    """Exit with 75 and a line; anything not on the disk is lost, as with a kill."""
    with contextlib.suppress(OSError):
        os.write(2, f"{why}; the same command resumes\n".encode())
    os._exit(STOPPED)


class SignalGuard:
    """Thread that enforces the grace period of a shutdown signal, in a `with` block.

    Python runs handlers in the main thread, between two calls of C: a compilation, a device or a
    disk may delay them for minutes. The kernel-level handler wakes this thread.

    Args:
        grace: seconds within which the process has to end.
        nothing_to_lose: returns whether the process may exit at once.
    """

    def __init__(self, grace: float, nothing_to_lose: Callable[[], bool]):
        self._grace, self._nothing_to_lose = grace, nothing_to_lose
        self._ended = threading.Event()

    def __enter__(self) -> "SignalGuard":
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        signal.set_wakeup_fd(self._previous)
        os.write(self._write_end, bytes([_OVER]))
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def _watch(self) -> None:
        request = ShutdownRequest()
        while not self._ended.is_set():
            (number,) = os.read(self._read_end, 1)
            if number not in ASKS:
                continue
            name, which = signal.Signals(number).name, request.signalled()
            if which == "second":
                exit_now(f"received a second signal ({name}): exited at once")
            if which == "repeat":
                continue
            if self._nothing_to_lose():
                exit_now(f"received {name}: nothing to save")
            late = threading.Timer(
                max(self._grace - MARGIN, 0.0), self._exit_late, [time.monotonic()]
            )
            late.daemon = True
            late.start()  # before the warning, which a stuck reader may delay
            with contextlib.suppress(OSError):
                os.write(2, warning(name).encode())
            request.warned()

    def _exit_late(self, since: float) -> None:
        if not self._ended.is_set():
            exit_now(f"not ended {time.monotonic() - since:.0f} s after the signal (grace)")


class NotedSignals:
    """Shutdown signals, noted in a `with` block; a second one has its usual effect."""

    def __init__(self):
        self.name = ""
        """Name of the signal that came; empty before."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "NotedSignals":
        self._previous = {number: signal.getsignal(number) for number in shutdown_signals()}
        self.install()
        return self

    def install(self) -> None:
        """Install the handlers, also in the place of those that a library has installed since."""
        for number in shutdown_signals():
            if not self.name:
                signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        del frame
        self.name = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)


_code: int | None = None  # exit code of the uncaught error
_previous: Callable[..., object] | None = None  # the previous excepthook


def fail_alone() -> None:
    """Make an uncaught error end this process, after its traceback, without the others.

    The threads end first, and handlers registered with `atexit` after this call run; earlier ones
    do not, JAX's shutdown among them: call this after importing JAX. `SystemExit` does not reach
    this hook: call `exit_alone` instead. Ctrl-C is unchanged.
    """
    global _previous
    if _previous is None:
        _previous, sys.excepthook = sys.excepthook, _excepthook
        atexit.register(_exit)


def exit_alone(code: int) -> NoReturn:
    """Exit with a code that is not 0, without waiting for other processes."""
    HEARTBEAT.note_failure()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or closed
            stream.flush()
    os._exit(code)


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    global _code
    interactive = hasattr(sys, "ps1")  # an error at a prompt ends nothing
    if isinstance(error, Exception) and not interactive:
        HEARTBEAT.note_failure()
        # The codes of the command line.
        _code = error.code if isinstance(error, UserError | PeerError | DeviceError) else 1
    (_previous or sys.__excepthook__)(kind, error, trace)


def _exit() -> None:
    if _code is not None:
        exit_alone(_code)
