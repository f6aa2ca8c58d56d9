"""Shutdown signals: the first one, its repetitions, and a second one."""

import signal
import time
from collections.abc import Callable
from typing import Literal

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
    process group, a wrapper that forwards the signal of its own group, Slurm to all processes of a
    step. So a signal counts as a second one only if a warning answered the first one at least
    `REPEATS` seconds before.

    Args:
        clock: returns seconds.
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
