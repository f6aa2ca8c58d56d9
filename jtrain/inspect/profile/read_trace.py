"""Reader of profiler traces: operations, collectives, and gaps of the devices."""

import bisect
import dataclasses
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jtrain.inspect.plan.collectives import KINDS
from jtrain.io.regular_files import check_regular
from jtrain.train.hooks.profile_window import PHASE, STEP

# Operations that hold others, whose time would count twice.
_CONTAINERS = ("while", "call", "conditional", "async-start", "async-done")
_GAP = 0.01  # of the window: shorter gaps are no row


class OperationTime(NamedTuple):
    """Time of an operation of the compiled program."""

    name: str
    module: str
    """Empty if unknown."""
    seconds: float
    """Over all devices and steps."""
    runs: int


class Gap(NamedTuple):
    """A time in which no device computed."""

    start: float
    """Seconds since the window began."""
    seconds: float
    step: int
    """The step that the host was at; 0 if unknown."""
    host: str
    """What the host did for the most part of it: a phase of a run, such as data or hooks."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """What devices and host did in a window of steps."""

    first: int
    last: int
    seconds: float
    """Length of the window."""
    devices: int
    busy: float
    """Share of the window in which a device computed, 0 to 1."""
    operations: tuple[OperationTime, ...]
    """The ones that took most time first."""
    collectives: float
    """Share of the operations' time that collectives took, 0 to 1."""
    phases: Mapping[str, float]
    """Seconds of the host by phase."""
    gaps: tuple[Gap, ...]
    """The longest first."""
    idle_phases: Mapping[str, float]
    """Seconds in which no device computed, by the phase of the host."""
    trace: str
    """The trace file."""
    bytes: int

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values, in seconds."""
        return {
            **dataclasses.asdict(self),
            "operations": [operation._asdict() for operation in self.operations],
            "gaps": [gap._asdict() for gap in self.gaps],
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "Profile":
        """Return the profile of JSON values, as `plain` makes them."""
        operations = tuple(OperationTime(**each) for each in values["operations"])
        gaps = tuple(Gap(**each) for each in values["gaps"])
        return cls(**{**values, "operations": operations, "gaps": gaps})


class _Span(NamedTuple):
    start: float  # seconds
    end: float
    name: str
    step: int = 0


def find_trace(folder: Path) -> Path | None:
    """Return the newest trace file below a folder; None if there is none."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    return files[-1] if files else None


def read_profile(
    trace: Path, steps: tuple[int, int], modules: Mapping[str, str] | None = None
) -> Profile:
    """Read a trace that `ProfileWindow` wrote.

    Args:
        steps: the first and the last step of the window.
        modules: the module of each operation of the compiled program.

    Raises:
        ValueError: if it is no trace.
    """
    # In jax 0.12 the reader's types are made at their first use, with a DeprecationWarning; where
    # warnings are errors, that aborts the process.
    check_regular(trace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
        operations, devices = _read_operations(planes)
        hosts = list(_read_host(planes))
    markers = [span for span in hosts if span.name == STEP]
    phases = [span for span in hosts if span.name.startswith(PHASE)]
    everything = [*markers, *operations]
    start = min((span.start for span in everything), default=0.0)
    end = max((span.end for span in everything), default=0.0)
    merged = _merge(operations)
    gaps = _gaps(merged, start, end)
    total = sum(span.end - span.start for span in operations)
    sent = sum(s.end - s.start for s in operations if _is_collective(s.name))
    table = _sum_by_name(operations, modules or {})
    idle: dict[str, float] = {}
    rows = []
    for gap in gaps:
        shares = _overlaps(phases, gap)
        for phase, seconds in shares.items():
            idle[phase] = idle.get(phase, 0.0) + seconds
        if gap.end - gap.start >= _GAP * (end - start):
            host = max(shares, key=lambda name: shares[name], default="outside of the loop")
            rows.append(Gap(gap.start - start, gap.end - gap.start, _step_at(markers, gap), host))
    spent = _overlaps(phases, _Span(start, end, ""))
    busy = sum(span.end - span.start for span in merged)
    return Profile(
        first=steps[0],
        last=steps[1],
        seconds=end - start,
        devices=devices,
        busy=busy / (end - start) if end > start else 0.0,
        operations=tuple(table),
        collectives=sent / total if total else 0.0,
        phases=spent,
        gaps=tuple(sorted(rows, key=lambda gap: -gap.seconds)),
        idle_phases=idle,
        trace=str(trace),
        bytes=trace.stat().st_size,
    )


def _read_operations(planes: Sequence[Any]) -> tuple[list[_Span], int]:
    """Return the operations of the devices, and the number of devices.

    Accelerators have a line `XLA Ops` each; the CPU's operations are among its threads.
    """
    lines = [
        (plane.name, line)
        for plane in planes
        for line in plane.lines
        if line.name == "XLA Ops" and plane.name.startswith("/device:")
    ]
    on_host = not lines
    if on_host:
        lines = [(plane.name, line) for plane in planes for line in plane.lines]
    found, devices = [], set()
    for plane, line in lines:
        for event in line.events:
            stats = dict(event.stats)
            name = stats.get("hlo_op", "" if on_host else event.name)
            if not name or event.duration_ns <= 0 or str(name).startswith(_CONTAINERS):
                continue
            devices.add(stats.get("device_ordinal", 0) if on_host else plane)
            found.append(_span(event, str(name)))
    return found, len(devices)


def _read_host(planes: Sequence[Any]) -> Iterator[_Span]:
    """Yield the steps and the phases of the run's own thread."""
    for plane in planes:
        if not plane.name.startswith("/host:"):
            continue
        for line in plane.lines:
            for event in line.events:
                if event.name == STEP or event.name.startswith(PHASE):
                    step = dict(event.stats).get("step_num", 0)
                    yield _span(event, event.name, int(step or 0))


def _span(event: Any, name: str, step: int = 0) -> _Span:
    start = event.start_ns * 1e-9
    return _Span(start, start + event.duration_ns * 1e-9, name, step)


def _is_collective(name: str) -> bool:
    return re.split(r"[.(]", name)[0].removesuffix("-start").removesuffix("-done") in KINDS


def _sum_by_name(spans: Sequence[_Span], modules: Mapping[str, str]) -> list[OperationTime]:
    """Return the time of each operation; layers of one kind in one module share a row."""
    sums: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        kind = re.sub(r"[.\d]+$", "", span.name)
        key = (kind if span.name in modules else span.name, modules.get(span.name, ""))
        found = sums.setdefault(key, [0.0, 0])
        found[0] += span.end - span.start
        found[1] += 1
    rows = [OperationTime(*key, seconds, int(count)) for key, (seconds, count) in sums.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def _merge(spans: Sequence[_Span]) -> list[_Span]:
    """Return the union of spans, in order."""
    merged: list[_Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(merged[-1].end, span.end))
        else:
            merged.append(_Span(span.start, span.end, ""))
    return merged


def _gaps(merged: Sequence[_Span], start: float, end: float) -> list[_Span]:
    """Return the spans between merged ones."""
    edges = [start, *(t for span in merged for t in (span.start, span.end)), end]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [_Span(first, last, "") for first, last in pairs if last > first]


def _overlaps(phases: Sequence[_Span], gap: _Span) -> dict[str, float]:
    """Return the seconds of a gap by phase of the host."""
    found: dict[str, float] = {}
    for span in phases:
        shared = min(span.end, gap.end) - max(span.start, gap.start)
        if shared > 0:
            phase = span.name.removeprefix(PHASE)
            found[phase] = found.get(phase, 0.0) + shared
    return found


def _step_at(markers: Sequence[_Span], gap: _Span) -> int:
    ordered = sorted(markers)
    place = bisect.bisect_right([span.start for span in ordered], gap.start)
    return ordered[place - 1].step if place else 0
