"""Where two runs part: the first step, number, batch and leaf that are not the same."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.checkpoint import inspect, layout
from jtrain.config.dump import Difference, differences
from jtrain.data.batches.reader_counts import readers
from jtrain.inspect.report.read_run import read
from jtrain.train.hooks import metrics, step_record
from jtrain.train.run_dir import RunDir

FACTS = ("jtrain", "python", "packages", "devices", "machine", "git")  # of run.json


@dataclasses.dataclass(frozen=True)
class DifferingNumber:
    """A number that two runs do not share."""

    step: int
    name: str
    one: Any
    other: Any


@dataclasses.dataclass(frozen=True)
class RunDifference:
    """What two runs do not have in common; all empty if they are the same."""

    values: Sequence[Difference]
    """Of their configs, but the name."""
    facts: Sequence[Difference]
    """Of what they ran on."""
    compared: int
    """Steps that both have numbers of."""
    batch: int | None
    """The first step whose batch was another; None if none was, or there is no record."""
    readers: tuple[int, int] | None
    """Where the batches of some are not compared, the processes of each run that read them."""
    number: DifferingNumber | None
    """The first number that is another, of a step or of an evaluation."""
    checkpoints: Sequence[int]
    """The steps of which both have a whole checkpoint."""
    same: int | None
    """The last of them before `checkpoint` that is the same in each leaf."""
    checkpoint: int | None
    """The first of them that is not."""
    leaves: Sequence[Mapping[str, Any]]
    """Of it the leaves that are apart: `leaf`, what each `is`, how far `apart`."""

    @property
    def nothing(self) -> bool:
        """Whether they computed the same, as far as is known."""
        return self.batch is None and self.number is None and self.checkpoint is None


def parting(one: Path, other: Path) -> RunDifference:
    """Where the runs in two directories part.

    Raises:
        CheckpointError: if a checkpoint that both have cannot be read.
    """
    stories = [read(path) for path in (one, other)]
    values = differences(*(story.config for story in stories))
    facts = [{name: story.facts.get(name) for name in FACTS} for story in stories]
    records = [step_record.steps(RunDir(path).steps) for path in (one, other)]
    batch, unlike = _other_batch(records, [story.facts for story in stories])
    there = [RunDir(path) for path in (one, other)]
    found = [each.checkpoints for each in there]
    both = sorted(set.intersection(*(set(layout.steps(d.checkpoints, d.owner())) for d in there)))
    apart = {}
    for step in both:
        if rows := inspect.diff_checkpoints((found[0], step), (found[1], step)):
            apart[step] = rows
            break
    first = next(iter(apart), None)
    before = [step for step in both if first is None or step < first]
    tables = [_numbers(path, record) for path, record in zip((one, other), records, strict=True)]
    return RunDifference(
        values=[change for change in values if change.key != "name"],
        facts=differences(*facts),
        compared=len({step for step, _ in tables[0].keys() & tables[1].keys()}),
        batch=batch,
        readers=unlike,
        number=_first(*tables),
        checkpoints=both,
        same=before[-1] if before else None,
        checkpoint=first,
        leaves=apart.get(first, []) if first is not None else [],
    )


def _other_batch(
    records: Sequence[Mapping[int, step_record.StepRecord]], facts: Sequence[Mapping[str, Any]]
) -> tuple[int | None, tuple[int, int] | None]:
    """The first step whose batch was another, of those that as many processes read in both runs;
    and how many read the first of the others."""
    common = sorted(records[0].keys() & records[1].keys())
    one, other = (readers(each, common) for each in facts)
    pairs = {step: (one.get(step, 0), other.get(step, 0)) for step in common}
    unlike = {step: pair for step, pair in pairs.items() if all(pair) and pair[0] != pair[1]}
    batches = {step: {record[step].batch for record in records} - {0} for step in common}
    parts = (step for step in common if step not in unlike and len(batches[step]) > 1)
    return next(parts, None), next(iter(unlike.values()), None)


def _numbers(
    path: Path, record: Mapping[int, step_record.StepRecord]
) -> dict[tuple[int, str], float | list[Any]]:
    """By step and name what was computed: of each step if it was recorded, and all metrics."""
    found: dict[tuple[int, str], Any] = {}
    for step, numbers in record.items():
        found[step, "loss"], found[step, "grad_norm"] = numbers.loss, numbers.grad_norm
    for row in metrics.read(RunDir(path).metrics):
        found |= {(row["step"], name): value for name, value in row.items() if name != "step"}
    return found


def _first(one: Mapping[tuple[int, str], Any], other: Mapping[tuple[int, str], Any]):
    # In the order of the first run's rows, so that the loss is told before what follows from it.
    for step, name in sorted(one.keys() & other.keys(), key=lambda place: place[0]):
        pair = one[step, name], other[step, name]
        if repr(pair[0]) != repr(pair[1]):  # a NaN is the same as a NaN
            return DifferingNumber(step, name, *pair)
    return None
