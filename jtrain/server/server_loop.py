"""The loop of a run on parameter servers: it calls the hooks as `train_loop` does."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.core.loop import Hook, LoopResult, Stop
from jtrain.core.state import TrainState
from jtrain.core.types import Metrics
from jtrain.distributed.cluster import detect
from jtrain.errors import ConfigError
from jtrain.io.jsonl import JsonlWriter
from jtrain.parallel import Server
from jtrain.parallel.strategies.server_modes import AsyncDiLoCo, StreamingDiLoCo
from jtrain.server.coordinator import Coordinator
from jtrain.server.diloco import AsyncDiLoCoCoordinator, StreamingCoordinator
from jtrain.server.engines import ClusterEngine, Engine, LocalEngine
from jtrain.server.join import announced
from jtrain.server.members import FILE
from jtrain.server.paced import PacedCoordinator
from jtrain.server.plan import Plan
from jtrain.server.plan_checks import check_plan
from jtrain.server.registry import Registry
from jtrain.server.rounds import RoundCoordinator
from jtrain.server.supervisor import open_cluster
from jtrain.train.hooks.speed import Speed
from jtrain.train.setup import TrainSetup


def server_loop(
    step: Any,
    state: TrainState,
    feed: Iterable[Any],
    *,
    setup: TrainSetup,
    directory: Path | None,
    log: Callable[[str], None],
    start: int,
    stop: int,
    hooks: Sequence[Hook] = (),
    steps_per_call: int = 1,
) -> LoopResult[TrainState]:
    """Take steps `start + 1 .. stop` in processes of their own.

    Args:
        step, feed: not used: workers compile their steps, and read their rows.
        directory: of the run, whose config.yaml the processes read.

    Raises:
        ConfigError: if the run has no directory, or its values do not suit the mode.
    """
    del step, feed
    if directory is None:
        raise ConfigError(
            "parallel.kind=server starts processes, which read the config of a run's directory, "
            "and this run has none. Write an experiment and a config, and type jtrain run CONFIG."
        )
    plan = Plan(setup)
    check_plan(plan)
    registry = Registry(plan.server.shards)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(_open_engine(plan.server, directory, registry))
        rows = JsonlWriter(directory / FILE, retain=lambda row: True)
        stack.callback(rows.close)
        coordinator, supervisor = stack.enter_context(
            open_cluster(
                plan, engine, coordinator_of(plan), log, record=rows.append, registry=registry
            )
        )
        stack.enter_context(announced(directory, supervisor.environ))  # also the servers look there
        coordinator.start(start, state)
        for hook in hooks:
            if isinstance(hook, Speed):
                hook.also = coordinator.statistics
        return take_steps(
            coordinator, state, start=start, stop=stop, hooks=hooks, steps_per_call=steps_per_call
        )


@contextlib.contextmanager
def _open_engine(server: Server, directory: Path, registry: Registry) -> Iterator[Engine]:
    """Yield the engine of a run."""
    config = directory / "config.yaml"
    if server.engine == "ray":
        from jtrain.server.ray_engine import open_ray_engine

        with open_ray_engine(config, server) as engine:
            yield engine
    elif server.engine == "cluster":
        yield ClusterEngine(detect(os.environ), registry)
    else:
        yield LocalEngine(config, server.workers)


def coordinator_of(plan: Plan) -> type[Coordinator]:
    """Return the coordinator of a mode."""
    if isinstance(plan.server.mode, StreamingDiLoCo):
        return StreamingCoordinator
    if isinstance(plan.server.mode, AsyncDiLoCo):
        return AsyncDiLoCoCoordinator
    return PacedCoordinator if plan.has_clock else RoundCoordinator


def take_steps(
    coordinator: Coordinator,
    state: TrainState,
    *,
    start: int,
    stop: int,
    hooks: Sequence[Hook],
    steps_per_call: int = 1,
) -> LoopResult[TrainState]:
    """Let the workers take steps `start + 1 .. stop`, and call the hooks.

    Hooks that read the state are called where all steps are done and no other is begun; the workers
    wait there. The others get None for the state.
    """
    calls = _Calls(hooks, steps_per_call)
    number = gate = start
    while number < gate or (number < stop and calls.asked is None):
        if number == gate:
            gate = _next_gate(coordinator.plan, hooks, number, stop)
        for result in coordinator.advance(gate):
            if result.step <= number:  # taken again, after a server was restored
                continue
            number = result.step
            calls.on_numbers(number, result.metrics)
            if number < gate:
                calls.on_state(number, None)
                if calls.due or calls.asked:
                    gate = min(gate, max(coordinator.close(), number))
        if number == gate:
            state = jax.tree.map(jnp.asarray, coordinator.fetch(number))
            calls.on_state(number, state)
    calls.end(number, stop)
    return LoopResult(state, number, calls.asked, calls.last)


def _next_gate(plan: Plan, hooks: Sequence[Hook], number: int, stop: int) -> int:
    """Return the next step at which a hook reads the state, or a snapshot is due."""
    every = plan.server.snapshot_every
    every = -(-every // plan.inner_steps) * plan.inner_steps
    cadences = [every, *(hook.every for hook in hooks if hook.reads_state())]
    return min([stop, *(number + each - number % each for each in cadences)])


class _Calls:
    """Calls of the hooks."""

    def __init__(self, hooks: Sequence[Hook], steps_per_call: int):
        self._hooks, self._steps_per_call = hooks, steps_per_call
        self._metrics: list[Metrics] = []
        self.last: dict[str, float] = {}
        """Numbers of the last step."""
        self.asked: Stop | None = None
        """The first request to end."""
        self.due = False
        """Whether a hook needs the state of a step that is passed."""

    def on_numbers(self, number: int, metrics: Metrics) -> None:
        """Call `on_done` and `on_numbers` for a step."""
        self._metrics = [*self._metrics, metrics][-self._steps_per_call :]
        self.last = {name: mean.value() for name, mean in metrics.items()}
        for hook in self._hooks:
            if number % self._steps_per_call == 0:
                hook.on_done(number)
            if number % hook.every == 0:
                self._note(hook.on_numbers(number, self.last))

    def on_state(self, number: int, state: TrainState | None) -> None:
        """Call `on_state` of the hooks; without a state of those that read none."""
        self.due = self.due and state is None
        for hook in self._hooks:
            if type(hook).on_state is Hook.on_state or number % hook.every:
                continue
            if state is None and hook.reads_state():
                self.due = True
            else:
                self._note(hook.on_state(number, state, self._stacked()))

    def end(self, number: int, stop: int) -> None:
        """Give the last step to hooks that wait for it."""
        over = number >= stop or (self.asked is not None and self.asked.kind == "finished")
        if self.last and over and (self.asked is None or self.asked.kind != "failed"):
            for hook in self._hooks:
                if hook.last and number % hook.every:
                    self._note(hook.on_numbers(number, self.last))

    def _note(self, answer: Stop | None) -> None:
        self.asked = self.asked or answer

    def _stacked(self) -> Metrics:
        """Return the metrics of a call, as a scan of several steps stacks them."""
        if self._steps_per_call == 1:
            return self._metrics[-1]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *self._metrics)
