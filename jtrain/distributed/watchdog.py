"""Limits of each phase of a process, and the watchdog that ends a stuck run."""

import collections
import contextlib
import dataclasses
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jtrain.distributed.heartbeat import HEARTBEAT, Beat, Heartbeat
from jtrain.errors import FAULT, HUNG, UserError
from jtrain.errors.spelling import did_you_mean
from jtrain.io.regular_files import open_regular

# Seconds without a beat. A beat comes with each phase, each step and each batch of an evaluation.
# The limits are generous: what a large run on a slow disk may need.
FLOORS: Mapping[str, float] = {
    "start": 1800.0,
    "compile": 3600.0,
    "restore": 1800.0,
    "data": 600.0,
    "step": 300.0,
    "eval": 1800.0,
    "save": 1800.0,
    "sampling": 1800.0,
    "end": 600.0,
}
STEPS = 5  # multiple of the median step
_WINDOW = 101  # steps in the median


@dataclasses.dataclass(frozen=True)
class Patience:
    """Seconds that each phase may last; a step may last several median steps, if that is longer."""

    floors: Mapping[str, float] = dataclasses.field(default_factory=lambda: FLOORS)

    @classmethod
    def parse(cls, text: str) -> "Patience":
        """Parse `60` (all phases) or `step=60,compile=600` (these phases); empty: the default.

        Raises:
            UserError: if the text is neither.
        """
        if not text:
            return cls()
        found = dict(FLOORS)
        for part in text.split(","):
            name, equals, seconds = part.strip().rpartition("=")
            try:
                number = float(seconds)
            except ValueError:
                number = 0.0
            if not 0 < number < float("inf") or (equals and name not in FLOORS):
                why, meant = f"{part.strip()!r} is neither seconds nor PHASE=SECONDS", "."
                if name and name not in FLOORS:
                    why, meant = f"{name} is not a phase", did_you_mean(name, FLOORS) or "."
                raise UserError(
                    f"patience {text!r}: {why}; the phases are {', '.join(FLOORS)}{meant} Type "
                    f"--patience 60, or --patience step=60,eval=600"
                )
            found.update({name: number} if equals else dict.fromkeys(FLOORS, number))
        return cls(found)

    def times(self, factor: float) -> "Patience":
        """Return a patience with every limit multiplied by a factor."""
        return Patience({name: factor * seconds for name, seconds in self.floors.items()})

    def seconds(self, phase: str, step: float | None) -> float:
        """Return the limit of a phase, given the seconds of a median step (None: unknown).

        The first step may take as long as its compilation.
        """
        if phase not in {"step", "hooks"}:
            return self.floors[phase]
        if step is None:
            return max(self.floors["step"], self.floors["compile"])
        return max(self.floors["step"], STEPS * step)

    @property
    def stopped(self) -> float:
        """Seconds for which a process may be stopped by a signal, in any phase."""
        return self.floors["step"]


class WatchedProcess:
    """A process that is observed at intervals: how long has it been at the same beat?

    Only time between two observations counts: if the machine slept, the observer was stopped, or
    the wall clock jumped, no process was stuck.
    """

    def __init__(self, patience: Patience):
        self._patience = patience
        self.beat: Beat | None = None
        """The last observed beat."""
        self.still = 0.0
        """Seconds since its last beat."""
        self.stopped = 0.0
        """Seconds for which a signal has stopped it; 0: not stopped."""
        self._steps: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._last_step: Beat | None = None

    @property
    def step_seconds(self) -> float | None:
        """The median step; None before there are steps."""
        return statistics.median(self._steps) if self._steps else None

    @property
    def limit(self) -> float:
        """Seconds that its phase may last, or that it may be stopped if that limit is exceeded."""
        if self.stopped_too_long:
            return self._patience.stopped
        phase = self.beat.phase if self.beat else "start"
        return self._patience.seconds(phase, self.step_seconds)

    @property
    def stopped_too_long(self) -> bool:
        """True if a signal has stopped it for longer than allowed."""
        return self.stopped > self._patience.stopped

    @property
    def late(self) -> bool:
        """True if it has been at the same beat, or stopped, for too long."""
        return self.stopped_too_long or self.still > self.limit

    def update(self, beat: Beat, seconds: float, *, stopped: bool = False) -> bool:
        """Record an observation `seconds` after the last one; return whether the process is late.

        Args:
            stopped: whether a signal such as SIGSTOP has stopped it.
        """
        before, self.beat = self.beat, beat
        self.stopped = self.stopped + seconds if stopped else 0.0
        if before is None or beat.number != before.number:
            self.still = 0.0
            self._learn(beat)
        else:
            self.still += seconds
        return self.late

    def _learn(self, beat: Beat) -> None:
        """Record how long steps take; evaluations and saves between steps weigh little."""
        last = self._last_step
        if last is None or beat.step != last.step:
            if last is not None and 0 < last.step < beat.step:
                self._steps.append((beat.time - last.time) / (beat.step - last.step))
            self._last_step = beat


class PollingThread:
    """Base of a thread that runs `_watch` in a `with` block and ends when `_over` is set.

    Args:
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


# Multiple of the launcher's patience: the launcher has to notice a hang first. Users do not choose
# these limits, so they are safe: 20 minutes without a step.
FACTOR = 4.0
PATIENCE = "JTRAIN_PATIENCE"  # other limits, as `--patience` takes them
TICK = 1.0  # seconds between two checks


class Watchdog(PollingThread):
    """Check of this process's own heartbeat, in a `with` block.

    On a hang it writes the stacks of all threads to `stacks-PROCESS.txt` in the run's directory and
    ends the process with 124. It waits for a user at a debugger, and in an interactive session,
    such as a notebook, it only writes and logs. A process that was stopped, or a machine that
    slept, was not stuck. Code that holds the GIL is visible only from outside (`jtrain launch`);
    under a launcher this watchdog does nothing, unless the environment sets its limits.

    Args:
        patience: by default the limits in the environment, or `FACTOR` times the usual ones.
    """

    def __init__(
        self,
        run: Path,
        process: int,
        *,
        patience: Patience | None = None,
        heartbeat: Heartbeat = HEARTBEAT,
        tick: float = TICK,
        leave: Callable[[int], object] = os._exit,
    ):
        super().__init__("watchdog", tick)
        text = os.environ.get(PATIENCE, "")
        usual = Patience.parse(text) if text else Patience().times(FACTOR)
        self._watched, self._heartbeat = WatchedProcess(patience or usual), heartbeat
        self._stacks, self._process = run / f"stacks-{process}.txt", process
        self._leave = leave
        if heartbeat.watched and not text:
            self._over.set()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(self._tick):
            now = time.monotonic()
            # Two ticks at most: more means that the process or the machine was stopped.
            seconds, before = min(now - before, 2 * self._tick), now
            # Only where it matters: under Ray, Python 3.11.7 crashed in f_back of another thread.
            if self._watched.still > self._watched.limit / 2 and _debugged():
                seconds = 0.0
            if self._watched.update(self._heartbeat.now(), seconds):
                self._end()
                return

    def _end(self) -> None:
        beat = self._heartbeat.now()
        message = (
            f"process {self._process} has been in the phase {beat.phase}, step {beat.step}, for "
            f"{self._watched.still:.0f} s (allowed {self._watched.limit:.0f} s): stuck. The stacks "
            f"of its threads: {self._stacks}. If it was not stuck, {PATIENCE}={beat.phase}="
            f"{3 * self._watched.limit:.0f} allows more.\n"
        )
        with contextlib.suppress(OSError), open_regular(self._stacks, "wb") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        with contextlib.suppress(OSError):
            os.write(2, message.encode())
        if not (hasattr(sys, "ps1") or "ipykernel" in sys.modules):  # interactive
            self._leave(HUNG)


class DeadlockWatch(PollingThread):
    """Check that XLA's CPU devices compute while Python waits for them, in a `with` block.

    If the process has used no processor time (`clock`) for `patience` checks, a second each, while
    its main thread waits in JAX (`waits`), then the collectives of its devices wait for one another
    (`distributed/cpu_threads.py`). The process ends with 70 and the `advice`, before
    XLA aborts it after 60 s with the stacks of its threads.
    """

    def __init__(
        self,
        advice: str,
        *,
        patience: int = 50,
        tick: float = TICK,
        clock: Callable[[], float] = time.process_time,
        waits: Callable[[], bool] | None = None,
        leave: Callable[[int], object] = os._exit,
    ):
        super().__init__("deadlock watch", tick)
        self._advice, self._patience, self._clock = advice, patience, clock
        self._waits, self._leave = waits or _waits_in_jax, leave

    def _watch(self) -> None:
        idle, before = 0, self._clock()
        while not self._over.wait(self._tick):
            now = self._clock()
            idle = idle + 1 if now - before < IDLE and self._waits() else 0
            before = now
            if idle >= self._patience:
                message = f"The collectives of the CPU devices wait for one another. {self._advice}"
                with contextlib.suppress(OSError):
                    os.write(2, f"{message}\n".encode())
                self._leave(FAULT)
                return


IDLE = 0.01  # seconds of processor time between two checks below which nothing is computed


def _waits_in_jax() -> bool:
    """Return whether the main thread is in a call of JAX, or of the loop that waits for one."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    name = frame.f_globals.get("__name__", "") if frame else ""
    return name.partition(".")[0] == "jax" or name == "jtrain.core.loop"


def _debugged() -> bool:
    """Return whether a debugger steps through a thread of this process."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_globals.get("__name__") in {"bdb", "pdb"}:
                return True
            frame = frame.f_back
    return False


DOING: Mapping[str, str] = {
    "start": "building the experiment and reading its data",
    "compile": "compiling the step",
    "restore": "initializing or restoring the state",
    "eval": "evaluating",
}
FIRST = 5.0  # seconds before the first message; the interval doubles with each message


class StartupProgress(PollingThread):
    """Log how long a phase has lasted, in a `with` block: after 5 s, 10 s, 20 s, 40 s, ...

    A large model compiles for minutes, and a silent run looks like a hang.

    Args:
        tell: takes a line, on a thread.
        first: seconds before the first line of a phase.
        tick: seconds between two checks.
    """

    def __init__(
        self,
        tell: Callable[[str], object],
        *,
        heartbeat: Heartbeat = HEARTBEAT,
        first: float = FIRST,
        tick: float = 0.5,
    ):
        super().__init__("slow", tick)
        self._tell, self._heartbeat, self._first = tell, heartbeat, first

    def _watch(self) -> None:
        last, since, due = self._heartbeat.now(), time.monotonic(), self._first
        while not self._over.wait(self._tick):
            beat, now = self._heartbeat.now(), time.monotonic()
            if beat.number != last.number:
                last, since, due = beat, now, self._first
            elif now - since >= due and beat.phase in DOING:
                with contextlib.suppress(OSError, ValueError):  # the output is closed
                    self._tell(f"{DOING[beat.phase]}: {now - since:.0f} s so far")
                due *= 2
