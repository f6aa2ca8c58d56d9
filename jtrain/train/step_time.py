"""Time of a step, measured once, by which durations in time are counted in steps."""

import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jtrain.core.loop import train_loop
from jtrain.data import ReadAhead
from jtrain.data.batches.step_batches import StackedBatches
from jtrain.train.compile_step import compile_step
from jtrain.train.experiment import RunConfig
from jtrain.train.program import Program
from jtrain.train.resolve import Resolved, resolve

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
    return resolved.count_again(seconds_per_step(Program(resolved)))


def seconds_per_step(program: Program) -> float:
    """Return the seconds of a step, data included, the same in all processes.

    The run's own program trains a state of its own, which is thrown away.
    """
    config, schedule = program.resolved.config, program.schedule
    batches = program.batches()
    step, state = compile_step(program, program.initial_state, batches)
    each = schedule.longest  # every call has the most steps, as most calls of the run do
    last = max(1, config.steps // each)  # a program of several may take fewer steps
    again = _Again(batches.stacked, last)
    reader = config.workers.build(again, start=0, stop=None)
    read = lambda call: program.place(reader(call))
    feed = ReadAhead(read, start=0, stop=None, close=reader.close)
    size = (lambda step: each) if schedule.varies else each

    def run_calls(calls: int) -> float:
        nonlocal state
        began = time.perf_counter()
        stop = calls * each
        state = train_loop(step, state, feed, start=0, stop=stop, steps_per_call=size).state
        return _first_process_value((time.perf_counter() - began) / calls)

    try:
        run_calls(WARMUP)
        roughly = run_calls(WARMUP)
        calls = min(max(math.ceil(SECONDS / roughly), LEAST), MOST)
        return run_calls(max(min(calls, int(LIMIT / roughly)), WARMUP)) / each
    finally:
        feed.close()


class _Again:
    """Batches of a run, repeated from the first after the last; picklable."""

    def __init__(self, calls: StackedBatches, last: int):
        self._calls, self._last = calls, last

    def __call__(self, call: int) -> Mapping[str, Any]:
        return self._calls[call % self._last]


def _first_process_value(seconds: float) -> float:
    """Return what the first process measured."""
    if jax.process_count() == 1:
        return seconds
    return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))
