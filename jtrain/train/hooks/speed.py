"""Training speed and memory in use, measured over completed steps; time.jsonl of phases."""

import collections
import contextlib
import dataclasses
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from jtrain.core.loop import FinishedSteps, Hook, Recorder
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.io.jsonl import JsonlWriter

_PAGE = resource.getpagesize()
_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
WINDOW = 10.0  # seconds that the speed is of
CALLS = 512  # whose times the quantiles are of
Total: TypeAlias = Callable[[int], float]  # an amount, over the first steps of a run


class MemoryUse(NamedTuple):
    """Bytes in use, and the most that were in use so far."""

    in_use: int
    peak: int
    of: str
    """device: the fullest device of this process; process: its resident memory."""


@dataclasses.dataclass(frozen=True)
class SpeedReading:
    """Speed of a run when a step was done."""

    step: int
    seconds_per_step: float
    rows_per_second: float
    tokens_per_second: float | None
    waiting: float
    """Share of the time, 0 to 1, in which the loop waited for data."""
    left: float
    """Seconds until the last step is done, assuming pauses at the same rate as so far."""
    mfu: float | None = None
    """Model FLOPs of the steps by the peak of the devices, 0 to 1; None where either is unknown."""
    hfu: float | None = None
    """Hardware FLOPs by the peak: with what the backward pass computes again."""
    p50: float | None = None
    """Median seconds of a step, over the last 512 calls; None before there are two."""
    p90: float | None = None
    """Seconds that 90 % of these steps stayed below or reached."""
    memory: MemoryUse | None = None
    """Memory of the devices or of the process; None where it is not measured."""


class Speed(Hook, Recorder):
    """Hook that measures the speed of a run and writes it to speed.jsonl.

    A step is timed when the devices have done it and not when it was dispatched. Time counts from
    the end of the first call, so that compiling and the first call are not part of it; time inside
    `pause()` does not count. The speed is that of the last 10 s. The quantiles are
    those of the times between two calls that were done one after the other, without the first
    after a pause. This hook comes before the hooks that read it.

    Args:
        file: of the readings; None to write none.
        every: steps between two measurements.
        stop: the last step of the run.
        rows: returns those of the first steps of the run, over all processes.
        tokens: as `rows`; None if the data has no tokens.
        flops: as `rows`, over all devices: those that loss and gradient need, and those with what
            the backward pass computes again; None where unknown.
        peak: FLOP a second of these devices, in bfloat16; None if unknown.
        waited: gives the seconds that the loop has waited for data so far.
        memory: measures the memory; None to measure none.
    """

    def __init__(
        self,
        file: JsonlWriter | None,
        *,
        every: int,
        stop: int,
        rows: Total,
        tokens: Total | None = None,
        flops: tuple[Total | None, Total | None] = (None, None),
        peak: float | None = None,
        waited: Callable[[], float] = lambda: 0.0,
        memory: Callable[[], MemoryUse] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.every = every
        self.pace: SpeedReading | None = None
        """Newest reading; None before the second measurement."""
        self.paused = 0.0
        """Seconds in pauses since the first call."""
        self.also: Callable[[], Mapping[str, Any]] = dict
        """Gives more measurements for a row of the file, such as those of parameter servers."""
        self._stop = stop
        self._rows, self._tokens, self._waited = rows, tokens, waited
        self._flops, self._peak = flops, peak
        self._clock = clock
        self._file = file
        self._samples: collections.deque[_Sample] = collections.deque()
        self._first: _Sample | None = None
        self._depth = 0
        self._memory, self._opened = memory, clock()
        self._facts: Mapping[str, Any] = {}  # for the first row
        self._calls: collections.deque[float] = collections.deque(maxlen=CALLS)  # seconds a step
        self._newest = (0, clock())  # step of the newest call that is done, and when it was
        self._follows = False  # whether the call before it was done without a pause between

    @property
    def unit(self) -> str:
        """Unit of the speed: "tokens" or "rows"."""
        return "rows" if self._tokens is None else "tokens"

    @property
    def rate(self) -> float:
        """Speed in this unit, a second; 0 before the second measurement."""
        pace = self.pace
        return 0.0 if pace is None else pace.tokens_per_second or pace.rows_per_second

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time within the block: evaluation, saving, sampling; blocks may nest."""
        start, self._depth = self._clock(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.paused += self._clock() - start
                self._follows = False

    def on_steps(self, finished: FinishedSteps) -> None:
        """Take the times of finished calls."""
        for step, at in finished.calls:
            if self._follows:
                self._calls.append((at - self._newest[1]) / (step - self._newest[0]))
            self._newest, self._follows = (step, at), True
            if self._first is None:
                first_call = at - self._opened - self.paused
                compile = HEARTBEAT.seconds()["compile"]
                self._facts = {"compile": compile, "first_call": first_call}
                self.paused = 0.0
                self._first = self._sample()
                self._samples.append(self._first)

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Measure the speed at a step."""
        now = self._sample()
        while len(self._samples) > 1 and self._samples[1].seconds <= now.seconds - WINDOW:
            self._samples.popleft()
        old = self._samples[0]
        if now.step == self._samples[-1].step or now.seconds <= old.seconds:
            return  # of a call that is measured already, or too short for the clock
        assert self._first is not None, "a step was done"
        self._samples.append(now)
        self.pace = self._pace(old, now, pauses=self.paused / (now.step - self._first.step))
        if self._file is not None:
            self._file.append(self._row(self.pace, now.seconds - self._first.seconds))

    def _sample(self) -> "_Sample":
        step, at = self._newest
        return _Sample(step, at - self.paused, self._waited())

    def _pace(self, old: "_Sample", now: "_Sample", *, pauses: float) -> SpeedReading:
        seconds, steps = now.seconds - old.seconds, now.step - old.step
        p50, p90 = self._quantiles()
        a_second = lambda total: (total(now.step) - total(old.step)) / seconds
        share = lambda total: a_second(total) / self._peak if total and self._peak else None
        return SpeedReading(
            step=now.step,
            seconds_per_step=seconds / steps,
            rows_per_second=a_second(self._rows),
            tokens_per_second=a_second(self._tokens) if self._tokens else None,
            waiting=min(1.0, (now.waited - old.waited) / seconds),
            left=(self._stop - now.step) * (seconds / steps + pauses),
            mfu=share(self._flops[0]),
            hfu=share(self._flops[1]),
            p50=p50,
            p90=p90,
            memory=self._memory() if self._memory else None,
        )

    def _quantiles(self) -> tuple[float | None, float | None]:
        ordered = sorted(self._calls)
        if not ordered:
            return None, None
        at = lambda share: ordered[math.ceil(share * len(ordered)) - 1]
        return at(0.5), at(0.9)

    def _row(self, pace: SpeedReading, trained: float) -> dict[str, Any]:
        row = {name: x for name, x in vars(pace).items() if x is not None and name != "memory"}
        if memory := pace.memory:  # its kind is in the names: every value of a row is a number
            row |= {f"{memory.of}_memory": memory.in_use, f"{memory.of}_memory_peak": memory.peak}
        facts, self._facts = self._facts, {}
        return {**row, **facts, "trained": trained, "paused": self.paused, **self.also()}


class _Sample(NamedTuple):
    step: int
    seconds: float  # of training
    waited: float


LEAST, SHARE = 5.0, 0.01  # a row each 5 s, later each time that 1 % of the attempt has passed


class TimeRows:
    """Writer of a row where training begins, at a cadence in time, and at the end.

    The rows of killed attempts stay, also those of steps that a later attempt repeats: they say
    which time was lost.
    """

    def __init__(self, path: Path, *, start: int):
        self._file = JsonlWriter(path, retain=lambda row: True)
        self._next, self._step = 0.0, start
        self._began = time.time() - sum(HEARTBEAT.seconds().values())
        self._write(start, resumed=True)

    def tick(self, step: int) -> None:
        """Write a row if one is due."""
        self._step = step
        if time.monotonic() >= self._next:
            self._write(step)

    def close(self) -> None:
        """Write the last row, and close the file."""
        self._write(self._step)
        self._file.close()

    def _write(self, step: int, *, resumed: bool = False) -> None:
        phases = HEARTBEAT.seconds()
        elapsed = sum(phases.values())
        row = {"step": step, "began": round(self._began, 3), "seconds": round(elapsed, 3)}
        row["phases"] = {name: round(x, 3) for name, x in phases.items() if x >= 5e-4}
        self._file.append(row | ({"resumed": True} if resumed else {}))
        self._next = time.monotonic() + max(LEAST, SHARE * elapsed)


def measure_memory(devices: Sequence[Any]) -> MemoryUse:
    """Return the memory of the fullest of the devices, or the resident memory of this process.

    A CPU has no statistics of its own: its arrays are in the memory of the process, with all else.
    """
    stats = [stats for device in devices if (stats := device.memory_stats())]
    if stats:
        in_use = max(each.get("bytes_in_use", 0) for each in stats)
        return MemoryUse(in_use, max(each.get("peak_bytes_in_use", 0) for each in stats), "device")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):  # not Linux
        resident = peak
    return MemoryUse(resident, max(peak, resident), "process")
