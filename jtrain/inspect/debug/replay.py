"""Replay of a step of a run from the checkpoint before it, and the first difference of two runs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.checkpoint import CheckpointManager, fingerprint, inspect, layout, leaf_table
from jtrain.config.dump import ABSENT, Difference, diff_configs, to_plain
from jtrain.config.schema import format_value
from jtrain.core.state import TrainState
from jtrain.data.batches.fingerprint import digest_batch
from jtrain.data.batches.stream import count_readers
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import CheckpointError, ConfigError, DamagedError
from jtrain.inspect.debug.single_device import StepReport, dissect
from jtrain.inspect.report.read_run import read_run
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.log import read_metrics
from jtrain.train.hooks.step_record import StepRecord, read_step_records
from jtrain.train.longer_run import (
    LengthChange,
    config_at,
    find_length_changes,
    get_schedule_lengths,
    keep_lengths,
)
from jtrain.train.program import Program, set_up
from jtrain.train.restore import set_up_stored
from jtrain.train.resume import load_stored
from jtrain.train.rollback import apply_decisions
from jtrain.train.run_dir import RunDir, get_environment
from jtrain.train.supersteps import CallBatches, split_steps


@dataclasses.dataclass(frozen=True)
class ReplayMismatch:
    """A step whose replay differs from the run."""

    step: int
    replayed: StepRecord
    recorded: StepRecord
    """The record of the run; its batch is 0 if it is not compared."""

    @property
    def batch(self) -> bool:
        """True if the data differs, so that the numbers cannot be compared."""
        return bool(self.recorded.batch) and self.replayed.batch != self.recorded.batch


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """A replayed step."""

    step: int
    start: int
    """Step of the checkpoint that the replay starts from; 0: the initial state."""
    replayed: StepRecord
    recorded: StepRecord | None
    """The record of the run; None if there is none."""
    rows: tuple[int, int]
    """First and last row of its batch in this process."""
    key: tuple[int, ...]
    """Data of the step's key."""
    compared: int
    """Number of replayed steps that the run recorded."""
    readers: tuple[int, int] | None
    """Number of processes then and now, if some batches are not compared."""
    unlike: Sequence[str]
    """Changes since the run: processes, devices, versions, layout."""
    other: ReplayMismatch | None
    """The first step that differs."""
    checkpoint: Sequence[str] | None
    """Leaves that differ from the run's checkpoint of this step; None: no such checkpoint."""
    dissected: StepReport | None


def replay(
    config: RunConfig, path: Path, step: int, *, deep: bool = True, log: Callable[[str], None]
) -> ReplayResult:
    """Replay step `step` of the run in `path`, and compare its bits with the run.

    The run's directory is read and not written. With several processes, each must call this.

    Args:
        deep: also run the step without jit, with checks, and leaf by leaf; in one process only.
        log: called with a line about progress.

    Raises:
        ConfigError: if the run has no such step, or other values.
        CheckpointError: if the checkpoint before it cannot be read.
    """
    program, run_dir = set_up_stored(config, path)
    now = keep_lengths(config, load_stored(run_dir, type(config)))
    changed = _length_changes(program, run_dir)
    config = config_at(now, changed, step)
    if config is not now:
        program = set_up(config, run_dir.pace)
    config = apply_decisions(config, run_dir)
    if not 1 <= step <= program.resolved.config.steps:
        raise ConfigError(
            f"{path} has the steps 1 to {program.resolved.config.steps}, not step {step}; "
            f"write --step {min(max(step, 1), program.resolved.config.steps)}"
        )
    schedule = program.schedule.ending_at(step - 1, step)
    batches = program.batches(schedule, config.guard.without)
    start, state = _before(program, batches, run_dir, step, log)
    _check_schedule(program.resolved.config, changed, start, step)
    known = read_step_records(run_dir.steps)
    count = jax.process_count()
    others = {n: then for n, then in count_readers(run_dir.facts(), known).items() if then != count}
    for number, was in known.items():
        if number in others or not run_dir.first:  # it reads other rows than the recorded ones
            known[number] = was._replace(batch=0)
    log(f"from {f'checkpoint {start}' if start else 'the first step'} of {path}")
    records, before, after = _replay_steps(program, batches, state, start, step)
    own = np.ravel(batches.read(schedule.first(step))["row"])
    deep = deep and jax.process_count() == 1
    other = _first_mismatch(records, known)
    return ReplayResult(
        step=step,
        start=start,
        replayed=records[step],
        recorded=known.get(step),
        rows=(int(own.min()), int(own.max())),
        key=tuple(np.ravel(jax.random.key_data(before.step_key())).tolist()),
        compared=sum(number in known for number in records),
        readers=next(((others[n], count) for n in records if n in others), None),
        unlike=_environment_changes(program, run_dir, others, other.step if other else step),
        other=other,
        checkpoint=_differing_leaves(run_dir, step, after),
        dissected=dissect(config, before, step, log) if deep else None,
    )


def _environment_changes(
    program: Program, run_dir: RunDir, others: Mapping[int, int], step: int
) -> list[str]:
    """Return the changes since the run that may change the rounding of a step.

    Args:
        others: the number of processes of each step that another number of processes ran.
    """
    config, recorded, now = (
        program.resolved.config,
        run_dir.facts(),
        get_environment(program.resolved.devices),
    )
    count = jax.process_count()
    changed = [f"processes: {others[step]} then, {count} now"] if step in others else []
    facts = [{name: each.get(name) for name in FACTS} for each in (recorded, now)]
    found = [each for each in diff_configs(*facts) if each.before not in (None, ABSENT)]
    if stored := load_stored(run_dir, type(config)):
        layouts = [{"parallel": to_plain(each.parallel)} for each in (stored, config)]
        found += diff_configs(*layouts)
    return changed + [f"{d.key}: {_short(d.before)} then, {_short(d.after)} now" for d in found]


def _short(value: Any) -> str:
    """Format a value briefly: devices are counted by kind."""
    if isinstance(value, list):
        kinds = [str(each).partition(" ")[2] or str(each) for each in value]
        return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "none"
    if isinstance(value, str):
        return value
    return format_value(value) if value is not ABSENT else "nothing"


def _length_changes(program: Program, run_dir: RunDir) -> list[LengthChange]:
    """Return the changes of the run's length."""

    def find() -> dict[str, Any]:
        checkpoints = CheckpointManager(run_dir.checkpoints, owner=run_dir.owner())
        step = checkpoints.newest()
        found = (
            []
            if step is None
            else find_length_changes(program.resolved.config, step, checkpoints.about(step))
        )
        return {"changes": [list(change) for change in found]}

    return [LengthChange(*each) for each in broadcast_from_first(find)["changes"]]


def _check_schedule(
    config: RunConfig, changed: Sequence[LengthChange], start: int, step: int
) -> None:
    """Raise if the replay would cross a change of the schedule's length."""
    lengths = get_schedule_lengths(config)
    for change in changed:
        then = config_at(config, changed, change.step)
        if start < change.step < step and get_schedule_lengths(then) != lengths:
            checkpoint = f"checkpoint {start}" if start else "none"
            raise ConfigError(
                f"step {step} cannot be replayed: the newest checkpoint before it is {checkpoint}, "
                f"and after step {change.step} the run resumed with a schedule of another length. "
                f"Replay a step up to it: --step {change.step}"
            )


def _before(
    program: Program,
    batches: CallBatches,
    run_dir: RunDir,
    step: int,
    log: Callable[[str], None],
) -> tuple[int, TrainState]:
    """Return the newest saved step before the call with the step, and its state."""
    last = batches.schedule.first(step)
    owner = run_dir.owner()
    with CheckpointManager(run_dir.checkpoints, owner=owner) as checkpoints:

        def find() -> dict[str, int | None]:
            for start in reversed([each for each in checkpoints.steps() if each <= last]):
                try:
                    layout.check_valid(run_dir.checkpoints, start, owner)
                except CheckpointError as error:
                    log(f"skipped: {error}")
                else:
                    return {"start": start}
            return {"start": None}

        while (start := broadcast_from_first(find)["start"]) is not None:
            try:
                state = checkpoints.restore(start, program.resolved.abstract_state)
            except DamagedError as error:  # the files are complete, but a leaf is damaged
                log(f"skipped: {error}")
                last = start - 1
            else:
                batches.stacked.restore(checkpoints.about(start).get("batches", {}))
                return start, state
    return 0, program.initial_state()


def _replay_steps(
    program: Program, batches: CallBatches, state: TrainState, start: int, step: int
) -> tuple[dict[int, StepRecord], TrainState, TrainState]:
    """Run the steps from `start` to the end of the call with the step, by the run's program.

    Return their records, the state before the call with the step, and the state after it.
    """
    schedule, records, before = batches.schedule, {}, state
    take = program.compile_step(schedule)
    while start < step:
        batch, end = batches.read(start), schedule.after(start)
        # The call donates its input.
        before = jax.tree.map(jnp.copy, state) if end >= step else before
        state, metrics = take(state, program.place(batch, schedule))
        found = (metrics[name].total for name in ("loss", "grad_norm"))
        losses, norms = (np.ravel(jax.device_get(x)).tolist() for x in found)
        for i, own in enumerate(split_steps(batch, schedule.stacked)):
            records[start + i + 1] = StepRecord(losses[i], norms[i], digest_batch(own))
        start = end
    return records, before, state


def _first_mismatch(
    records: Mapping[int, StepRecord], known: Mapping[int, StepRecord]
) -> ReplayMismatch | None:
    for number, here in records.items():
        recorded = known.get(number)
        if recorded is not None:
            other = ReplayMismatch(number, here, recorded)
            if other.batch or not here.same(recorded):
                return other
    return None


def _differing_leaves(run_dir: RunDir, step: int, state: TrainState) -> list[str] | None:
    """Return the leaves that differ from a checkpoint of the step; None if there is no such one."""
    if step not in layout.list_steps(run_dir.checkpoints, run_dir.owner()):
        return None
    saved = inspect.describe_checkpoint(run_dir.checkpoints, step)["leaves"]
    here = fingerprint.read(fingerprint.start(leaf_table.flatten(state)))
    return [name for name, own in here.items() if saved[name]["fingerprint"] != own]


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
    facts = [{name: story.facts.get(name) for name in FACTS} for story in stories]
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
        facts=diff_configs(*facts),
        compared=len({step for step, _ in tables[0].keys() & tables[1].keys()}),
        batch=batch,
        readers=readers,
        number=_first_other_number(*tables),
        checkpoints=common,
        same=same,
        checkpoint=first,
        leaves=leaves,
    )


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
    for row in read_metrics(run_dir.metrics):
        found |= {(row["step"], name): value for name, value in row.items() if name != "step"}
    return found


def _first_other_number(one: Mapping[tuple[int, str], Any], other: Mapping[tuple[int, str], Any]):
    # In the order of the first run's rows, so that the loss comes before derived numbers.
    for step, name in sorted(one.keys() & other.keys(), key=lambda item: item[0]):
        pair = one[step, name], other[step, name]
        if repr(pair[0]) != repr(pair[1]):  # NaN equals NaN
            return DifferingNumber(step, name, *pair)
    return None
