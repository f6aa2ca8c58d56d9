"""Replay of steps of a run from a checkpoint, and of one step with a comparison of its bits."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.checkpoint import CheckpointManager, inspect, layout, leaf_table
from jtrain.config.dump import ABSENT, diff_configs, to_plain
from jtrain.config.schema import format_value
from jtrain.core.state import TrainState
from jtrain.core.step import Metrics, StepFn
from jtrain.core.types import Batch
from jtrain.data.batches.fingerprint import digest_batch
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import ConfigError, DamagedError
from jtrain.inspect.debug.compare import diff_environments
from jtrain.parallel import fingerprint
from jtrain.train.call_schedule import CallBatches, split_steps
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.step_record import NUMBERS, StepRecord, read_step_records
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
from jtrain.train.run_store import count_readers


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
    farthest: tuple[float, str]
    """Largest relative difference of a recorded number, and the name of that number."""
    readers: tuple[int, int] | None
    """Number of processes then and now, if some batches are not compared."""
    unlike: Sequence[str]
    """Changes since the run: processes, devices, versions, layout."""
    other: ReplayMismatch | None
    """The first step that differs."""
    checkpoint: Sequence[str] | None
    """Leaves that differ from the run's checkpoint of this step; None: no such checkpoint."""

    def describe_difference(self) -> str:
        """Return what differs from the run; "" if nothing does, or only by another rounding."""
        if self.other is None:
            if not self.checkpoint or self.farthest[0] or self.unlike:  # elsewhere bits may differ
                return ""
            return f"{self.checkpoint[0]} of checkpoint {self.step}"
        step, now, then = self.other.step, self.other.replayed, self.other.recorded
        if self.other.batch:
            return f"the rows of step {step}: digest {then.batch} in the run, {now.batch} now"
        distance, name = now.distance(then)
        values = f"{getattr(then, name)!r} in the run, {getattr(now, name)!r} now"
        return f"{name} of step {step}: {values} ({distance:.1e} relative)"


def replay(
    config: RunConfig,
    path: Path,
    step: int,
    *,
    log: Callable[[str], None],
    tolerance: float | None = None,
) -> ReplayResult:
    """Replay step `step` of the run in `path`, and compare it with the run.

    The run's directory is read and not written. With several processes, each must call this.

    Args:
        tolerance: relative, of the recorded numbers; the run's layout is then fitted to the devices
            here. None: bits are compared, on the run's own layout.

    Raises:
        ConfigError: if the run has no such step, or other values.
        CheckpointError: if the checkpoint before it cannot be read.
    """
    program, run_dir = set_up_stored(config, path, None if tolerance is None else log)
    config = dataclasses.replace(config, parallel=program.resolved.config.parallel)
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
    start, state = restore_before(program, batches, run_dir, schedule.first(step), log)
    _check_schedule(program.resolved.config, changed, start, step)
    known = read_step_records(run_dir.steps)
    count = jax.process_count()
    others = {n: then for n, then in count_readers(run_dir.facts(), known).items() if then != count}
    for number, was in known.items():
        if number in others or not run_dir.first:  # it reads other rows than the recorded ones
            known[number] = was._replace(batch=0)
    records, before, after = _replay_steps(program, batches, state, start, step)
    own = np.ravel(batches.read(schedule.first(step))["row"])
    other = _first_mismatch(records, known, tolerance)
    distances = (here.distance(known[n]) for n, here in records.items() if n in known)
    return ReplayResult(
        step=step,
        start=start,
        replayed=records[step],
        recorded=known.get(step),
        rows=(int(own.min()), int(own.max())),
        key=tuple(np.ravel(jax.random.key_data(before.step_key())).tolist()),
        compared=sum(number in known for number in records),
        farthest=max(distances, default=(0.0, "")),
        readers=next(((others[n], count) for n in records if n in others), None),
        unlike=_environment_changes(program, run_dir, others, other.step if other else step),
        other=other,
        checkpoint=_differing_leaves(run_dir, step, after),
    )


def _environment_changes(
    program: Program, run_dir: RunDir, others: Mapping[int, int], step: int
) -> list[str]:
    """Return the changes since the run that may change the rounding of a step.

    Args:
        others: the number of processes of each step that another number of processes ran.
    """
    config, count = program.resolved.config, jax.process_count()
    changed = [f"processes: {others[step]} then, {count} now"] if step in others else []
    now = get_environment(program.resolved.devices)
    found = diff_environments(run_dir.facts(), now)
    found = [each for each in found if each.before not in (None, ABSENT)]
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


class Call(NamedTuple):
    """A call of the compiled step that was taken again."""

    start: int  # the last step before it
    end: int
    batch: Batch  # arrays of the host; k b ... for a call of several steps
    state: TrainState  # after it
    metrics: Metrics

    def numbers(self, name: str) -> list[float]:
        """Return a metric of each step."""
        found = np.ravel(jax.device_get(self.metrics[name].total)).tolist()
        return found[: self.end - self.start]


def take_calls(
    program: Program,
    batches: CallBatches,
    state: TrainState,
    start: int,
    stop: int,
    take: StepFn | None = None,
) -> Iterator[Call]:
    """Take the steps after `start` as the run takes them, to the end of the call with `stop`.

    A call donates the state before it: copy one that is needed later.

    Args:
        take: the compiled step; None: it is compiled for the first call.
    """
    schedule = batches.schedule
    while start < stop:
        take = take or program.compile_step(schedule, start=start)
        batch, end = batches.read(start), schedule.after(start)
        state, metrics = take(state, program.place(batch, schedule, first=start))
        yield Call(start, end, batch, state, metrics)
        start = end


def restore_before(
    program: Program,
    batches: CallBatches,
    run_dir: RunDir,
    last: int,
    log: Callable[[str], None],
    accepts: Callable[[TrainState], bool] = lambda state: True,
) -> tuple[int, TrainState]:
    """Return the newest saved step up to `last` whose state is accepted, or step 0; its state."""
    with CheckpointManager(run_dir.checkpoints, owner=run_dir.owner()) as checkpoints:
        steps = broadcast_from_first(lambda: {"steps": checkpoints.steps()})["steps"]
        for start in sorted((each for each in steps if each <= last), reverse=True):
            try:
                state = checkpoints.restore(start, program.resolved.abstract_state)
            except DamagedError as error:  # the same for all processes, who read the same files
                log(f"skipped: {error}")
                continue
            if accepts(state):
                batches.train.restore(checkpoints.about(start).get("batches", {}))
                log(f"from checkpoint {start} of {run_dir.path}")
                return start, state
    log(f"from the first step of {run_dir.path}")
    return 0, program.initial_state()


def _replay_steps(
    program: Program, batches: CallBatches, state: TrainState, start: int, step: int
) -> tuple[dict[int, StepRecord], TrainState, TrainState]:
    """Run the steps from `start` to the end of the call with the step, by the run's program.

    Return their records, the state before the call with the step, and the state after it.
    """
    schedule, records = batches.schedule, {}
    calls, last = take_calls(program, batches, state, start, step), schedule.first(step)
    before = None if start < last else jax.tree.map(jnp.copy, state)
    for call in calls:
        state = call.state
        before = jax.tree.map(jnp.copy, state) if call.end == last else before
        losses, grads, updates = map(call.numbers, NUMBERS)
        numbers = zip(losses, grads, updates, strict=True)
        parts = split_steps(call.batch, schedule.stacked)
        for number, (each, own) in enumerate(zip(numbers, parts, strict=True), call.start + 1):
            records[number] = StepRecord(*each, digest_batch(own))
    assert before is not None, "a call ends before the one with the step"
    return records, before, state


def _first_mismatch(
    records: Mapping[int, StepRecord],
    known: Mapping[int, StepRecord],
    tolerance: float | None,
) -> ReplayMismatch | None:
    for number, here in records.items():
        recorded = known.get(number)
        if recorded is not None:
            other = ReplayMismatch(number, here, recorded)
            near = tolerance is not None and here.distance(recorded)[0] <= tolerance
            if other.batch or not (near or here.same(recorded)):
                return other
    return None


def _differing_leaves(run_dir: RunDir, step: int, state: TrainState) -> list[str] | None:
    """Return the leaves that differ from a checkpoint of the step; None if there is no such one."""
    if step not in layout.list_steps(run_dir.checkpoints, run_dir.owner()):
        return None
    saved = inspect.describe_checkpoint(run_dir.checkpoints, step)["leaves"]
    here = fingerprint.read(fingerprint.start(leaf_table.flatten(state)))
    return [name for name, own in here.items() if saved[name]["fingerprint"] != own]
