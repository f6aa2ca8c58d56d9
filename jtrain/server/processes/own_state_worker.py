"""Workers that keep a state of their own from lease to lease, and send it where it is saved."""

from typing import Any

import jax
import numpy as np

from jtrain.core.state import TrainState
from jtrain.core.types import Metrics, Params
from jtrain.server.plan.compute import Head
from jtrain.server.processes.local_worker import LocalWorker, change_of, report_of
from jtrain.server.transport.wire import Message


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
