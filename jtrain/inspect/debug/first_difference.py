"""The first difference of two runs: step, number, batch and leaf."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.checkpoint import inspect, layout
from jtrain.config.dump import Difference, diff_configs
from jtrain.data.batches.stream import count_readers
from jtrain.inspect.report.read_run import read_run
from jtrain.train.hooks import step_record
from jtrain.train.hooks.log import read_metrics
from jtrain.train.run_dir import RunDir

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
    stories = [read_run(path) for path in (one, other)]
    values = diff_configs(*(story.config for story in stories))
    facts = [{name: story.facts.get(name) for name in FACTS} for story in stories]
    records = [step_record.read_step_records(RunDir(path).steps) for path in (one, other)]
    batch, incomparable = _first_other_batch(records, [story.facts for story in stories])
    run_dirs = [RunDir(path) for path in (one, other)]
    folders = [each.checkpoints for each in run_dirs]
    common = sorted(
        set.intersection(*(set(layout.list_steps(d.checkpoints, d.owner())) for d in run_dirs))
    )
    leaves_by_step = {}
    for step in common:
        if rows := inspect.diff_checkpoints((folders[0], step), (folders[1], step)):
            leaves_by_step[step] = rows
            break
    first = next(iter(leaves_by_step), None)
    before = [step for step in common if first is None or step < first]
    tables = [_numbers(path, record) for path, record in zip((one, other), records, strict=True)]
    return RunDifference(
        values=[change for change in values if change.key != "name"],
        facts=diff_configs(*facts),
        compared=len({step for step, _ in tables[0].keys() & tables[1].keys()}),
        batch=batch,
        readers=incomparable,
        number=_first_other_number(*tables),
        checkpoints=common,
        same=before[-1] if before else None,
        checkpoint=first,
        leaves=leaves_by_step.get(first, []) if first is not None else [],
    )


def _first_other_batch(
    records: Sequence[Mapping[int, step_record.StepRecord]], facts: Sequence[Mapping[str, Any]]
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


def _numbers(
    path: Path, record: Mapping[int, step_record.StepRecord]
) -> dict[tuple[int, str], float | list[Any]]:
    """Return the recorded numbers of steps, and all metrics, by step and name."""
    found: dict[tuple[int, str], Any] = {}
    for step, numbers in record.items():
        found[step, "loss"], found[step, "grad_norm"] = numbers.loss, numbers.grad_norm
    for row in read_metrics(RunDir(path).metrics):
        found |= {(row["step"], name): value for name, value in row.items() if name != "step"}
    return found


def _first_other_number(one: Mapping[tuple[int, str], Any], other: Mapping[tuple[int, str], Any]):
    # In the order of the first run's rows, so that the loss comes before derived numbers.
    for step, name in sorted(one.keys() & other.keys(), key=lambda item: item[0]):
        pair = one[step, name], other[step, name]
        if repr(pair[0]) != repr(pair[1]):  # NaN equals NaN
            return DifferingNumber(step, name, *pair)
    return None
