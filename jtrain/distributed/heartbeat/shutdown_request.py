"""Signals that ask a process to end: the first, its repetitions, and a second one."""

import signal
import time
from collections.abc import Callable
from typing import Literal

# Ctrl-C, a scheduler, Slurm's `--signal=USR1@60`, a terminal that was closed.
ASKS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
REPEATS = 2.0  # seconds after the warning within which a signal repeats the first


def shutdown_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to end; not SIGHUP where `nohup` ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in ASKS if not (ignored and number == signal.SIGHUP))


def warning(name: str) -> str:
    """Return the line that answers the first signal, and says when a second one counts."""
    return (
        f"\n{name}: stopping after this step. From {REPEATS:g} s on a second signal stops at once, "
        f"and saves nothing.\n"
    )


class ShutdownRequest:
    """One request to end, however often its sender repeats the signal.

    Supervisors send a signal twice within milliseconds: `timeout` to its child and to the child's
    process group, a wrapper that forwards what its own group got, Slurm to all processes of a step.
    So a signal is a second one only where the first was answered with a warning `REPEATS` seconds
    before.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._came = False
        self._warned: float | None = None

    def signalled(self) -> Literal["first", "repeat", "second"]:
        """Take note of a signal, and return which one it is."""
        if not self._came:
            self._came = True
            return "first"
        return "repeat" if self.repeats else "second"

    def warned(self) -> None:
        """Take note that the person at the keyboard has been warned of a second signal."""
        self._warned = self._clock()

    @property
    def repeats(self) -> bool:
        """Whether a signal that came now would repeat the first one."""
        warned = self._warned
        return self._came and (warned is None or self._clock() < warned + REPEATS)
