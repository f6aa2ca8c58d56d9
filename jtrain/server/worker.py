"""Worker: pulls parameters, computes what its lease says, and pushes the result."""

import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jtrain.core.pytree import norm
from jtrain.core.rows import with_rows
from jtrain.core.types import Batch, Params
from jtrain.data.batches.step_batches import SkipBatches
from jtrain.errors import ConfigError
from jtrain.parallel.strategies.server_modes import has_feedback
from jtrain.server.client import Client, RefusedError, call_all
from jtrain.server.compute import Head, splits_rows
from jtrain.server.feedback import Published, PushEncoder, Subscriber
from jtrain.server.plan import Plan
from jtrain.server.wire import Message


class UnknownWorkerError(Exception):
    """The run has taken this worker for dead; it may join again."""


class RunEndedError(Exception):
    """The run has ended while this worker computed."""


class Worker:
    """A worker of a run.

    Args:
        process: its number among those that the run has started; None if it comes by itself.
        coordinator: connection to the run's own process.
        shards: connections to the servers.
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
        self._leaving, self._stays = leaving or threading.Event(), 0.0
        self._asked = time.monotonic()  # time of the last request
        self._batches: dict[int, SkipBatches] = {}  # by share
        self._programs = jax.tree.map(jax.jit, plan.programs)
        self._encoders: dict[int, PushEncoder] = {}  # by share
        self._subscriber = Subscriber(plan.codecs.pull)

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
                if self._leaves():
                    self._leave()
                    return False
                reply = self._ask("lease")
                self._follow(reply)
            except UnknownWorkerError:
                self._key = ""
            except RunEndedError:
                return True

    def _join(self) -> None:
        about = {"process": self._process, "host": socket.gethostname(), "pid": os.getpid()}
        # The run knows this stay by its key, also where it gets the request twice.
        about["key"] = secrets.token_hex(8)
        try:
            reply = self._coordinator.call(Message("join", {**about, "facts": self._facts}))
        except RefusedError as error:
            raise ConfigError(str(error)) from None
        if reply.name == "end":
            raise RunEndedError
        self.index, self._key = reply.fields["worker"], reply.fields["key"]

    def _leaves(self) -> bool:
        """Return whether to leave now: not before the grace is over where all is up to this one."""
        if not self._leaving.is_set():
            return False
        if not self._stays:
            self._stays = time.monotonic() + self._plan.program.resolved.config.checkpoint.grace
        return time.monotonic() > self._stays or self._ask("may_leave").name != "stay"

    def _leave(self) -> None:
        """Leave the run, after the optimizer states of the shares are handed over."""
        while (reply := self._ask("leave", {"why": "was asked to"})).name == "hand_over":
            self._hand_over(reply.fields["shares"])

    def _follow(self, reply: Message) -> None:
        """Do what the run has answered to a request for a lease."""
        if reply.name == "lease":
            self._work(reply)

    def _hand_over(self, shares: Sequence[int]) -> None:
        """Send the states of shares to the run; here there are none."""
        raise NotImplementedError

    def _work(self, lease: Message) -> None:
        if self._plan.has_clock:
            self._compute_batch(lease, self._head(lease))
        else:
            self._compute_share(lease, self._head(lease))

    def _head(self, lease: Message) -> Head:
        return jax.tree.unflatten(jax.tree.structure(self._plan.head), lease.arrays)

    def _compute_share(self, lease: Message, head: Head) -> None:
        """Compute the sums and the gradient of this worker's rows of a step."""
        batch = self._batch(lease.fields["first"], lease.fields["share"])
        state = head.state(self._pull())
        weights = self._programs.weights(state, batch)
        if lease.fields["weighs"]:
            reply = self._ask("weights", about(lease), weights)
            if reply.name != "weights":
                return
            weights = reply.arrays
        sums, grads = self._programs.share(state, batch, list(weights))
        self._wait_if_slow()
        self._push(lease.fields["number"], grads, part=lease.fields["share"])
        self._ask("report", about(lease), [*jax.tree.leaves(sums), *_scalars(weights)])

    def _compute_batch(self, lease: Message, head: Head) -> None:
        """Compute a whole step, at the pace of this worker."""
        step, batch = lease.fields["first"], self._batch(lease.fields["first"])
        state = head.state(self._pull(keep=lease.fields["keep"]))
        sums, grads, grad_norm, finite = jax.block_until_ready(self._programs.whole(state, batch))
        self._wait_if_slow()
        admitted = self._ask("admit", {"step": step})
        if admitted.name != "admitted":
            return
        facts = {"finite": bool(finite), "value": float(sums.value), "grad_norm": float(grad_norm)}
        counts = facts["finite"] and admitted.fields["factor"] != 0
        fields = {"facts": facts, **admitted.fields}
        squares = self._push(lease.fields["number"], grads, fields, counts=counts)
        fields = {"step": step, "update": squares}
        self._ask("report", fields, [*jax.tree.leaves(sums), np.float32(grad_norm)])

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
        parts = self._pull_parts(range(self._plan.fragments), keep=keep)
        ordered = [parts[part] for part in range(len(parts))]
        return self._plan.parts.join(self._plan.program.resolved.abstract_state.params, ordered)

    def _pull_parts(
        self, fragments: Iterable[int], *, keep: bool = False
    ) -> dict[int, Sequence[np.ndarray]]:
        """Return the leaves of the parts of some fragments, by part."""
        wanted = list(fragments)
        fields = {"worker": self.index, "keep": keep, "fragments": wanted}
        by_shard = [self._plan.parts_of(shard, wanted) for shard in range(len(self._shards))]
        if self._plan.publishes:
            return self._pull_changes(fields, by_shard)
        replies = call_all(self._shards, [Message("pull", fields)] * len(self._shards))
        found = {}
        for parts, reply in zip(by_shard, replies, strict=True):
            like = [leaf for part in parts for leaf in self._plan.part_shapes[part]]
            leaves = self._plan.codecs.pull.decode(reply.arrays, like)
            count = len(like) // len(parts)
            for i, part in enumerate(parts):
                found[part] = leaves[i * count : (i + 1) * count]
        return found

    def _pull_changes(
        self, fields: dict[str, Any], by_shard: Sequence[Sequence[int]]
    ) -> dict[int, Sequence[np.ndarray]]:
        """Return the leaves of parts, which the servers bring up to date with what has changed."""
        known = [[self._subscriber.known(part) for part in parts] for parts in by_shard]
        requests = [Message("pull", {**fields, "known": each}) for each in known]
        found = {}
        for parts, reply in zip(by_shard, call_all(self._shards, requests), strict=True):
            arrays = iter(reply.arrays)
            for part, (stamp, kind, count) in zip(parts, reply.fields["parts"], strict=True):
                change = Published(stamp, kind, list(itertools.islice(arrays, count)))
                found[part] = self._subscriber.take(part, change)
        return found

    def _push(
        self,
        number: int,
        grads: Params,
        fields: dict[str, Any] | None = None,
        *,
        part: int | None = None,
        fragment: int = 0,
        counts: bool = True,
    ) -> float:
        """Push to all shards; return the sum of squares of the update, if it was applied.

        Args:
            number: of the update.
            part: of the sum that the update is of: a share of the rows; None: all of it.
            counts: whether the servers take the push, so that what it leaves is for the next one.
        """
        sender = self.index if part is None else part
        fields = {"number": number, "worker": sender, "fragment": fragment, **(fields or {})}
        of, grads = self._plan.parts.of_params, jax.tree.map(np.asarray, grads)
        encoder = self._encoder(0 if part is None else part)
        parts = [self._plan.parts_of(shard, [fragment])[0] for shard in range(len(self._shards))]
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
            plan, keeps = self._plan, has_feedback(self._plan.server.compress)
            self._encoders[share] = PushEncoder(plan.codecs.push, plan.parts, keeps=keeps)
        return self._encoders[share]

    def _ask(
        self, name: str, fields: dict[str, Any] | None = None, arrays: Sequence[Any] = ()
    ) -> Message:
        """Ask the coordinator until it has an answer; it says `wait` every few seconds.

        Raises:
            UnknownWorkerError: if it has taken this worker for dead.
            RunEndedError: if the run has ended.
        """
        fields = {"worker": self.index, "key": self._key, **(fields or {})}
        request = Message(name, fields, [np.asarray(array) for array in arrays])
        while True:
            reply = self._coordinator.call(request)
            self._asked = time.monotonic()
            if reply.name == "unknown":
                raise UnknownWorkerError
            if reply.name == "end":
                raise RunEndedError
            if reply.name != "wait" or (name == "lease" and self._leaving.is_set()):
                return reply

    def _wait_if_slow(self) -> None:
        if self._slow:
            time.sleep(self._slow)


def about(lease: Message) -> dict[str, Any]:
    """Return the fields that say of which lease a request is."""
    fields = lease.fields
    return {"step": fields["first"], "epoch": fields["epoch"], "share": fields["share"]}


def _scalars(arrays: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(array) for array in arrays]
