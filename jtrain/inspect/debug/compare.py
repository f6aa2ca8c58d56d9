"""The first difference of two runs: batch, number, checkpoint and leaf."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.checkpoint import inspect, layout
from jtrain.config.dump import Difference, diff_configs
from jtrain.inspect.report.read_run import read_run
from jtrain.io.jsonl import read_rows
from jtrain.train.hooks.step_record import StepRecord, read_step_records
from jtrain.train.run_dir import RunDir
from jtrain.train.run_store import count_readers

FACTS = ("jtrain", "python", "packages", "devices", "machine", "git")  # keys of run.json


@dataclasses.dataclass(frozen=True)
class DifferingNumber:
    """A number that differs between two runs."""

    step: int
    name: str
    one: Any
    other: Any


@dataclasses.dataclass(frozen=True)
class RunDifference:
    """The differences of two runs; all fields are empty if there are none."""

    values: Sequence[Difference]
    """Differences of their configs, without the name."""
    facts: Sequence[Difference]
    """Differences of their environments."""
    compared: int
    """Number of steps with numbers in both runs."""
    batch: int | None
    """First step whose batch differs; None if there is none, or no record."""
    readers: tuple[int, int] | None
    """Number of processes that read the batches in each run, if some batches are not compared."""
    number: DifferingNumber | None
    """First differing number, of a step or of an evaluation."""
    checkpoints: Sequence[int]
    """Steps with a valid checkpoint in both runs."""
    same: int | None
    """Last checkpoint before `checkpoint` that is equal in each leaf."""
    checkpoint: int | None
    """First checkpoint that differs."""
    leaves: Sequence[Mapping[str, Any]]
    """Differing leaves of that checkpoint: `leaf`, the two values `is`, their `distance`."""

    @property
    def nothing(self) -> bool:
        """True if no difference in batches, numbers and checkpoints is known."""
        return self.batch is None and self.number is None and self.checkpoint is None


def compare_runs(one: Path, other: Path) -> RunDifference:
    """Return the first differences of the runs in two directories.

    Raises:
        CheckpointError: if a common checkpoint cannot be read.
    """
    run_dirs, stories = (RunDir(one), RunDir(other)), (read_run(one), read_run(other))
    records = [read_step_records(each.steps) for each in run_dirs]
    batch, readers = _first_other_batch(records, [story.facts for story in stories])
    saved = [set(layout.list_steps(each.checkpoints, each.owner())) for each in run_dirs]
    common, same, first, leaves = sorted(saved[0] & saved[1]), None, None, []
    for step in common:
        folders = [(each.checkpoints, step) for each in run_dirs]
        if leaves := inspect.diff_checkpoints(*folders):
            first = step
            break
        same = step
    tables = [_numbers(*pair) for pair in zip(run_dirs, records, strict=True)]
    values = diff_configs(*(story.config for story in stories))
    return RunDifference(
        values=[change for change in values if change.key != "name"],
        facts=diff_environments(*(story.facts for story in stories)),
        compared=len({step for step, _ in tables[0].keys() & tables[1].keys()}),
        batch=batch,
        readers=readers,
        number=_first_other_number(*tables),
        checkpoints=common,
        same=same,
        checkpoint=first,
        leaves=leaves,
    )


def diff_environments(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Return the differences of what two runs ran on, by their run.json."""
    return diff_configs(*({name: facts.get(name) for name in FACTS} for facts in (one, other)))


def _first_other_batch(
    records: Sequence[Mapping[int, StepRecord]], facts: Sequence[Mapping[str, Any]]
) -> tuple[int | None, tuple[int, int] | None]:
    """Return the first step with another batch, and the process counts of the first step that is
    not comparable because another number of processes read its batch."""
    common = sorted(records[0].keys() & records[1].keys())
    one, other = (count_readers(each, common) for each in facts)
    pairs = {step: (one.get(step, 0), other.get(step, 0)) for step in common}
    incomparable = {step: pair for step, pair in pairs.items() if all(pair) and pair[0] != pair[1]}
    batches = {step: {record[step].batch for record in records} - {0} for step in common}
    parts = (step for step in common if step not in incomparable and len(batches[step]) > 1)
    return next(parts, None), next(iter(incomparable.values()), None)


def _numbers(run_dir: RunDir, record: Mapping[int, StepRecord]) -> dict[tuple[int, str], Any]:
    """Return the recorded numbers of steps, and all metrics, by step and name."""
    found: dict[tuple[int, str], Any] = {}
    for step, numbers in record.items():
        found[step, "loss"], found[step, "grad_norm"] = numbers.loss, numbers.grad_norm
    for row in read_rows(run_dir.metrics):
        found |= {(row["step"], name): value for name, value in row.items() if name != "step"}
    return found


def _first_other_number(one: Mapping[tuple[int, str], Any], other: Mapping[tuple[int, str], Any]):
    # In the order of the first run's rows, so that the loss comes before derived numbers.
    for step, name in sorted(one.keys() & other.keys(), key=lambda item: item[0]):
        pair = one[step, name], other[step, name]
        if repr(pair[0]) != repr(pair[1]):  # NaN equals NaN
            return DifferingNumber(step, name, *pair)
    return None
