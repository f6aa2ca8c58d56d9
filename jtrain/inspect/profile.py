"""Profiles of runs: what the devices did in a window of steps, and what the host did meanwhile."""

import collections
import dataclasses
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jtrain.errors import ConfigError
from jtrain.inspect.explain.explain import operation_modules
from jtrain.inspect.plan.collectives import KINDS
from jtrain.io.formatting import align_columns, format_bytes, format_seconds
from jtrain.io.regular_files import atomic_write, check_regular, read_json
from jtrain.train.hooks.profile_window import PHASE, STEP

FOLDER, SUMMARY = "profile", "profile.json"
ROWS = 12
_MOST = 1 << 26  # bytes of a profile.json
# Operations that hold others, whose time would count twice.
_CONTAINERS = ("while", "call", "conditional", "async-start", "async-done")


class OperationTime(NamedTuple):
    """Time of an operation of the compiled program."""

    name: str
    module: str
    """Empty if unknown."""
    seconds: float = 0.0
    """Over all devices and steps."""
    runs: int = 0


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
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "Profile":
        """Return the profile of JSON values, as `plain` makes them."""
        operations = tuple(OperationTime(**each) for each in values["operations"])
        return cls(**{**values, "operations": operations})


def summarize_trace(run: Path, steps: tuple[int, int], program: str = "") -> Profile | None:
    """Read the trace in a run's directory, and write its summary beside it; None without a trace.

    Args:
        steps: the first and the last step of the trace.
        program: the text of the compiled step, for the modules of its operations.
    """
    traces = (run / FOLDER).rglob("*.xplane.pb")
    newest = max(traces, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        return None
    found = read_profile(newest, steps, operation_modules(program))
    atomic_write(run / SUMMARY, json.dumps(found.plain()).encode())
    return found


def load_profile(run: Path) -> Profile:
    """Return the summary in a run's directory.

    Raises:
        ConfigError: if the run has none, or it cannot be read.
    """
    path = run / SUMMARY
    try:
        return Profile.from_plain(read_json(path, most=_MOST, inside=run))
    except FileNotFoundError:
        raise ConfigError(
            f"{run} has no profile. A run writes one by: jtrain run {run}/config.yaml --profile "
            f"10:15 (of steps that it has not taken yet)"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Profile other steps of the "
            f"run: jtrain run {run}/config.yaml --profile 10:15"
        ) from None


class _Span(NamedTuple):
    start: float  # seconds
    end: float
    name: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


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
        hosts = sorted(_read_host(planes))
    markers = [span for span in hosts if span.name == STEP]
    phases = [span for span in hosts if span.name != STEP]
    everything = [*markers, *operations]
    start = min((span.start for span in everything), default=0.0)
    end = max((span.end for span in everything), default=0.0)
    merged, idle = _merge(operations), collections.Counter()
    edges = [start, *(t for span in merged for t in (span.start, span.end)), end]
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        idle.update(_overlaps(phases, first, last))
    total = sum(span.seconds for span in operations)
    kind = lambda name: re.split("[.(]", name)[0].removesuffix("-start").removesuffix("-done")
    sent = sum(span.seconds for span in operations if kind(span.name) in KINDS)
    return Profile(
        first=steps[0],
        last=steps[1],
        seconds=end - start,
        devices=devices,
        busy=sum(span.seconds for span in merged) / (end - start) if end > start else 0.0,
        operations=tuple(_sum_by_name(operations, modules or {})),
        collectives=sent / total if total else 0.0,
        phases=_overlaps(phases, start, end),
        idle_phases=dict(idle),
        trace=str(trace),
        bytes=trace.stat().st_size,
    )


def _read_operations(planes: Sequence[Any]) -> tuple[list[_Span], int]:
    """Return the operations of the devices, and the number of devices.

    Accelerators have a line `XLA Ops` each; the CPU's operations are among its threads.
    """
    every = [(plane.name, line) for plane in planes for line in plane.lines]
    lines = [x for x in every if x[1].name == "XLA Ops" and x[0].startswith("/device:")]
    on_host = not lines
    found, devices = [], set()
    for plane, line in lines or every:
        for event in line.events:
            stats = dict(event.stats)
            name = str(stats.get("hlo_op", "" if on_host else event.name))
            if name and event.duration_ns > 0 and not name.startswith(_CONTAINERS):
                devices.add(stats.get("device_ordinal", 0) if on_host else plane)
                found.append(_span(event, name))
    return found, len(devices)


def _read_host(planes: Sequence[Any]) -> Iterator[_Span]:
    """Yield the steps and the phases of the run's own thread."""
    for plane in planes:
        for line in plane.lines if plane.name.startswith("/host:") else ():
            for event in line.events:
                if event.name == STEP or event.name.startswith(PHASE):
                    yield _span(event, event.name)


def _span(event: Any, name: str) -> _Span:
    start = event.start_ns * 1e-9
    return _Span(start, start + event.duration_ns * 1e-9, name)


def _sum_by_name(spans: Sequence[_Span], modules: Mapping[str, str]) -> list[OperationTime]:
    """Return the time of each operation; layers of one kind in one module share a row."""
    sums: dict[tuple[str, str], OperationTime] = {}
    for span in spans:
        kind = re.sub(r"[.\d]+$", "", span.name)
        key = (kind if span.name in modules else span.name, modules.get(span.name, ""))
        one = sums.get(key, OperationTime(*key))
        sums[key] = one._replace(seconds=one.seconds + span.seconds, runs=one.runs + 1)
    return sorted(sums.values(), key=lambda row: -row.seconds)


def _merge(spans: Sequence[_Span]) -> list[_Span]:
    """Return the union of spans, in order."""
    merged: list[_Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(merged[-1].end, span.end))
        else:
            merged.append(_Span(span.start, span.end))
    return merged


def _overlaps(phases: Sequence[_Span], start: float, end: float) -> dict[str, float]:
    """Return the seconds of a time by phase of the host."""
    found: dict[str, float] = {}
    for span in phases:
        shared = min(span.end, end) - max(span.start, start)
        if shared > 0:
            phase = span.name.removeprefix(PHASE)
            found[phase] = found.get(phase, 0.0) + shared
    return found


def format_profile(found: Profile) -> str:
    """Return the profile as text: shares, the top operations, the longest gaps."""
    steps = found.last - found.first + 1
    lines = [
        f"profile of steps {found.first} to {found.last}: {format_seconds(found.seconds)}, "
        f"{format_seconds(found.seconds / steps)} a step, {found.devices} "
        f"device{'s' if found.devices != 1 else ''}",
        f"devices computed {found.busy:.1%} of the time; collectives are {found.collectives:.1%} "
        f"of the operations",
    ]
    if total := sum(operation.seconds for operation in found.operations):
        rows = [("operation", "module", "a step", "share", "runs")]
        for name, module, seconds, runs in found.operations[:ROWS]:
            each = format_seconds(seconds / steps / max(1, found.devices))
            rows.append((name, module or "-", each, f"{seconds / total:.1%}", f"{runs:,}"))
        lines += ["", *align_columns(rows, right=(2, 3, 4))]
        if rest := found.operations[ROWS:]:
            part = sum(operation.seconds for operation in rest) / total
            lines.append(f"and {len(rest)} more, {part:.1%}")
    else:
        lines.append(
            "the trace has no operation of a device: the profiler of this backend has none"
        )
    if idle := found.seconds * (1 - found.busy):
        parts = sorted(found.idle_phases.items(), key=lambda item: -item[1])
        known = [f"{name} {format_seconds(x)}" for name, x in parts if x > 0.01 * idle]
        phases = ", ".join(known) or "-"
        lines += ["", f"no device computed for {format_seconds(idle)}; the host's phases: {phases}"]
    logdir = found.trace.partition("/plugins/")[0]
    return "\n".join(
        [
            *lines,
            "",
            f"trace: {found.trace} ({format_bytes(found.bytes)}); open it by xprof (pip install "
            f"xprof; xprof --logdir {logdir}), or its trace.json.gz at https://ui.perfetto.dev",
        ]
    )
