"""Profiles as text and in the run's directory."""

import json
from collections.abc import Mapping
from pathlib import Path

from jtrain.errors import ConfigError
from jtrain.inspect.explain.compiled import operation_modules
from jtrain.inspect.profile.read_trace import Profile, find_trace, read_profile
from jtrain.io.formatting import align_columns, format_bytes, format_seconds
from jtrain.io.regular_files import atomic_write, read_json

FOLDER, SUMMARY = "profile", "profile.json"
ROWS, GAPS = 12, 5
_MOST = 1 << 26  # bytes of a profile.json
# What the host does in the phases of a run.
_PHASES = {
    "step": "handed a call to the devices, or waited for an earlier one",
    "data": "waited for a batch",
    "hooks": "ran hooks: log, metrics, files",
    "eval": "evaluated",
    "save": "saved a checkpoint",
    "sampling": "sampled or drew pictures",
}


def summarize_trace(run: Path, steps: tuple[int, int], program: str = "") -> Profile | None:
    """Read the trace in a run's directory and write its summary beside it.

    Args:
        steps: the first and the last step of the trace.
        program: the text of the compiled step, for the modules of its operations.

    Returns:
        None if there is no trace.
    """
    trace = find_trace(run / FOLDER)
    if trace is None:
        return None
    modules: Mapping[str, str] = operation_modules(program)
    found = read_profile(trace, steps, modules)
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
    total = sum(operation.seconds for operation in found.operations)
    if total:
        rows = [("operation", "module", "a step", "share", "runs")]
        rows += [
            (
                operation.name,
                operation.module or "-",
                format_seconds(operation.seconds / steps / max(1, found.devices)),
                f"{operation.seconds / total:.1%}",
                f"{operation.runs:,}",
            )
            for operation in found.operations[:ROWS]
        ]
        lines += ["", *align_columns(rows, right=(2, 3, 4))]
        rest = found.operations[ROWS:]
        if rest:
            part = sum(operation.seconds for operation in rest) / total
            lines.append(f"and {len(rest)} more, {part:.1%}")
    else:
        lines.append(
            "the trace has no operation of a device: the profiler of this backend has none"
        )
    lines += _format_gaps(found)
    lines += [
        "",
        f"trace: {found.trace} ({format_bytes(found.bytes)}); open it by xprof (pip install xprof; "
        f"xprof --logdir {_logdir(found.trace)}), or its trace.json.gz at https://ui.perfetto.dev",
    ]
    return "\n".join(lines)


def _format_gaps(found: Profile) -> list[str]:
    idle = found.seconds * (1 - found.busy)
    if not found.gaps or not found.seconds:
        return []
    parts = sorted(found.idle_phases.items(), key=lambda item: -item[1])
    known = [
        f"{name} {format_seconds(seconds)}" for name, seconds in parts if seconds > 0.01 * idle
    ]
    lines = [
        "",
        f"no device computed for {format_seconds(idle)}; by phase: {', '.join(known) or '-'}",
    ]
    rows = [("gap", "at", "step", "the host")]
    rows += [
        (
            format_seconds(gap.seconds),
            f"+{format_seconds(gap.start)}",
            f"{gap.step or '-'}",
            _PHASES.get(gap.host, gap.host),
        )
        for gap in found.gaps[:GAPS]
    ]
    return [*lines, *align_columns(rows, right=(0, 1, 2))]


def _logdir(trace: str) -> str:
    """Return the folder that xprof takes: the one that holds `plugins`."""
    return trace.partition("/plugins/")[0]
