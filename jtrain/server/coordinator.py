"""Coordinator: what the workers ask for, in the run's own process.

Its subclasses are the orders of steps: `rounds`, in which all workers take part, and `paced`, where
each goes at its own pace. Workers ask in threads of the listener; the loop calls `advance` and
`fetch` in one thread, which alone talks to the shards.
"""

import abc
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.state import TrainState
from jtrain.core.types import Metrics
from jtrain.distributed.cluster.cluster import difference
from jtrain.errors import ConfigError
from jtrain.parallel.strategies.outer_optimizer import LocalStepsState
from jtrain.server.client import Client, ShardCalls, ShardsLostError
from jtrain.server.engines import Role
from jtrain.server.members import Member, Members
from jtrain.server.plan import Plan, head_of
from jtrain.server.shares import Shares
from jtrain.server.wire import Message
from jtrain.train.processes import code_facts

POLL = 0.05  # seconds between two looks at the processes
LATE = 10  # times the timeout: a worker may compile between two requests, a server may not
PATIENCE = 2.0  # seconds after which a waiting worker is told to ask again, at most
Steps = Sequence[tuple[int, Metrics]]
"""Numbers and metrics of steps that are done."""


class Snapshot(NamedTuple):
    """State of a run at a step, on the host."""

    step: int
    state: TrainState


class Coordinator(abc.ABC):
    """Answers workers, and drives the shards.

    Args:
        shards: connections to the shards, used by the thread of the loop.
        supervise: called while the loop waits; restarts processes that died, and says by
            `process_left` and `shard_left` which.
        record: takes a row for each worker that comes or goes.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Sequence[Client],
        *,
        supervise: Callable[["Coordinator"], None] = lambda coordinator: None,
        log: Callable[[str], None] = lambda line: None,
        record: Callable[[Mapping[str, Any]], None] = lambda row: None,
    ):
        self.plan, self._log = plan, log
        self._shards = ShardCalls(shards, lambda: supervise(self))
        self._changed = threading.Condition()
        self._ready = self._ended = self._collects = False
        self._started: dict[int, float] = {}  # start of a process that never joined, by number
        self.members = Members(record, log, most=plan.server.most_workers)
        """The workers that are there."""
        self.done = 0
        """The last step that is done, in order."""
        self.epoch = 0
        """Number of starts from a snapshot."""
        self.traffic: Callable[[], int] = lambda: 0
        """Gives the bytes of the workers' requests and replies."""
        self.state_bytes = 0
        """Bytes of states of their own that workers sent for snapshots."""
        self._began = time.monotonic()
        self._facts = functools.cache(lambda: code_facts(plan.program.resolved.config))

    def start(self, step: int, state: TrainState) -> None:
        """Load a state into the shards."""
        self.snapshot = Snapshot(step, jax.device_get(state))
        self._load()
        with self._changed:
            self._ready = True

    def end(self) -> None:
        """Tell the workers that the run ends."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def advance(self, limit: int) -> Steps:
        """Return the next steps that are done, at most up to `limit`; wait for them."""
        while True:
            try:
                return self._advance(limit)
            except ShardsLostError:
                self._recover()

    @abc.abstractmethod
    def _advance(self, limit: int) -> Steps:
        """Return the next steps that are done; raise `ShardsLostError` if state was lost."""

    @abc.abstractmethod
    def close(self) -> int:
        """Let no worker begin another step; return the last step that one has begun."""

    def fetch(self, step: int) -> TrainState:
        """Return the state on the host, when all steps up to `step` are done and no other is begun.

        It is the new snapshot.
        """
        while True:
            self._collects = True  # workers that ask for a lease hand over their states instead
            try:
                self._wait(lambda: not self._shares.unsaved())
                asked = [
                    {"fragment": f, "done": self._updates()} for f in range(self.plan.fragments)
                ]
                replies = [self._shards.call_all("state", fields) for fields in asked]
                break
            except ShardsLostError:
                self._collects = False
                self._recover()
                while self.done < step:  # a restored shard has set the run back
                    self.advance(step)
        self._collects = False
        self._count_missed([reply.fields["missed"] for reply in replies[0]])
        like = self.plan.abstract_state.params, self.plan.shard_opt_state
        parts = [reply.arrays for of_fragment in replies for reply in of_fragment]
        params, opt_state = self.plan.parts.join(like, parts)
        if self.plan.is_local:
            states = [share.state for share in self._shares.all]
            inner = jax.tree.map(lambda *xs: np.stack(xs), *states)
            opt_state = LocalStepsState(opt_state, inner)
        state = dataclasses.replace(self.head, params=params, opt_state=opt_state)
        self.snapshot = Snapshot(step, jax.device_get(state))
        return self.snapshot.state

    def statistics(self) -> dict[str, Any]:
        """Return measurements for speed.jsonl: clocks, staleness, and the sums of the shards.

        `received` and `sent` are the bytes of the servers' frames; `worker_bytes` those between
        workers and all others, of which `state_bytes` were copies of their own states for
        snapshots; `queue` are pushes that wait for others.
        """
        with self._changed:
            found = {"clock": self._clocks(), "staleness": {}, **self._counts()}
        try:
            replies = self._shards.call_all("statistics", {})
        except ShardsLostError:  # the loop restores them
            return found
        count = lambda name: sum(reply.fields[name] for reply in replies)
        total: dict[str, Any] = {name: count(name) for name in replies[0].fields}
        total["worker_bytes"] += self.traffic()
        total["state_bytes"] = self.state_bytes
        total["updates_per_second"] = total["updates"] / (time.monotonic() - self._began)
        return found | total

    def _load(self) -> None:
        """Begin from the snapshot, with which all shards are loaded."""
        self.head = head_of(self.snapshot.state)
        self.epoch += 1
        self._send_snapshot(range(len(self._shards)))
        with self._changed:
            self._begin()

    def _send_snapshot(self, shards: Sequence[int]) -> None:
        """Load the snapshot into shards."""
        params, opt_state = self.snapshot.state.params, self.snapshot.state.opt_state
        if isinstance(opt_state, LocalStepsState):
            opt_state = opt_state.outer
        for fragment in range(self.plan.fragments):
            fields = {"fragment": fragment, "version": self._loaded_version()}
            parts = self.plan.parts_of(fragment)
            requests = {}
            for shard in shards:
                rows = self.plan.parts.of_state((params, opt_state), parts[shard])
                arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(rows)]
                requests[shard] = Message("load", fields, arrays)
            self._shards.load(requests)

    def _begin(self) -> None:
        """Begin from the snapshot. Called with the lock."""
        self.done, plan = self.snapshot.step, self.plan
        self._shares = Shares(plan.server.workers, stateful=plan.is_local, step=self.done)
        opt_state = self.snapshot.state.opt_state
        if isinstance(opt_state, LocalStepsState):
            leaves, tree = jax.tree.flatten(opt_state.inner)
            for i, share in enumerate(self._shares.all):
                share.state = tree.unflatten([leaf[i] for leaf in leaves])
        self._lost_shares: set[int] = set()  # those whose state is lost, and has to be restored

    @abc.abstractmethod
    def _recover(self) -> None:
        """Restore the shards that were lost."""

    @abc.abstractmethod
    def _loaded_version(self) -> int:
        """Return the number of updates that shards have when the snapshot is loaded."""

    @abc.abstractmethod
    def _updates(self) -> int | None:
        """Return the number of updates that are done; None: the servers' own numbers hold."""

    @abc.abstractmethod
    def _lease(self, worker: int) -> Message | None:
        """Return what a worker computes next; None: it has to wait."""

    @abc.abstractmethod
    def _answer(self, request: Message, worker: int) -> Message | None:
        """Return the answer to a request about a lease; None: the worker has to wait."""

    @abc.abstractmethod
    def _give_back(self, worker: int) -> None:
        """Take back what a worker that is gone was computing."""

    @abc.abstractmethod
    def _clocks(self) -> dict[int, int]:
        """Return the steps that are done, by worker or share."""

    def _counts(self) -> dict[str, Any]:
        """Return more measurements."""
        return {}

    def _count_missed(self, missed: Sequence[int]) -> None:
        """Take the number of updates that each shard has missed since it was loaded; here none."""
        del missed

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wake the workers, and wait until `ready`, watching over the processes.

        Raises:
            ShardsLostError: if a shard or the state of a share was lost.
        """
        due = time.monotonic() + self.plan.server.timeout
        with self._changed:
            self._changed.notify_all()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: bool(self._lost_shares) or ready(), POLL):
                    break
            self._shards.check()
            if time.monotonic() > due:  # a server that hangs lets all workers hang
                self._shards.call_all("statistics", {})
                due = time.monotonic() + self.plan.server.timeout
        if self._lost_shares:
            raise ShardsLostError

    def worker_started(self, process: int) -> None:
        """Note that the process of a worker was started, of which a request is due."""
        with self._changed:
            self._started[process] = time.monotonic()

    def process_left(self, process: int, why: str) -> None:
        """Take out the worker that was a process of the run's own."""
        with self._changed:
            self._started.pop(process, None)
            if (member := self.members.of_process(process)) is not None:
                self._remove(member, why)

    def shard_left(self, shard: int) -> None:
        """Note that a shard was started again, and holds nothing."""
        self._shards.lost.add(shard)

    def silent(self) -> list[tuple[Role, int]]:
        """Return the processes that should have been heard of, and forget what is known of them.

        A worker that the run has not started is only taken out.
        """
        server, now = self.plan.server, time.monotonic()
        with self._changed:
            late = [p for p, at in self._started.items() if now > at + server.start_timeout]
            self._started = {p: at for p, at in self._started.items() if p not in late}
            for member in list(self.members.values()):
                if now > member.heard + LATE * server.timeout:
                    self._remove(member, "has not answered for long")
                    late += [] if member.process is None else [member.process]
        shards = self._shards.take_silent()
        return [*(("worker", p) for p in late), *(("shard", s) for s in shards)]

    def missing(self) -> int:
        """Return how many workers there are too few, after those that are gone are taken out."""
        with self._changed:
            for member in self.members.gone():
                self._remove(member, "its connection broke")
            return max(self.plan.server.needed_workers - len(self.members), 0)

    def connection_lost(self, request: Message) -> None:
        """Note that the connection of a worker broke."""
        if "key" in request.fields:
            with self._changed:
                self.members.lose(request.fields)

    def handle(self, request: Message) -> Message:
        """Answer a worker; called in a thread of its own."""
        end = time.monotonic() + min(PATIENCE, self.plan.server.timeout / 4)
        with self._changed:
            if (member := self.members.find(request.fields)) is not None:
                member.hear(request.fields)
            while not self._ended:
                member = self.members.find(request.fields)
                if request.name == "join":
                    return self._join(request, member)
                if member is None:  # it was taken for dead; nobody else has its number and key
                    return Message("unknown")
                if (reply := self._reply(request, member)) is not None:
                    return reply
                if time.monotonic() > end:
                    return Message("wait")
                self._changed.wait(end - time.monotonic() + 0.01)
            return Message("end")

    def _join(self, request: Message, member: Member | None) -> Message:
        """Let a worker join.

        Raises:
            ConfigError: if it has other code or packages.
        """
        facts = request.fields.get("facts")
        if facts and (error := difference(self._facts(), facts, 1)):
            words = str(error).replace("process 1", "this worker")
            raise ConfigError(words.replace("process 0", "the run"))
        if member is None:  # else it asks again
            if (process := request.fields.get("process")) is not None:
                self._started.pop(process, None)
                if (before := self.members.of_process(process)) is not None:
                    self._remove(before, "was started again")
            member = self.members.join(request.fields, self.done)
            self._changed.notify_all()
        return Message("joined", {"worker": member.worker})

    def _remove(self, member: Member, why: str) -> None:
        self.members.leave(member, why, self.done)
        if self._ready:
            self._give_back(member.worker)
        self._changed.notify_all()

    def _reply(self, request: Message, member: Member) -> Message | None:
        fields = request.fields
        match request.name:
            case "beat":
                return Message("thanks")
            case "leave":
                return self._leave(member, **fields)
            case _ if not self._ready:
                return None
            case "lease":
                return self._next_lease(member)
            case "inner" | "hand_over" if fields["epoch"] != self.epoch:
                return Message("late")
            case "inner":
                leaves = jax.tree.leaves(self._shares.all[fields["share"]].state)
                arrays = [np.asarray(leaf) for leaf in leaves]
                self.state_bytes += sum(array.nbytes for array in arrays)
                return Message("inner", {"fresh": self._shares.is_saved(fields["share"])}, arrays)
            case "hand_over":
                self.state_bytes += request.frame_bytes
                state = jax.tree.structure(self.plan.inner_state).unflatten(request.arrays)
                self._shares.take_over(fields["share"], member.worker, fields["done"], state)
                self._changed.notify_all()
                return Message("thanks")
        return self._answer(request, member.worker)

    def _leave(self, member: Member, *, why: str, must: bool, **_: Any) -> Message:
        """Let a worker leave, once its states are here; unless it is needed, and need not leave."""
        if not must and len(self.members) <= self.plan.server.needed_workers:
            return Message("stay")
        if self._ready:
            self._shares.end_leases(member.worker)  # it has stopped in the middle of a round
            if shares := self._shares.to_hand_over(member.worker, True):
                return Message("hand_over", {"shares": shares})
        self._remove(member, why)
        return Message("left")

    def _next_lease(self, member: Member) -> Message | None:
        most, worker = self.plan.server.most_workers, member.worker
        if len(self.members) < self.plan.server.needed_workers:
            return None
        if worker >= most:  # it stands by
            if self.members.free_number() >= most:
                return None
            self._remove(member, "takes a place that is free")
            return Message("unknown")  # it joins again, with a lower number
        computing = [other for other in self.members if other < most]
        if shares := self._shares.to_hand_over(worker, self._collects, computing):
            return Message("hand_over", {"shares": shares})
        return None if self._collects else self._lease(worker)

    def _send_lease(self, first: int, fields: Mapping[str, Any]) -> Message:
        """Return a lease from step `first` on, with the head, whose random key and scale it has."""
        head = dataclasses.replace(self.head, step=jnp.int32(first - 1))
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(head)]
        return Message("lease", {"first": first, "epoch": self.epoch, **fields}, arrays)
