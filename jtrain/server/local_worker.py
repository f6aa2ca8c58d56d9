"""Workers that take steps of their own between two pushes."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jtrain.core.state import TrainState
from jtrain.core.types import Metrics, Params
from jtrain.parallel.strategies.outer_optimizer import WorkerState
from jtrain.server.compute import Head
from jtrain.server.wire import Message
from jtrain.server.worker import Worker, about


class _LateError(Exception):
    """A lease is of no use any more."""


class LocalWorker(Worker):
    """Worker of local_sgd and diloco: it has the state of one share of the rows, or of several."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._inner: dict[int, tuple[int, int, Any]] = {}  # by share: epoch, last step, state

    def _follow(self, reply: Message) -> None:
        with contextlib.suppress(_LateError):  # the run has gone back to a snapshot since
            super()._follow(reply)
        if reply.name == "hand_over":
            self._hand_over(reply.fields["shares"])

    def _work(self, lease: Message) -> None:
        """Take the steps of a round from the pulled parameters, and push how far they went."""
        fields, share = lease.fields, lease.fields["share"]
        before, epoch, metrics = self._pull(), fields["epoch"], []
        opt_state = self._restore(share, epoch, fields["first"]).opt_state
        state = self._head(lease).state(before, opt_state)
        for step in range(fields["first"], fields["last"] + 1):
            state = self._take(state, step, share, metrics)
            if step < fields["last"] and self._leaves():
                return  # another worker takes the share again, from the first step of the round
        if len(self._inner) > 1:  # the states of other shares wait on the host
            on_host = {s: (e, last, jax.device_get(x)) for s, (e, last, x) in self._inner.items()}
            self._inner = on_host
        self._inner[share] = epoch, fields["last"], state.opt_state
        self._push(fields["number"], change_of(before, state.params), part=share)
        self._ask("report", about(lease), report_of(metrics, state))

    def _take(self, state: TrainState, step: int, share: int, metrics: list[Metrics]) -> TrainState:
        """Take a step of a share, and add its metrics."""
        state, found = self._programs.inner(state, self._batch(step, share))
        metrics.append(found)
        self._wait_if_slow()
        if time.monotonic() > self._asked + self._plan.server.timeout:
            self._ask("beat")
        return state

    def _restore(self, share: int, epoch: int, first: int) -> WorkerState:
        """Return the state of a share before a step, from the run if this worker has it not."""
        known, last, opt_state = self._inner.get(share, (-1, -1, None))
        if (known, last + 1) == (epoch, first):
            return WorkerState(opt_state)
        return self._take_up(share, self._ask_inner(share, epoch))

    def _ask_inner(self, share: int, epoch: int) -> Message:
        """Return what the run has of a share; raise `_LateError` after a return to a snapshot."""
        reply = self._ask("inner", {"share": share, "epoch": epoch})
        if reply.name == "late":
            raise _LateError
        return reply

    def _take_up(self, share: int, reply: Message, *, fresh: bool = True) -> WorkerState:
        """Return the state of a share that the run has sent, and begin with its residual.

        Args:
            fresh: whether nothing was pushed since; what an older residual has was.
        """
        found = jax.tree.structure(self._plan.inner_state).unflatten(reply.arrays)
        found = found if isinstance(found, WorkerState) else WorkerState(found)
        self._encoder(share).load(found.residual if fresh else ())
        return found

    def _own_state(self, share: int, opt_state: Any, params: Params) -> Any:
        """Return what the run saves of a share."""
        if not isinstance(self._plan.inner_state, WorkerState):
            return opt_state
        residual = self._encoder(share).residual(self._plan.program.resolved.abstract_state.params)
        own = params if self._plan.inner_state.params != () else ()
        return WorkerState(opt_state, residual, own)

    def _hand_over(self, shares: Sequence[int]) -> None:
        """Send the states of shares to the run."""
        for share in shares:
            epoch, last, opt_state = self._inner.pop(share)
            fields = {"share": share, "epoch": epoch, "done": last}
            state = self._own_state(share, opt_state, ())
            self._ask("hand_over", fields, jax.tree.leaves(state))
            self._inner[share] = epoch, last, opt_state


def change_of(before: Params, after: Params) -> Params:
    """Return how far the parameters went: the gradient of the outer step."""
    return jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), before, after)


def report_of(metrics: Sequence[Metrics], state: TrainState) -> list[Any]:
    """Return the metrics of all steps, and the head after them."""
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *metrics)
    return [*jax.tree.leaves(stacked), *jax.tree.leaves(Head.of(state))]


class StreamingWorker(LocalWorker):
    """Worker of streaming_diloco, which goes on while the others push."""

    _state: TrainState | None = None
    _at = (-1, -1, -1)  # the worker's number, the epoch of the run, and the step that it is before
    _before: Params = None  # parameters of the servers, each fragment as it was merged last

    def _follow(self, reply: Message) -> None:
        if reply.name in ("lease", "gather"):
            state = self._enter(reply)
            if reply.name == "lease":
                self._take_round(state, reply)
            else:
                own = self._own_state(self.index, state.opt_state, state.params)
                self._ask("keep", {"epoch": reply.fields["epoch"]}, jax.tree.leaves(own))

    def _enter(self, lease: Message) -> TrainState:
        """Return this worker's state, which the run and the servers have if it has none."""
        fields = lease.fields
        at = self.index, fields["epoch"], fields["first"]
        if self._state is None or self._at != at:
            reply = self._ask("inner", {"first": fields["first"]})
            found = self._take_up(self.index, reply)
            self._before = jax.tree.map(np.array, self._pull())
            params = jax.tree.map(np.array, found.params)
            self._state, self._at = self._head(lease).state(params, found.opt_state), at
        return self._state

    def _take_round(self, state: TrainState, lease: Message) -> None:
        fields, metrics = lease.fields, []
        self._state = None  # until the round is done
        for step in range(fields["first"], fields["last"] + 1):
            if fields["merge"] is not None and step == fields["merge_before"]:
                asked = {"step": fields["pushed_at"], "epoch": fields["epoch"]}
                if self._ask("merge", asked).name != "merge":
                    return  # the steps are taken again
                state = self._merge(state, fields["merge"])
            state = self._take(state, step, self.index, metrics)
        for fragment, number in fields["numbers"]:
            change = change_of(self._before, state.params)
            self._push(number, change, part=self.index, fragment=fragment)
        self._state, self._at = state, (self.index, fields["epoch"], fields["last"] + 1)
        asked = {"step": fields["first"], "epoch": fields["epoch"]}
        self._ask("report", asked, report_of(metrics, state))

    def _merge(self, state: TrainState, fragment: int) -> TrainState:
        """Return the state with a fragment mixed with the outer step of what all have pushed."""
        schedule, mode = self._plan.fragment_schedule, self._plan.server.mode
        alpha = np.float32(getattr(mode, "alpha") if schedule.overlap else 0)  # noqa: B009
        params = jax.tree.map(np.array, state.params)  # a copy, whose rows are replaced
        for part, pulled in self._pull_parts([fragment]).items():
            own = jax.tree.leaves(self._plan.parts.of_params(params, part))
            before = jax.tree.leaves(self._plan.parts.of_params(self._before, part))
            for mine, old, new in zip(own, before, pulled, strict=True):
                old[...] = new
                mine[...] = alpha * mine + (1 - alpha) * new if alpha else new
        return Head.of(state).state(params, state.opt_state)


class AsyncDiLoCoWorker(LocalWorker):
    """Worker of async_diloco, which takes a share of the rows of some steps, and then another."""

    _epoch = -1  # of the run that the state is for
    _opt_state: Any = None

    def _follow(self, reply: Message) -> None:
        if reply.name in ("lease", "gather"):
            fields = reply.fields
            if self._epoch != fields["epoch"]:
                found = self._ask("inner", {"first": fields["first"]})
                fresh = found.fields["fresh"]
                self._opt_state = self._take_up(0, found, fresh=fresh).opt_state
                self._epoch = fields["epoch"]
            if reply.name == "lease":
                self._take_unit(reply)
            else:
                own = self._own_state(0, self._opt_state, ())
                self._ask("keep", {"epoch": fields["epoch"]}, jax.tree.leaves(own))

    def _take_unit(self, lease: Message) -> None:
        fields, before = lease.fields, self._pull()
        metrics: list[Metrics] = []
        state = self._head(lease).state(before, self._opt_state)
        for step in range(fields["first"], fields["last"] + 1):
            state = self._take(state, step, fields["share"], metrics)
        unit = {"step": fields["number"]}
        if self._ask("admit", unit).name != "admitted":
            return
        self._opt_state = state.opt_state
        facts = {"finite": True, "value": 0.0, "grad_norm": 0.0}
        options = {"facts": facts, "factor": 1.0, "compensate": 0.0}
        squares = self._push(fields["number"], change_of(before, state.params), options)
        self._ask("report", {**unit, "update": squares}, report_of(metrics, state))
