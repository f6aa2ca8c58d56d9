"""The loop of a run on parameter servers: it calls the hooks as `train_loop` does."""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.core.loop import FinishedCalls, Hook, LoopResult, Recorder, StoppedError
from jtrain.core.state import TrainState
from jtrain.distributed.cluster import detect
from jtrain.errors import ConfigError
from jtrain.io.jsonl import JsonlWriter
from jtrain.io.log import LOG
from jtrain.parallel.strategies.server_modes import AsyncDiLoCo, StreamingDiLoCo
from jtrain.server.coordinator import Coordinator
from jtrain.server.engines import ClusterEngine, Engine, LocalEngine, open_ray_engine
from jtrain.server.listener import Registry
from jtrain.server.members import FILE
from jtrain.server.paced import PacedCoordinator
from jtrain.server.plan import Plan
from jtrain.server.plan_checks import check_plan
from jtrain.server.process import announced
from jtrain.server.rounds import RoundCoordinator
from jtrain.server.streaming import AsyncDiLoCoCoordinator, StreamingCoordinator
from jtrain.server.supervisor import open_cluster
from jtrain.train.hooks.speed import Speed
from jtrain.train.program import Program


def server_loop(
    step: Any,
    state: TrainState,
    feed: Iterable[Any],
    *,
    program: Program,
    directory: Path | None,
    start: int,
    stop: int,
    hooks: Sequence[Hook] = (),
    recorders: Sequence[Recorder] = (),
    between: Callable[[int], None] = lambda step: None,
    **ignored: Any,
) -> LoopResult[TrainState]:
    """Take steps `start + 1 .. stop` in processes of their own.

    Args:
        step, feed, ignored: not used: workers compile their steps, and read their rows.
        directory: of the run, whose config.yaml the processes read.

    Raises:
        ConfigError: if the run has no directory, or its values do not suit the mode.
    """
    del step, feed, ignored
    if directory is None:
        raise ConfigError(
            "parallel.kind=server starts processes, which read the config of a run's directory, "
            "and this run has none. Write an experiment and a config, and type jtrain run CONFIG."
        )
    plan = Plan(program)
    check_plan(plan)
    registry = Registry(plan.server.shards)
    with contextlib.ExitStack() as stack:
        config = directory / "config.yaml"
        engine: Engine = LocalEngine(config, plan.server.workers)
        if plan.server.engine == "ray":
            engine = stack.enter_context(open_ray_engine(config, plan.server))
        elif plan.server.engine == "cluster":
            engine = ClusterEngine(detect(os.environ), registry)
        rows = JsonlWriter(directory / FILE, retain=lambda row: True)
        stack.callback(rows.close)
        coordinator, supervisor = stack.enter_context(
            open_cluster(
                plan, engine, coordinator_of(plan), LOG.info, record=rows.append, registry=registry
            )
        )
        stack.enter_context(announced(directory, supervisor.environ))  # also the servers look there
        coordinator.start(start, state)
        for hook in hooks:
            if isinstance(hook, Speed):
                hook.also = coordinator.statistics
        return take_steps(
            coordinator,
            state,
            start=start,
            stop=stop,
            hooks=hooks,
            recorders=recorders,
            between=between,
        )


def coordinator_of(plan: Plan) -> type[Coordinator]:
    """Return the coordinator of a mode."""
    match plan.server.mode:
        case StreamingDiLoCo():
            return StreamingCoordinator
        case AsyncDiLoCo():
            return AsyncDiLoCoCoordinator
    return PacedCoordinator if plan.has_clock else RoundCoordinator


def take_steps(
    coordinator: Coordinator,
    state: TrainState,
    *,
    start: int,
    stop: int,
    hooks: Sequence[Hook] = (),
    recorders: Sequence[Recorder] = (),
    between: Callable[[int], None] = lambda step: None,
) -> LoopResult[TrainState]:
    """Let the workers take steps `start + 1 .. stop`, and call the hooks.

    Hooks get the state where all steps are done and no other is begun; the workers wait there.
    """
    calls = FinishedCalls(hooks, recorders, start, stacked=False, record_every=1)
    every = coordinator.plan.snapshot_every

    def next_gate(number: int) -> int:
        """Return the next step at which a hook takes the state, or a snapshot is due."""
        return min(stop, number + every - number % every, calls.next_state(number))

    number, gate = start, next_gate(start)
    while number < gate or (number < stop and calls.asked is None):
        if number == gate:
            gate = next_gate(number)
        for step, metrics in coordinator.advance(gate):
            if step <= number:  # taken again, after a server was restored
                continue
            try:
                between(number)
            except StoppedError as error:  # the run ends at the next gate
                calls.asked = calls.asked or error.stop
            number = step
            if calls.add(range(number, number + 1), metrics) or calls.asked:
                due = number + 1 if calls.asked else next_gate(number)
                if due < gate:  # a hook asks for an earlier state, or for the end
                    gate = min(gate, max(coordinator.close(), number))
        if number == gate:
            state = jax.tree.map(jnp.asarray, coordinator.fetch(number))
            calls.show(state, number)
    calls.deliver()
    calls.end(number, over=number >= stop)
    return LoopResult(state, number, calls.asked, calls.last)
