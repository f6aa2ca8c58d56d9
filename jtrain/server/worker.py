"""Worker: pulls parameters, computes what its lease says, and pushes the result."""

import dataclasses
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jtrain.core.pytree import norm
from jtrain.core.rows import with_rows
from jtrain.core.state import TrainState
from jtrain.core.types import Batch, Params
from jtrain.data.batches.step_batches import SkipBatches
from jtrain.errors import ConfigError
from jtrain.parallel.strategies.server_modes import has_feedback, splits_rows
from jtrain.server.client import Client, RefusedError, call_all
from jtrain.server.codec import Published, PushEncoder, Subscriber
from jtrain.server.plan import Plan, head_of
from jtrain.server.wire import Message


class UnknownWorkerError(Exception):
    """The run has taken this worker for dead; it may join again."""


class LateError(Exception):
    """A lease is another's now, or the run has gone back to a snapshot since."""


class EndError(Exception):
    """The run has ended, or this worker has left it."""


class Worker:
    """A worker of a run.

    Args:
        process: its number among those that the run has started; None if it comes by itself.
        slow: seconds that each step waits, for benchmarks.
        leaving: set when this worker is to leave after its step.
        facts: about its code, which has to be that of the run.
    """

    def __init__(
        self,
        plan: Plan,
        process: int | None,
        coordinator: Client,
        shards: Sequence[Client],
        *,
        slow: float = 0.0,
        leaving: threading.Event | None = None,
        facts: Mapping[str, str] | None = None,
    ):
        self._plan, self._process, self._slow, self._facts = plan, process, slow, facts
        self._coordinator, self._shards = coordinator, shards
        self._leaving, self._must_leave = leaving or threading.Event(), 0.0
        self._asked = time.monotonic()  # time of the last request
        self._batches: dict[int, SkipBatches] = {}  # by share
        self._programs = jax.tree.map(jax.jit, plan.programs)
        self._encoders: dict[int, PushEncoder] = {}  # by share
        self._subscriber = Subscriber(plan.pull_codec)
        self._has_left = False

    def run(self) -> bool:
        """Work until the run ends; return False if this worker has left before.

        Raises:
            ConfigError: if this process has other code than the run.
        """
        self.index, self._key = -1, ""
        while True:
            try:
                if not self._key:
                    self._join()
                self._leave_if_asked()
                reply = self._ask("lease")
                if reply.name == "lease":
                    self._work(reply)
                elif reply.name == "hand_over":
                    self._hand_over(reply.fields["shares"])
            except UnknownWorkerError:
                self._key = ""
            except LateError:
                pass
            except EndError:
                return not self._has_left

    def _join(self) -> None:
        # The run knows this stay by its key, also where it gets the request twice.
        key = secrets.token_hex(8)
        about = {"process": self._process, "host": socket.gethostname(), "pid": os.getpid()}
        request = Message("join", {**about, "key": key, "facts": self._facts})
        try:
            reply = self._coordinator.call(request)
        except RefusedError as error:
            raise ConfigError(str(error)) from None
        if reply.name == "end":
            raise EndError
        self.index, self._key = reply.fields["worker"], key

    def _leave_if_asked(self) -> None:
        """Leave if this worker is to: not before the grace is over where all is up to this one.

        The states of its shares are handed over first.

        Raises:
            EndError: if it has left.
        """
        if not self._leaving.is_set():
            return
        if not self._must_leave:
            grace = self._plan.program.resolved.config.checkpoint.grace
            self._must_leave = time.monotonic() + grace
        fields = {"why": "was asked to", "must": time.monotonic() > self._must_leave}
        while (reply := self._ask("leave", fields)).name == "hand_over":
            self._hand_over(reply.fields["shares"])
        if reply.name == "left":
            self._has_left = True
            raise EndError

    def _hand_over(self, shares: Sequence[int]) -> None:
        """Send the states of shares to the run; here there are none."""
        raise NotImplementedError

    def _work(self, lease: Message) -> None:
        """Compute a batch or a share of one."""
        compute = self._compute_batch if self._plan.has_clock else self._compute_share
        compute(lease)

    def _state(self, lease: Message, params: Params, opt_state: Any = ()) -> TrainState:
        """Return the state before a lease."""
        head = jax.tree.structure(head_of(self._plan.abstract_state)).unflatten(lease.arrays)
        return dataclasses.replace(head, params=params, opt_state=opt_state)

    def _compute_share(self, lease: Message) -> None:
        """Compute the sums and the gradient of this worker's rows of a step."""
        share = lease.fields["share"]
        batch = self._batch(lease.fields["first"], share)
        state = self._state(lease, self._pull())
        weights = self._programs.weights(state, batch)
        if lease.fields["weighs"]:
            weights = self._ask("weights", about(lease), weights).arrays
        sums, grads = self._programs.share(state, batch, list(weights))
        time.sleep(self._slow)
        self._push(lease.fields["number"], grads, share)
        self._ask("report", about(lease), [*jax.tree.leaves(sums), *weights])

    def _compute_batch(self, lease: Message) -> None:
        """Compute a whole step, at the pace of this worker."""
        step, batch = lease.fields["first"], self._batch(lease.fields["first"])
        state = self._state(lease, self._pull(keep=lease.fields["keep"]))
        sums, grads, grad_norm, finite = jax.block_until_ready(self._programs.whole(state, batch))
        time.sleep(self._slow)
        facts = {"finite": bool(finite), "value": float(sums.value), "grad_norm": float(grad_norm)}
        treatment = self._ask("admit", {"step": step}).fields
        counts = facts["finite"] and treatment["factor"] != 0
        fields = {"facts": facts, **treatment}
        squares = self._push(step, grads, self.index, fields, counts=counts)
        numbers = [*jax.tree.leaves(sums), np.float32(grad_norm)]
        self._ask("report", {"step": step, "update": squares}, numbers)

    def _batch(self, step: int, share: int = 0) -> Batch:
        """Return the rows of a share, or the whole batch of a step."""
        server = self._plan.server
        copies = splits_rows(server.mode) and server.workers > 1
        if share not in self._batches:
            part = (share, server.workers) if copies else (0, 1)
            resolved = self._plan.program.resolved
            own = resolved.experiment.train.shard(*part)  # a stream has one reader
            self._batches[share] = SkipBatches(own, resolved.config.guard.without)
        return with_rows(dict(self._batches[share][step - 1]), copies=copies)

    def _pull(self, *, keep: bool = False) -> Params:
        """Return all parameters."""
        found = [self._pull_fragment(f, keep=keep) for f in range(self._plan.fragments)]
        parts = [leaves for fragment in found for leaves in fragment.values()]
        return self._plan.parts.join(self._plan.abstract_state.params, parts)

    def _pull_fragment(self, fragment: int, *, keep: bool) -> dict[int, list[np.ndarray]]:
        """Return the leaves of the parts of a fragment, by part."""
        parts, plan = self._plan.parts_of(fragment), self._plan
        fields = {"worker": self.index, "keep": keep, "fragment": fragment}
        known = [self._subscriber.known(part) for part in parts]
        requests = [Message("pull", {**fields, "known": each}) for each in known]
        replies = dict(zip(parts, call_all(self._shards, requests), strict=True))
        if plan.publishes:
            changes = {p: Published(**r.fields, arrays=r.arrays) for p, r in replies.items()}
            return {part: self._subscriber.take(part, found) for part, found in changes.items()}
        decode, like = plan.pull_codec.decode, plan.part_shapes
        return {part: decode(reply.arrays, like[part]) for part, reply in replies.items()}

    def _push(
        self,
        number: int,
        grads: Params,
        share: int,
        fields: dict[str, Any] | None = None,
        *,
        fragment: int = 0,
        counts: bool = True,
    ) -> float:
        """Push to all shards; return the sum of squares of the update, if it was applied.

        Args:
            share: of the rows; of all of them, the number of the worker.
            counts: whether the servers take the push, so that what it leaves is for the next one.
        """
        fields = {"number": number, "worker": share, "fragment": fragment, **(fields or {})}
        of, grads = self._plan.parts.of_params, jax.tree.map(np.asarray, grads)
        encoder = self._encoder(share)
        parts = self._plan.parts_of(fragment)
        pushes = [encoder.encode(i, jax.tree.leaves(of(grads, i))) for i in parts]
        if "facts" in fields and self._plan.server.compress.kind != "none":
            sent = float(norm([push.sent for push in pushes]))
            fields["facts"] = {**fields["facts"], "grad_norm": sent}
        requests = [Message("push", fields, push.arrays) for push in pushes]
        replies = call_all(self._shards, requests)
        for i, push in zip(parts, pushes, strict=True):
            if counts:
                encoder.keep(i, push)
        return sum(reply.fields.get("update", 0.0) for reply in replies)

    def _encoder(self, share: int) -> PushEncoder:
        """Return the encoder of the pushes of a share, which has what they have left."""
        if share not in self._encoders:
            plan, feedback = self._plan, has_feedback(self._plan.server.compress)
            self._encoders[share] = PushEncoder(plan.push_codec, plan.parts, feedback=feedback)
        return self._encoders[share]

    def _ask(
        self, name: str, fields: dict[str, Any] | None = None, arrays: Sequence[Any] = ()
    ) -> Message:
        """Ask the coordinator until it has an answer; it says `wait` every few seconds.

        Raises:
            UnknownWorkerError: if it has taken this worker for dead.
            LateError: if the lease is of no use any more.
            EndError: if the run has ended.
        """
        fields = {"key": self._key, **(fields or {})}
        request = Message(name, fields, [np.asarray(array) for array in arrays])
        while True:
            reply = self._coordinator.call(request)
            self._asked = time.monotonic()
            if reply.name == "unknown":
                raise UnknownWorkerError
            if reply.name == "late":
                raise LateError
            if reply.name == "end":
                raise EndError
            if reply.name != "wait" or (name == "lease" and self._leaving.is_set()):
                return reply


def about(lease: Message) -> dict[str, Any]:
    """Return the fields that say of which lease a request is."""
    fields = lease.fields
    return {"step": fields["first"], "epoch": fields["epoch"], "share": fields["share"]}
