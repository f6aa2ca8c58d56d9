"""Patience: how long a process may stay in a phase before it counts as stuck."""

import collections
import dataclasses
import difflib
import statistics
from collections.abc import Mapping

from jtrain.distributed.heartbeat.heartbeat import Beat
from jtrain.errors import UserError

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
            number = _seconds(seconds)
            if number is None or (equals and name not in FLOORS):
                raise UserError(f"patience {text!r}: {_advice(part.strip(), name)}")
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
                self._steps.append((beat.seconds - last.seconds) / (beat.step - last.step))
            self._last_step = beat


def _advice(part: str, name: str) -> str:
    why, meant = f"{part!r} is neither seconds nor PHASE=SECONDS", "."
    if name and name not in FLOORS:
        near = difflib.get_close_matches(name, FLOORS, 1)
        why, meant = f"{name} is no phase", f"; did you mean {near[0]}?" if near else "."
    return (
        f"{why}; the phases are {', '.join(FLOORS)}{meant} Type --patience 60, or --patience "
        f"step=60,eval=600"
    )


def _seconds(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < float("inf") else None
