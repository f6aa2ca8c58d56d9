"""Takes a step of a run again: from the checkpoint before it, on its batches, by its program."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.checkpoint import CheckpointManager, fingerprint, inspect, layout, leaf_table
from jtrain.config.command_line import spell
from jtrain.config.dump import ABSENT, Difference, differences, to_plain
from jtrain.core.state import TrainState
from jtrain.data.batches.digest import digest
from jtrain.data.batches.reader_counts import readers
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import CheckpointError, ConfigError, DamagedError
from jtrain.inspect.debug.first_difference import FACTS
from jtrain.inspect.debug.step_report import StepReport, dissect
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.step_record import StepRecord, steps
from jtrain.train.longer_run import LengthChange, changes, config_at, keep_lengths, schedule_lengths
from jtrain.train.restore_run import again
from jtrain.train.rollback import apply_decisions
from jtrain.train.run_dir import RunDir, environment
from jtrain.train.setup import TrainSetup, set_up


@dataclasses.dataclass(frozen=True)
class ReplayMismatch:
    """A step that came out otherwise than in the run."""

    step: int
    here: StepRecord
    there: StepRecord
    """Its batch is 0 where it is not compared."""

    @property
    def batch(self) -> bool:
        """Whether its data was another, so that no more can be said."""
        return bool(self.there.batch) and self.here.batch != self.there.batch


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """A step that was taken again."""

    step: int
    start: int
    """The checkpoint it was taken from, 0 where that was the beginning."""
    here: StepRecord
    there: StepRecord | None
    """As the run recorded it; None where it did not."""
    rows: tuple[int, int]
    """The first and the last row of its batch, of those that this process reads."""
    key: tuple[int, ...]
    """The data of the key it draws from."""
    compared: int
    """Steps from `start` on that the run recorded."""
    readers: tuple[int, int] | None
    """Where the batches of some are not compared, the processes that read them then and now."""
    unlike: Sequence[str]
    """What the run was taken by that is another now: processes, devices, versions, layout."""
    other: ReplayMismatch | None
    """The first of them that came out otherwise."""
    checkpoint: Sequence[str] | None
    """The leaves that the run's checkpoint of this step has otherwise; None: there is none."""
    dissected: StepReport | None


def replay(
    config: RunConfig, path: Path, step: int, *, deep: bool = True, tell: Callable[[str], None]
) -> ReplayResult:
    """Step `step` of the run in `path` taken again, and whether it has the same bits as then.

    The run's directory is read and not written. In several processes each calls this.

    Args:
        deep: whether it is also taken without jit, with checks, and leaf by leaf; in one process.
        tell: takes a line about what is being done.

    Raises:
        ConfigError: if the run has no such step, or is of other values.
        CheckpointError: if the checkpoint before it cannot be read.
    """
    parts, there = again(config, path)
    now, changed = keep_lengths(config, there.stored(type(config))), _extended(parts, there)
    config = config_at(now, changed, step)
    if config is not now:
        parts = set_up(config, there.pace)
    config = apply_decisions(config, there)
    parts = parts.without(config.guard.without)
    if not 1 <= step <= parts.config.steps:
        raise ConfigError(
            f"{path} has the steps 1 to {parts.config.steps}, and step {step} was asked for; "
            f"write --step {min(max(step, 1), parts.config.steps)}"
        )
    start, state = _before(parts, there, step, tell)
    _check_one_schedule(parts.config, changed, start, step)
    known = steps(there.steps)
    count = jax.process_count()
    others = {n: then for n, then in readers(there.stands(), known).items() if then != count}
    for number, was in known.items():
        if number in others or not there.first:  # it reads other rows than those recorded
            known[number] = was._replace(batch=0)
    tell(f"from {f'checkpoint {start}' if start else 'the first step'} of {path}")
    redone = _redo(parts, state, start, step)
    own = np.ravel(parts.calls[(step - 1) // config.steps_per_call]["row"])
    deep = deep and jax.process_count() == 1
    other = _first_other(redone.taken, known)
    return ReplayResult(
        step=step,
        start=start,
        here=redone.taken[step],
        there=known.get(step),
        rows=(int(own.min()), int(own.max())),
        key=tuple(np.ravel(jax.random.key_data(redone.before.step_key())).tolist()),
        compared=sum(number in known for number in redone.taken),
        readers=next(((others[n], count) for n in redone.taken if n in others), None),
        unlike=_unlike(parts, there, others, other.step if other else step),
        other=other,
        checkpoint=_apart(there, step, redone.after),
        dissected=dissect(config, redone.before, step, tell) if deep else None,
    )


def _unlike(parts: TrainSetup, there: RunDir, others: Mapping[int, int], step: int) -> list[str]:
    """What a step was taken by that is another now, and may round its sums otherwise.

    Args:
        others: of each step that another number of processes took, that number.
    """
    config, stands, now = parts.config, there.stands(), environment(parts.devices)
    count = jax.process_count()
    changed = [f"processes: {others[step]} then, {count} now"] if step in others else []
    facts = [{name: each.get(name) for name in FACTS} for each in (stands, now)]
    changed += [_change(d) for d in differences(*facts) if d.before not in (None, ABSENT)]
    stored = there.stored(type(config))
    layouts = [{"parallel": to_plain(each.parallel)} for each in (stored, config) if each]
    return changed + [_change(d) for d in differences(layouts[0], layouts[-1])]


def _change(found: Difference) -> str:
    return f"{found.key}: {_short(found.before)} then, {_short(found.after)} now"


def _short(value: Any) -> str:
    """A value in a few words: devices of one kind are counted."""
    if isinstance(value, list):
        kinds = [str(each).partition(" ")[2] or str(each) for each in value]
        return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "none"
    if isinstance(value, str):
        return value
    return spell(value) if value is not ABSENT else "nothing"


@dataclasses.dataclass(frozen=True)
class _Redone:
    taken: Mapping[int, StepRecord]
    before: TrainState  # the call that has the step
    after: TrainState


def _extended(parts: TrainSetup, there: RunDir) -> list[LengthChange]:
    """The steps after which the run was made longer."""

    def look() -> dict[str, Any]:
        checkpoints = CheckpointManager(there.checkpoints, owner=there.owner())
        step = checkpoints.newest()
        found = [] if step is None else changes(parts.config, step, checkpoints.about(step))
        return {"changes": [list(change) for change in found]}

    return [LengthChange(*each) for each in broadcast_from_first(look)["changes"]]


def _check_one_schedule(
    config: RunConfig, changed: Sequence[LengthChange], start: int, step: int
) -> None:
    """Refuses steps of which some were taken under another schedule than the last one."""
    lengths = schedule_lengths(config)
    for change in changed:
        then = config_at(config, changed, change.step)
        if start < change.step < step and schedule_lengths(then) != lengths:
            there = f"checkpoint {start}" if start else "none"
            raise ConfigError(
                f"step {step} was asked for, the newest checkpoint before it is {there}, and after "
                f"step {change.step} the run went on under a schedule of another length. Replay a "
                f"step on this side of it: --step {change.step}"
            )


def _before(
    parts: TrainSetup, there: RunDir, step: int, tell: Callable[[str], None]
) -> tuple[int, TrainState]:
    """The newest state that the run kept before the call with the step, and its step."""
    last = (step - 1) // parts.config.steps_per_call * parts.config.steps_per_call
    owner = there.owner()
    with CheckpointManager(there.checkpoints, owner=owner) as checkpoints:

        def look() -> dict[str, int | None]:
            for start in reversed([each for each in checkpoints.steps() if each <= last]):
                try:
                    layout.check(there.checkpoints, start, owner)
                except CheckpointError as error:
                    tell(f"passed over: {error}")
                else:
                    return {"start": start}
            return {"start": None}

        while (start := broadcast_from_first(look)["start"]) is not None:
            try:
                state = checkpoints.restore(start, parts.like)
            except DamagedError as error:  # its files are whole, and a leaf is not
                tell(f"passed over: {error}")
                last = start - 1
            else:
                parts.calls.restore(checkpoints.about(start).get("batches", {}))
                return start, state
    return 0, parts.fresh()


def _redo(parts: TrainSetup, state: TrainState, start: int, step: int) -> _Redone:
    """The steps from `start` to the end of the call that has the step, by the run's program."""
    program, each = parts.compile_step(), parts.config.steps_per_call
    taken, last = {}, (step - 1) // each
    before = state
    for call in range(start // each, last + 1):
        batch = parts.calls[call]
        before = jax.tree.map(jnp.copy, state) if call == last else before  # or it is donated
        state, metrics = program(state, parts.place(batch))
        found = (metrics[name].total for name in ("loss", "grad_norm"))
        losses, norms = (np.ravel(jax.device_get(x)).tolist() for x in found)
        for i in range(each):
            own = batch if each == 1 else {name: x[i] for name, x in batch.items()}
            taken[call * each + i + 1] = StepRecord(losses[i], norms[i], digest(own))
    return _Redone(taken, before, state)


def _first_other(
    taken: Mapping[int, StepRecord], known: Mapping[int, StepRecord]
) -> ReplayMismatch | None:
    for number, here in taken.items():
        there = known.get(number)
        if there is not None:
            other = ReplayMismatch(number, here, there)
            if other.batch or not here.same(there):
                return other
    return None


def _apart(directory: RunDir, step: int, state: TrainState) -> list[str] | None:
    """The leaves that a checkpoint of the step has otherwise; None if there is no such one."""
    if step not in layout.steps(directory.checkpoints, directory.owner()):
        return None
    there = inspect.describe_checkpoint(directory.checkpoints, step)["leaves"]
    here = fingerprint.read(fingerprint.begin(leaf_table.flatten(state)))
    return [name for name, mine in here.items() if there[name]["fingerprint"] not in ("", mine)]
