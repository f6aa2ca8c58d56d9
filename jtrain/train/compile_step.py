"""Compilation of the step beside the first state, checks of its batches, and the time of a step."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jtrain.core.batches import Batches
from jtrain.core.loop import train_loop
from jtrain.core.loss import normalize_loss
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.core.types import Batch
from jtrain.data import ReadAhead
from jtrain.data.batches.step_batches import SkipBatches, StackedBatches
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.parallel.offload import device_shardings, to_device
from jtrain.train.call_schedule import CallBatches
from jtrain.train.check_batch.first_batch import FirstBatch
from jtrain.train.experiment import RunConfig
from jtrain.train.program import Program
from jtrain.train.resolve import Resolved, resolve


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
            options = {"meanwhile": meanwhile, "start": start or 0}
            step = program.compile_step(batches.schedule, **options)
        made = _wait_for(state)
        checked.result()
        check_batches(program, first.result(), made)
        for each in (*program.stages, program):
            each.first.forget()
        return step, made


def _wait_for(state: Future[TrainState]) -> TrainState:
    with HEARTBEAT.during("restore"):
        return state.result()


def _batches_to_check(program: Program, train_batches: Sequence[FirstBatch]) -> list[FirstBatch]:
    batches = [*train_batches, *trace_set_batches(program)]
    return [batch for batch in batches if (batch.suspects, batch.outside) is not None]


def trace_train_batch(program: Program, batches: SkipBatches, start: int) -> list[FirstBatch]:
    """Trace the loss on the training batch of step `start`; none if the check is off.

    Raises:
        LossError: if one value a row is broadcast against another, pairing all rows.
    """
    stage, number = program.at(start), batches.number(start)
    rows = program.resolved.train(batches.windows, own_rows=False).indices(start)
    options = {"draws": True, "origin": [] if rows is None else rows.tolist()}
    first = lambda: batches[start] if number else stage.first.own
    train = stage.resolved.experiment.train
    options["microbatches"] = stage.resolved.config.microbatches if train.ragged else 0
    return _trace(stage, train, first, "the first batch", **options)


def trace_set_batches(program: Program) -> list[FirstBatch]:
    """Trace the loss on the first batch of each evaluation set.

    Raises:
        LossError: if one value a row is broadcast against another, pairing all rows.
    """
    batches = []
    for name, rows in program.resolved.sets.items():
        first = lambda rows=rows: program.resolved.own_rows(rows)[0]
        batches += _trace(program, rows, first, f"the first batch of `{name}`", draws=False)
    return batches


def _trace(
    program: Program, batches: Batches, first: Callable[[], Batch], what: str, **options: Any
) -> list[FirstBatch]:
    if not program.resolved.config.checks.first_batch:
        return []
    weights = device_shardings(
        (program.resolved.abstract_state.params, program.resolved.abstract_state.extra)
    )
    terms = normalize_loss(program.loss, ragged=batches.ragged)
    return [FirstBatch(terms, first(), batches.size, what, weights=weights, **options)]


def check_batches(program: Program, batches: Sequence[FirstBatch], state: TrainState) -> None:
    """Raise if a set with coupled rows is split, a label is out of range, or hidden rows count.

    Every process of the run calls this at the same time.

    Raises:
        LossError: if coupled rows of a set are in several batches, or hidden rows change a sum.
        DataError: for a label that the loss counts, with the row, the value and the shape.
    """
    for name in program.resolved.sets:
        program.check_set(name, state)
    like = program.resolved.abstract_state.params, program.resolved.abstract_state.extra
    strategy = program.resolved.strategy
    for batch in batches:
        weights = to_device((state.params, state.extra), like)
        batch.check(batch.make_sums(weights, strategy))
        if batch.microbatches:
            batch.check_hidden(batch.make_sums(weights, strategy), batch.microbatches)


WARMUP, LEAST, MOST = 3, 20, 2000  # calls of the step; between the last two, as fit in SECONDS
SECONDS, LIMIT = 1.5, 15.0  # to measure in; even fewer calls than LEAST, not to take longer


def resolve_with_step_time(config: RunConfig, seconds: float = 0.0) -> Resolved:
    """Resolve a config, with durations in time counted by the time of a step.

    The run's own program is timed: calls take as many steps as in the run, unless a cadence in time
    is shorter than 50 steps.

    Args:
        seconds: of a step, as measured before; 0: it is measured, if a duration needs it.

    Raises:
        UserError: as `resolve` and the compilation of a step.
    """
    resolved = resolve(config, seconds)
    if not resolved.lengths.provisional:
        return resolved
    timed = dataclasses.replace(resolved, starts=None, stages=())  # behind the last stage
    return resolved.count_again(seconds_per_step(Program(timed)))


def seconds_per_step(program: Program) -> float:
    """Return the seconds of a step, data included, the same in all processes.

    The run's own program trains a state of its own, which is thrown away.
    """
    config, schedule = program.resolved.config, program.schedule
    batches = program.batches()
    step, state = compile_step(program, program.initial_state, batches)
    each = schedule.longest  # every call has the most steps, as most calls of the run do
    last = max(1, config.steps // each)  # a program of several may take fewer steps
    again = functools.partial(_read_again, batches.stacked, last)
    reader = config.workers.build(again, start=0, stop=None)
    read = lambda call: program.place(reader(call))
    feed = ReadAhead(read, start=0, stop=None, close=reader.close)
    size = (lambda step: each) if schedule.varies else each

    def run_calls(calls: int) -> float:
        nonlocal state
        began = time.perf_counter()
        stop = calls * each
        state = train_loop(step, state, feed, start=0, stop=stop, steps_per_call=size).state
        took = (time.perf_counter() - began) / calls
        return broadcast_from_first(lambda: {"seconds": took})["seconds"]

    try:
        run_calls(WARMUP)
        roughly = run_calls(WARMUP)
        calls = min(max(math.ceil(SECONDS / roughly), LEAST), MOST)
        return run_calls(max(min(calls, int(LIMIT / roughly)), WARMUP)) / each
    finally:
        feed.close()


def _read_again(calls: StackedBatches, last: int, call: int) -> Mapping[str, Any]:
    return calls[call % last]
