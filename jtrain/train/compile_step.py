"""Compilation of the step beside the first state, and what decides that it is compiled again."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from jtrain.config.dump import flatten, to_plain
from jtrain.core.pytree import named_leaves
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.distributed.compiler_flags import VARIABLES
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.io.environment import installed_version
from jtrain.io.jsonl import JsonlWriter, complete_rows
from jtrain.train.check_batch.first_batch import (
    FirstBatch,
    check_batches,
    trace_set_batches,
    trace_train_batch,
)
from jtrain.train.code_digest import PYTHON, digest_code
from jtrain.train.program import Program
from jtrain.train.supersteps import CallBatches, CallSchedule


def compile_step(
    program: Program,
    make_state: Callable[[], TrainState],
    batches: CallBatches,
    start: int | None = None,
) -> tuple[StepFn, TrainState]:
    """Return the compiled step, and the state that `make_state` makes during compilation.

    Args:
        start: the step that the run resumes from, whose batch is checked.

    Raises:
        UserError: for what is wrong with the loss, or with the first batch that it gets.
    """
    # Traced in this thread, where a caller's `with jax...` holds.
    train_batches = trace_train_batch(program, batches.train, start or 0)
    with ThreadPoolExecutor(1) as beside:
        state, checked = beside.submit(make_state), beside.submit(program.check_evaluation)
        first = beside.submit(_batches_to_check, program, train_batches)
        # Two programs that XLA:CPU compiles at a time take twice as long as one after the other. A
        # checkpoint is read beside, for nothing of it is compiled.
        one_by_one = start is None and program.resolved.devices[0].platform == "cpu"
        with HEARTBEAT.during("compile"):
            meanwhile = lambda: _wait_for(state) if one_by_one else None
            step = program.compile_step(batches.schedule, meanwhile=meanwhile)
        made = _wait_for(state)
        checked.result()
        check_batches(program, first.result(), made)
        program.first.forget()
        return step, made


def _wait_for(state: Future[TrainState]) -> TrainState:
    with HEARTBEAT.during("restore"):
        return state.result()


def _batches_to_check(program: Program, train_batches: Sequence[FirstBatch]) -> list[FirstBatch]:
    """Return the first batches, those of the evaluation sets too, with what is suspect in them."""
    batches = [*train_batches, *trace_set_batches(program)]
    return [batch for batch in batches if (batch.suspects, batch.outside) is not None]


Signature: TypeAlias = dict[str, dict[str, str]]
ARGUMENTS, VALUES, CODE, ENVIRONMENT = "arguments", "values", "code", "environment"
# Keys of a config that change no program.
_OUTSIDE = (
    *("name", "seed", "data", "init_from", "evaluate", "checkpoint", "log", "checks", "guard"),
    *("workers", "trackers"),
)


class ProgramChange(NamedTuple):
    """A difference between two compiled steps."""

    part: str
    """arguments, values, code or environment."""
    name: str
    before: str
    """Empty if it is new."""
    after: str
    """Empty if it is gone."""


class CompileRecord(NamedTuple):
    """A compile of a run."""

    step: int
    """Step that the run resumed from; 0 at its start."""
    time: str
    signature: Signature


def program_signature(program: Program, schedule: CallSchedule) -> Signature:
    """Return the arguments of a run's step and all values that are constants of its program.

    Nothing is traced or compiled.
    """
    arguments = {
        f"state/{name}": _leaf(leaf)
        for name, leaf in named_leaves(program.resolved.abstract_state).items()
    }
    for name, array in program.first.shapes.items():
        arguments[f"batch/{name}"] = _array(array.dtype, array.shape)
    values = {
        key: repr(value)
        for key, value in flatten(to_plain(program.resolved.config)).items()
        if key.partition(".")[0] not in _OUTSIDE
    }
    longest = schedule.longest
    values["steps_per_call"] = f"auto, at most {longest}" if schedule.varies else str(longest)
    kinds = sorted({f"{d.platform} {d.device_kind}" for d in program.resolved.devices})
    environment = {name: installed_version(name) for name in ("jtrain", "jax", "jaxlib", "libtpu")}
    environment |= {"devices": f"{len(program.resolved.devices)} x {', '.join(kinds)}"}
    environment |= {name: os.environ.get(name, "") for name in VARIABLES}
    code = digest_code(program.resolved.config.code_root())
    environment[PYTHON] = code.pop(PYTHON)
    return {
        ARGUMENTS: arguments,
        VALUES: values,
        CODE: code,
        ENVIRONMENT: {name: value for name, value in environment.items() if value},
    }


def compare_signatures(before: Signature, after: Signature) -> list[ProgramChange]:
    """Return what differs between two compiled steps, arguments first."""
    changes = []
    for part in (ARGUMENTS, VALUES, CODE, ENVIRONMENT):
        old, new = before.get(part, {}), after.get(part, {})
        for name in {**old, **new}:
            one, other = old.get(name, ""), new.get(name, "")
            if one != other:
                changes.append(ProgramChange(part, name, one, other))
    return changes


def record_compile(path: Path, program: Program, schedule: CallSchedule, step: int) -> None:
    """Append the signature of a compiled step to a file; only its time if it is the last one."""
    records = read_compiles(path)
    signature = program_signature(program, schedule)
    row: dict[str, Any] = {"step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    if not records or records[-1].signature != signature:
        row["signature"] = signature
    writer = JsonlWriter(path, retain=lambda row: True)
    writer.append(row)
    writer.close()


def read_compiles(path: Path) -> list[CompileRecord]:
    """Return the compiles of a run; a row that is no record ends the list.

    Raises:
        CheckpointError: if a row cannot be read.
    """
    found: list[CompileRecord] = []
    for row in complete_rows(path):
        signature = row.get("signature", found[-1].signature if found else None)
        if not isinstance(signature, dict) or not isinstance(row.get("step"), int):
            break
        found.append(CompileRecord(row["step"], str(row.get("time", "")), signature))
    return found


def _leaf(leaf: Any) -> str:
    text = _array(leaf.dtype, leaf.shape)
    spec: tuple[Any, ...] = tuple(getattr(leaf.sharding, "spec", ()) or ())
    if not any(spec):
        return text
    dims = [x if isinstance(x, str) else " x ".join(x) if x else "-" for x in spec]
    return f"{text} split over {', '.join(dims)}"


def _array(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
