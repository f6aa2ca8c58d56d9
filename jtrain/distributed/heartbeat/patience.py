"""How long a process may stay where it is before it is taken for stuck."""

import collections
import dataclasses
import difflib
import statistics
from collections.abc import Mapping

from jtrain.distributed.heartbeat.heartbeat import Beat
from jtrain.errors import UserError

# Seconds without a beat. A beat comes with each phase, with each step, and in an evaluation with
# each batch. Generous: each of them was taken for what a large run on a slow disk may need.
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
STEPS = 5  # times the median step
_SEEN = 101  # steps that the median is of


@dataclasses.dataclass(frozen=True)
class Patience:
    """Seconds that each phase may last; a step as long as several of its kind, if that is more."""

    floors: Mapping[str, float] = dataclasses.field(default_factory=lambda: FLOORS)

    @classmethod
    def parse(cls, text: str) -> "Patience":
        """Of `60`, for all phases, or `step=60,compile=600`, for these; of nothing the usual one.

        Raises:
            UserError: for what is neither.
        """
        if not text:
            return cls()
        found = dict(FLOORS)
        for part in text.split(","):
            name, equals, seconds = part.strip().rpartition("=")
            number = _seconds(seconds)
            if number is None or (equals and name not in FLOORS):
                raise UserError(f"patience {text!r}: {_refused(part.strip(), name)}")
            found.update({name: number} if equals else dict.fromkeys(FLOORS, number))
        return cls(found)

    def times(self, factor: float) -> "Patience":
        """So many times as patient."""
        return Patience({name: factor * seconds for name, seconds in self.floors.items()})

    def seconds(self, phase: str, step: float | None) -> float:
        """That a phase may last, where a step takes so long; None: none was seen.

        The first step may take as long as its compilation.
        """
        if phase not in {"step", "hooks"}:
            return self.floors[phase]
        if step is None:
            return max(self.floors["step"], self.floors["compile"])
        return max(self.floors["step"], STEPS * step)

    @property
    def stopped(self) -> float:
        """Seconds that a process may be stopped by a signal, whatever its phase."""
        return self.floors["step"]


class WatchedProcess:
    """A process that is looked at now and then: how long has it been where it is?

    Time is what passed between looks while it was looked at: where the machine slept or who looks
    was stopped, and when the clock on the wall jumps, nobody has been stuck.
    """

    def __init__(self, patience: Patience):
        self._patience = patience
        self.beat: Beat | None = None
        """What was seen last."""
        self.still = 0.0
        """Seconds since its last beat."""
        self.stopped = 0.0
        """Seconds for which a signal has stopped it; 0: none has."""
        self._steps: collections.deque[float] = collections.deque(maxlen=_SEEN)
        self._told: Beat | None = None

    @property
    def step_seconds(self) -> float | None:
        """The median step; None until there were some."""
        return statistics.median(self._steps) if self._steps else None

    @property
    def limit(self) -> float:
        """Seconds that its phase may last, or that it may be stopped, where it was for longer."""
        if self.stopped_too_long:
            return self._patience.stopped
        phase = self.beat.phase if self.beat else "start"
        return self._patience.seconds(phase, self.step_seconds)

    @property
    def stopped_too_long(self) -> bool:
        """Whether a signal has stopped it for longer than it may."""
        return self.stopped > self._patience.stopped

    @property
    def late(self) -> bool:
        """Whether it has been where it is, or stopped, for too long."""
        return self.stopped_too_long or self.still > self.limit

    def look(self, beat: Beat, seconds: float, *, stopped: bool = False) -> bool:
        """Whether it has been where it is for too long, `seconds` after the last look.

        Args:
            stopped: whether a signal has stopped it, SIGSTOP say.
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
        """Notes how long steps take; evaluations and saves between them count for little."""
        last = self._told
        if last is None or beat.step != last.step:
            if last is not None and 0 < last.step < beat.step:
                self._steps.append((beat.seconds - last.seconds) / (beat.step - last.step))
            self._told = beat


def _refused(part: str, name: str) -> str:
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
