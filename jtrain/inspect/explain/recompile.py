"""Reasons why a step is compiled again, with what to do."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jtrain.errors import ConfigError
from jtrain.train.compile_step import (
    ARGUMENTS,
    CODE,
    ENVIRONMENT,
    VALUES,
    CompileRecord,
    ProgramChange,
    compare_signatures,
    program_signature,
    read_compiles,
)
from jtrain.train.program import Program
from jtrain.train.run_dir import RunDir

SHOWN = 8  # changed arguments


@dataclasses.dataclass(frozen=True)
class CompileComparison:
    """What differs between the compiled steps of a run, and from those of a config."""

    run: str
    compiles: tuple[CompileRecord, ...]
    last: tuple[ProgramChange, ...]
    """Between the last two different programs of the run; empty if there was one."""
    now: tuple[ProgramChange, ...]
    """Between the run's newest compile and the config."""

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        listed = lambda changes: [{**c._asdict(), "advice": advise(c)} for c in changes]
        return {
            "run": self.run,
            "compiles": [{"step": c.step, "time": c.time} for c in self.compiles],
            "last": listed(self.last),
            "config": listed(self.now),
        }


def compare_with_run(run: Path, program: Program) -> CompileComparison:
    """Compare the compiles of a run with one another, and the newest with a program.

    Raises:
        ConfigError: if the run has no compiles.jsonl.
    """
    compiles = read_compiles(run / "compiles.jsonl")
    if not compiles:
        facts = RunDir(run).facts()
        longer = f" steps={2 * facts.get('step', 0)}" if facts.get("status") == "done" else ""
        raise ConfigError(
            f"jtrain explain --why-recompile: {run} has no record of what it compiled, "
            f"compiles.jsonl; a run writes it when it starts or resumes. Resume it: "
            f"jtrain run {run}/config.yaml{longer}"
        )
    newest = compiles[-1].signature
    older = [c.signature for c in compiles if c.signature != newest]
    last = compare_signatures(older[-1], newest) if older else []
    now = compare_signatures(newest, program_signature(program, program.schedule))
    return CompileComparison(str(run), tuple(compiles), tuple(last), tuple(now))


def format_comparison(found: CompileComparison) -> str:
    """Return the comparison as text, with advice for each change."""
    count = len(found.compiles)
    times = "once" if count == 1 else f"{count} times"
    at = ", ".join(f"step {c.step}" for c in found.compiles[-SHOWN:])
    lines = [f"{found.run} was started {times}: {at}"]
    if found.last:
        lines += ["", "its last two programs differ:", *_format(found.last)]
    elif count > 1:
        lines.append("each start needed the same program: a compile cache serves it")
    if found.now:
        lines += ["", "this config needs another program than its newest:", *_format(found.now)]
    else:
        lines += ["", "this config needs the program of its newest start: nothing has changed"]
    return "\n".join(lines)


def advise(change: ProgramChange) -> str:
    """Return what to do about a change."""
    part, name, before, after = change
    if name == "steps_per_call":
        return (
            "a call takes another number of steps; auto follows the size of a step and the "
            "smallest cadence that needs the state, such as evaluate.every and checkpoint.every."
        )
    if part == VALUES:
        old = before.strip("'") if before.startswith("'") else before  # as it is typed
        return (
            f"{name} is a constant of the program. Type {name}={old} for the old one."
            if before
            else f"{name} is a new key of the config."
        )
    if part == CODE:
        return f"{name} was edited; put it back (git stash) if the program should be the old one."
    if part == ENVIRONMENT:
        return f"{name} decides what is compiled: every program is compiled once after a change."
    if name.startswith("batch/"):
        return _advise_batch(before, after)
    if not before or not after:
        return "the state has other leaves: the model or the optimizer changed (see the values)."
    if before.partition(" ")[0] == after.partition(" ")[0]:
        return "its sharding changed: parallel.*, or the number of devices."
    return "its shape or dtype changed with the model, the optimizer or the precision."


def _advise_batch(before: str, after: str) -> str:
    if not before or not after:
        return "the batches have other arrays: the data's code or data.* changed."
    old_type, _, old = before.partition("[")
    new_type, _, new = after.partition("[")
    if old_type != new_type:
        return f"the data has another type: convert it to {old_type} in the source of the data."
    rows, _, shape = old.partition(",")
    if shape == new.partition(",")[2]:
        return (
            f"another number of rows is another program: batch={rows.strip(']')} needs the old "
            f"one. More rows a step with the program of fewer are microbatches."
        )
    return "rows of another size: pad or cut them to one size (data.context, for text)."


def _format(changes: Sequence[ProgramChange]) -> list[str]:
    """Return a line for each change and its advice; arguments with one change share a line."""
    lines, groups = [], {}
    for change in changes:
        key = (change.part, change.before, change.after) if change.part == ARGUMENTS else change
        groups.setdefault(key, []).append(change)
    shown = list(groups.values())[:SHOWN]
    for group in shown:
        first = group[0]
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        lines.append(
            f"  {first.name}{more}: {first.before or 'absent'} -> {first.after or 'absent'}"
        )
        if (advice := f"    {advise(first)}") not in lines:
            lines.append(advice)
    if len(groups) > len(shown):
        lines.append(f"  and {len(groups) - len(shown)} more changes")
    return lines
