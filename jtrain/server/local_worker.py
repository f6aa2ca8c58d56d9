"""Workers that take steps of their own between two pushes."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.core.state import TrainState
from jtrain.core.types import Metrics, Params
from jtrain.parallel.strategies.outer_optimizer import WorkerState
from jtrain.server.plan import head_of
from jtrain.server.wire import Message
from jtrain.server.worker import Worker, about


class Held(NamedTuple):
    """State of a share that a worker has."""

    epoch: int
    last: int
    """Step, or unit, that it is after."""
    state: TrainState


class LocalWorker(Worker):
    """Worker of local_sgd and diloco: it has the state of one share of the rows, or of several."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._held: dict[int, Held] = {}  # by share

    def _work(self, lease: Message) -> None:
        """Take the steps of a round from the pulled parameters, and push how far they went."""
        fields, share = lease.fields, lease.fields["share"]
        before = self._pull()
        own = self._hold(lease, share)
        state, metrics = self._take_steps(lease, self._state(lease, before, own.opt_state))
        for other, held in self._held.items():  # the states of other shares wait on the host
            if other != share:
                self._held[other] = held._replace(state=jax.device_get(held.state))
        after = dataclasses.replace(state, params=())
        self._held[share] = Held(fields["epoch"], fields["last"], after)
        self._push(fields["number"], change_of(before, state.params), share)
        self._ask("report", about(lease), report_of(metrics, state))

    def _take_steps(self, lease: Message, state: TrainState) -> tuple[TrainState, list[Metrics]]:
        """Take the steps of a lease, unless this worker is to leave before the last one."""
        fields, metrics = lease.fields, []
        for step in range(fields["first"], fields["last"] + 1):
            if step > fields["first"]:
                self._leave_if_asked()  # another worker takes the share again, from the first step
            state = self._take(state, step, fields["share"], metrics)
        return state, metrics

    def _take(self, state: TrainState, step: int, share: int, metrics: list[Metrics]) -> TrainState:
        """Take a step of a share, and add its metrics."""
        state, found = self._programs.inner(state, self._batch(step, share))
        metrics.append(found)
        time.sleep(self._slow)
        if time.monotonic() > self._asked + self._plan.server.timeout:
            self._ask("beat")
        return state

    def _hold(self, lease: Message, share: int) -> TrainState:
        """Return the state of a share, which the run has if this worker has it not."""
        held = self._held.get(share)
        if held is None or not self._is_current(held, lease):
            held = Held(lease.fields["epoch"], lease.fields["first"] - 1, self._fetch(lease, share))
            self._held[share] = held
        return held.state

    def _is_current(self, held: Held, lease: Message) -> bool:
        """Return whether a state is that before a lease."""
        return (held.epoch, held.last + 1) == (lease.fields["epoch"], lease.fields["first"])

    def _fetch(self, lease: Message, share: int) -> TrainState:
        """Return the state that the run has of a share, and begin with its residual."""
        reply = self._ask("inner", {"share": share, "epoch": lease.fields["epoch"]})
        found = jax.tree.structure(self._plan.inner_state).unflatten(reply.arrays)
        found = found if isinstance(found, WorkerState) else WorkerState(found)
        # What an older residual has was pushed since.
        self._encoder(share).load(found.residual if reply.fields["fresh"] else ())
        return self._state(lease, found.params, found.opt_state)

    def _hand_over(self, shares: Sequence[int]) -> None:
        """Send the states of shares to the run."""
        like = self._plan.inner_state
        for share in shares:
            epoch, last, state = self._held[share]
            own = state.opt_state
            if isinstance(like, WorkerState):
                residual = self._encoder(share).residual(self._plan.abstract_state.params)
                own = WorkerState(own, residual, state.params if like.params != () else ())
            fields = {"share": share, "epoch": epoch, "done": last}
            self._ask("hand_over", fields, jax.tree.leaves(own))


def change_of(before: Params, after: Params) -> Params:
    """Return how far the parameters went: the gradient of the outer step."""
    return jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), before, after)


def report_of(metrics: Sequence[Metrics], state: TrainState) -> list[Any]:
    """Return the metrics of all steps, and the head after them."""
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *metrics)
    return [*jax.tree.leaves(stacked), *jax.tree.leaves(head_of(state))]


class StreamingWorker(LocalWorker):
    """Worker of streaming_diloco, which goes on while the others push."""

    _before: Params = None  # parameters of the servers, each fragment as it was merged last

    def _fetch(self, lease: Message, share: int) -> TrainState:
        state = super()._fetch(lease, share)
        self._before = jax.tree.map(np.array, self._pull())
        return dataclasses.replace(state, params=jax.tree.map(np.array, state.params))

    def _work(self, lease: Message) -> None:
        fields, share = lease.fields, lease.fields["share"]
        state, metrics = self._hold(lease, share), []
        del self._held[share]  # until the round is done: the merge changes more than the state
        for step in range(fields["first"], fields["last"] + 1):
            if fields["merge"] is not None and step == fields["merge_before"]:
                self._ask("merge", {"step": fields["pushed_at"], "epoch": fields["epoch"]})
                state = self._merge(state, fields["merge"])
            state = self._take(state, step, share, metrics)
        for fragment, number in fields["numbers"]:
            self._push(number, change_of(self._before, state.params), share, fragment=fragment)
        self._held[share] = Held(fields["epoch"], fields["last"], state)
        self._ask("report", about(lease), report_of(metrics, state))

    def _merge(self, state: TrainState, fragment: int) -> TrainState:
        """Return the state with a fragment mixed with the outer step of what all have pushed."""
        schedule, mode = self._plan.fragment_schedule, self._plan.server.mode
        alpha = np.float32(getattr(mode, "alpha") if schedule.overlap else 0)  # noqa: B009
        params = jax.tree.map(np.array, state.params)  # a copy, whose rows are replaced
        for part, pulled in self._pull_fragment(fragment, keep=False).items():
            own = jax.tree.leaves(self._plan.parts.of_params(params, part))
            before = jax.tree.leaves(self._plan.parts.of_params(self._before, part))
            for mine, old, new in zip(own, before, pulled, strict=True):
                old[...] = new
                mine[...] = alpha * mine + (1 - alpha) * new if alpha else new
        return dataclasses.replace(state, params=params)


class AsyncDiLoCoWorker(LocalWorker):
    """Worker of async_diloco, which takes a share of the rows of some steps, and then another."""

    def _is_current(self, held: Held, lease: Message) -> bool:
        return held.epoch == lease.fields["epoch"]

    def _work(self, lease: Message) -> None:
        fields, before = lease.fields, self._pull()
        own = self._hold(lease, self.index)
        state, metrics = self._take_steps(lease, self._state(lease, before, own.opt_state))
        unit = {"step": fields["number"]}
        treatment = self._ask("admit", unit).fields
        after = dataclasses.replace(state, params=())
        self._held[self.index] = Held(fields["epoch"], fields["number"], after)
        facts = {"finite": True, "value": 0.0, "grad_norm": 0.0}
        change = change_of(before, state.params)
        squares = self._push(fields["number"], change, self.index, {"facts": facts, **treatment})
        self._ask("report", {**unit, "update": squares}, report_of(metrics, state))
