"""Streaming and asynchronous DiLoCo in one program: the arithmetic of workers and servers.

Schedule, fragments, codecs, error feedback and outer optimizers are those of one server. Workers
take their turns in order.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from jtrain.core.state import TrainState
from jtrain.core.types import Batch, Params
from jtrain.parallel.strategies.server_modes import AsyncDiLoCo, StreamingDiLoCo, has_feedback
from jtrain.server.codec import Publisher, PushEncoder, Subscriber
from jtrain.server.local_worker import change_of
from jtrain.server.plan import Plan
from jtrain.server.shard import Facts, Shard
from jtrain.train.program import Program

FACTS = Facts(finite=True, value=0.0, grad_norm=0.0)
ReadShare = Callable[[int, int, int], Batch]
"""`(worker, first, last)` to its share of the rows of these steps, stacked."""


class Simulation:
    """Servers and workers of a run with local steps."""

    def __init__(self, program: Program, state: TrainState, read: ReadShare):
        self.plan, self._read = Plan(program), read
        plan, workers = self.plan, self.plan.server.workers
        self._step = jax.jit(
            lambda state, batches: jax.lax.scan(plan.programs.inner, state, batches)
        )
        opt_state = plan.inner_rule.init(state.params)
        self.states = [dataclasses.replace(state, opt_state=opt_state)] * workers
        feedback = has_feedback(plan.server.compress)
        self._encoders = [
            PushEncoder(plan.push_codec, plan.parts, feedback=feedback) for _ in self.states
        ]
        parts = range(len(plan.parts.shards))
        rows = [plan.parts.of_params(state.params, part) for part in parts]
        self._shards = [self._shard(each) for each in rows]
        self._subscriber = Subscriber(plan.pull_codec)
        self._like = jax.tree.map(np.array, state.params)

    def _shard(self, rows: Params) -> Shard:
        plan = self.plan
        publisher = Publisher(plan.pull_codec) if plan.publishes else None
        return Shard(plan.optimizer, rows, plan.optimizer.init(rows), publisher=publisher)

    def take(self, worker: int, first: int, last: int) -> None:
        """Take steps of a worker."""
        if first <= last:
            batches = self._read(worker, first, last)
            self.states[worker], _ = self._step(self.states[worker], batches)

    def take_all(self, first: int, last: int) -> None:
        """Take steps of all workers."""
        for worker in range(len(self.states)):
            self.take(worker, first, last)

    def pull(self, part: int) -> list[np.ndarray]:
        """Return the leaves of a part as workers read them."""
        if self.plan.publishes:
            change = self._shards[part].pull_change(self._subscriber.known(part))
            return self._subscriber.take(part, change)
        codec, leaves = self.plan.pull_codec, self._shards[part].pull(0)
        return codec.decode(codec.encode(leaves), leaves)

    def push(self, worker: int, part: int, change: Params) -> list[np.ndarray]:
        """Return the leaves of a worker's push as the server reads them."""
        encoder = self._encoders[worker]
        pushed = encoder.encode(part, jax.tree.leaves(self.plan.parts.of_params(change, part)))
        encoder.keep(part, pushed)
        return pushed.sent

    def apply(self, part: int, leaves: list[np.ndarray]) -> None:
        """Take the outer step of a part."""
        shard = self._shards[part]
        shard.push_and_apply(shard.version + 1, 0, leaves, FACTS)

    def join(self, parts: Iterable[list[np.ndarray]]) -> Params:
        """Return the parameters from the leaves of their parts."""
        return self.plan.parts.join(self._like, list(parts))

    def pull_all(self) -> Params:
        """Return the parameters as workers read them."""
        pulled = self.join(self.pull(part) for part in range(len(self._shards)))
        return jax.tree.map(np.array, pulled)

    @property
    def params(self) -> Params:
        """The parameters of the servers, to the bit."""
        return self.join(shard.pull(0) for shard in self._shards)


def simulate(program: Program, state: TrainState, read: ReadShare) -> Params:
    """Train in the mode of the config, and return the parameters of the servers."""
    simulation = Simulation(program, state, read)
    mode = simulation.plan.server.mode
    if isinstance(mode, StreamingDiLoCo):
        _stream(simulation, mode, program.resolved.config.steps)
    else:
        assert isinstance(mode, AsyncDiLoCo), mode
        _take_turns(simulation, mode, program.resolved.config.steps)
    return simulation.params


def _stream(simulation: Simulation, mode: StreamingDiLoCo, stop: int) -> None:
    """Take the rounds of the schedule, each up to a push, with a merge before one of its steps."""
    plan = simulation.plan
    alpha = np.float32(mode.alpha if mode.overlap else 0)
    before, done = simulation.pull_all(), 0
    while done < stop:
        found = plan.fragment_schedule.round_after(done, stop)
        middle = found.first
        if found.merge is not None:
            middle = found.merge_before
            simulation.take_all(found.first, middle - 1)
            _merge(simulation, before, found.merge, alpha)
        simulation.take_all(middle, found.last)
        changes = [change_of(before, state.params) for state in simulation.states]
        for part in found.pushes:
            sent = [simulation.push(worker, part, each) for worker, each in enumerate(changes)]
            means = [sum(xs) / np.float32(len(xs)) for xs in zip(*sent, strict=True)]
            simulation.apply(part, [np.asarray(mean) for mean in means])
        done = found.last


def _merge(simulation: Simulation, before: Params, fragment: int, alpha: np.float32) -> None:
    """Mix a fragment of all workers with the outer step."""
    of = simulation.plan.parts.of_params
    for part in simulation.plan.parts_of(fragment):
        pulled = simulation.pull(part)
        _write(jax.tree.leaves(of(before, part)), pulled)
        for worker, state in enumerate(simulation.states):
            params = jax.tree.map(np.array, state.params)
            own = jax.tree.leaves(of(params, part))
            _write(own, [alpha * x + (1 - alpha) * y for x, y in zip(own, pulled, strict=True)])
            simulation.states[worker] = dataclasses.replace(state, params=params)


def _take_turns(simulation: Simulation, mode: AsyncDiLoCo, stop: int) -> None:
    """Let each worker pull right after its own push, before the others push."""
    workers = simulation.plan.server.workers
    pulled = [simulation.pull_all()] * workers
    for first in range(1, stop + 1, mode.inner_steps):
        for worker in range(workers):
            state = simulation.states[worker]
            simulation.states[worker] = dataclasses.replace(state, params=pulled[worker])
            simulation.take(worker, first, min(first + mode.inner_steps - 1, stop))
            change = change_of(pulled[worker], simulation.states[worker].params)
            for part in range(len(simulation.plan.parts.shards)):
                simulation.apply(part, simulation.push(worker, part, change))
            pulled[worker] = simulation.pull_all()


def _write(rows: Sequence[np.ndarray], leaves: Sequence[np.ndarray]) -> None:
    for row, leaf in zip(rows, leaves, strict=True):
        row[...] = leaf
