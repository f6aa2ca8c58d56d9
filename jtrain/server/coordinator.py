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
import numpy as np

from jtrain.core.state import TrainState
from jtrain.core.types import Metrics
from jtrain.distributed.cluster.rendezvous import difference
from jtrain.errors import ConfigError
from jtrain.parallel.strategies.outer_optimizer import LocalStepsState
from jtrain.server.client import Client, ShardCalls, ShardsLostError
from jtrain.server.compute import Head
from jtrain.server.engines import Role
from jtrain.server.listener import Traffic
from jtrain.server.members import Member, Members
from jtrain.server.plan import Plan
from jtrain.server.wire import Message
from jtrain.train.processes import code_facts

POLL = 0.05  # seconds between two looks at the processes
LATE = 10  # times the timeout: a worker may compile between two requests, a server may not
PATIENCE = 2.0  # seconds after which a waiting worker is told to ask again, at most


class StepResult(NamedTuple):
    """A step that is done."""

    step: int
    metrics: Metrics


@dataclasses.dataclass
class Snapshot:
    """State of a run at a step, on the host."""

    step: int
    state: TrainState


class Coordinator(abc.ABC):
    """Answers workers, and drives the shards.

    Args:
        shards: connections to the shards, used by the thread of the loop.
        supervise: called while the loop waits; restarts processes that died, and says by
            `process_left` and `shard_left` which.
        log: takes a line.
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
        self.plan, self._supervise, self._log = plan, lambda: supervise(self), log
        self._shards = ShardCalls(shards, self._supervise, plan.server.start_timeout)
        self._changed = threading.Condition()
        self._ready = self._ended = False
        self._heard: dict[int, float] = {}  # time of the last request, by worker
        self._started: dict[int, float] = {}  # start of a process that never joined, by number
        self.members = Members(record, log, most=plan.server.most_workers)
        """The workers that are there."""
        self.epoch = 0  # starts from a snapshot
        self.traffic: Callable[[], Traffic] = lambda: Traffic(0, 0, 0)
        """Gives the bytes of requests so far, and those that servers have sent among them."""
        self.state_bytes = 0
        """Bytes of states of their own that workers sent for snapshots."""
        self._began = time.monotonic()

    @functools.cached_property
    def _facts(self) -> dict[str, str]:
        return code_facts(self.plan.program.resolved.config)

    def start(self, step: int, state: TrainState) -> None:
        """Load a state into the shards."""
        self.snapshot = Snapshot(step, jax.device_get(state))
        self._load(range(len(self._shards)))
        with self._changed:
            self._begin()
            self._ready = True

    def end(self) -> None:
        """Tell the workers that the run ends; those that joined are waited for a moment."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.members.has_guests(), PATIENCE)

    @abc.abstractmethod
    def advance(self, limit: int) -> Sequence[StepResult]:
        """Return the next steps that are done, at most up to `limit`; wait for them."""

    @abc.abstractmethod
    def close(self) -> int:
        """Let no worker begin another step; return the last step that one has begun."""

    @abc.abstractmethod
    def _give_back(self, worker: int) -> None:
        """Take back what a worker that is gone was computing. Called with the lock."""

    @property
    @abc.abstractmethod
    def _step(self) -> int:
        """The last step that is done, in order."""

    @abc.abstractmethod
    def _begin(self) -> None:
        """Begin from the snapshot."""

    @abc.abstractmethod
    def _answer(self, request: Message, worker: int) -> Message | None:
        """Return the answer to a worker; None: it has to wait. Called with the lock."""

    @abc.abstractmethod
    def _working(self) -> set[int]:
        """Return the workers that compute, of which a request is due some time."""

    def silent(self) -> list[tuple[Role, int]]:
        """Return the processes that should have been heard of, and forget what is known of them.

        A worker that the run has not started is only taken out.
        """
        server, now = self.plan.server, time.monotonic()
        limit = now - LATE * server.timeout
        with self._changed:
            working = self._working() if self._ready else set()
            late = {w for w in working if self._heard.get(w, limit) < limit}
            started = self._started.items()
            processes = [p for p, at in started if at < now - server.start_timeout]
            for process in processes:
                self._started.pop(process)
            for worker in late:
                del self._heard[worker]
                member = self.members[worker]
                if member.process is None:
                    self._remove(member, "has not answered for long")
                else:
                    processes.append(member.process)
        shards = self._shards.take_silent()
        return [*(("worker", p) for p in processes), *(("shard", s) for s in shards)]

    def process_left(self, process: int, why: str) -> None:
        """Take out the worker that was a process of the run's own."""
        with self._changed:
            self._started.pop(process, None)
            member = self.members.of_process(process)
            if member is not None:
                self._remove(member, why)

    def connection_lost(self, request: Message) -> None:
        """Note that the connection of a worker broke."""
        with self._changed:
            self.members.broken(request.fields)

    def missing(self) -> int:
        """Return how many workers there are too few, after those that are gone are taken out."""
        with self._changed:
            for member in self.members.gone():
                self._remove(member, "its connection broke")
            return max(self.plan.server.needed_workers - len(self.members), 0)

    def _remove(self, member: Member, why: str) -> None:
        if self.members.leave(member, why, self._step if self._ready else 0):
            self._heard.pop(member.worker, None)
            if self._ready:
                self._give_back(member.worker)
            self._changed.notify_all()

    def worker_started(self, process: int) -> None:
        """Note that the process of a worker was started, of which a request is due."""
        with self._changed:
            self._started[process] = time.monotonic()

    def shard_left(self, shard: int) -> None:
        """Note that a shard was started again, and holds nothing."""
        self._shards.lost.add(shard)

    def fetch(self, step: int) -> TrainState:
        """Return the state on the host, when all steps up to `step` are done and no other is begun.

        It is the new snapshot.
        """
        while True:
            try:
                self._complete()
                replies = self._shards.call_all("state", {"done": self._updates()})
                break
            except ShardsLostError:
                self._recover()
                self._catch_up(step)
        self._count_missed([reply.fields["missed"] for reply in replies])
        like = self.plan.program.resolved.abstract_state.params, self.plan.shard_opt_state
        parts = self.plan.by_part([reply.arrays for reply in replies])
        params, opt_state = self.plan.parts.join(like, parts)
        if self.plan.is_local:
            opt_state = LocalStepsState(opt_state, self._stack_inner())
        state = jax.device_get(self.head.state(params, opt_state))
        self.snapshot = Snapshot(step, state)
        return state

    def handle(self, request: Message) -> Message:
        """Answer a worker; called in a thread of its own."""
        end = time.monotonic() + min(PATIENCE, self.plan.server.timeout / 4)
        with self._changed:
            self.members.hear(request.fields)
            if request.name == "join":
                return Message("end") if self._ended else self._join(request)
            while True:
                if self._ended:
                    self.members.dismiss(request.fields)
                    self._changed.notify_all()
                    return Message("end")
                member = self.members.find(request.fields)
                if member is None:  # it was taken for dead; nobody else has its number and key
                    return Message("unknown")
                self._heard[member.worker] = time.monotonic()
                reply = self._reply(request, member)
                if reply is not None:
                    return reply
                if time.monotonic() > end:
                    return Message("wait")
                self._changed.wait(end - time.monotonic() + 0.01)

    def _join(self, request: Message) -> Message:
        """Let a worker join.

        Raises:
            ConfigError: if it has other code or packages.
        """
        facts = request.fields.get("facts")
        if facts and (error := difference(self._facts, facts, 1)):
            raise ConfigError(
                str(error).replace("process 1", "this worker").replace("process 0", "the run")
            )
        if (member := self.members.find(request.fields)) is not None:  # it asks again
            return Message("joined", {"worker": member.worker, "key": member.key})
        process = request.fields.get("process")
        before = None
        if isinstance(process, int):
            self._started.pop(process, None)
            before = self.members.of_process(process)
        if before is not None:
            self._remove(before, "was started again")
        member = self.members.join(request.fields, self._step if self._ready else 0)
        self._heard[member.worker] = time.monotonic()
        self._changed.notify_all()
        return Message("joined", {"worker": member.worker, "key": member.key})

    def _reply(self, request: Message, member: Member) -> Message | None:
        match request.name:
            case "beat":
                return Message("thanks")
            case "may_leave":
                return Message(
                    "stay" if len(self.members) <= self.plan.server.needed_workers else "go"
                )
            case "leave":
                before = self._before_leave(member.worker) if self._ready else None
                if before is None:
                    self._remove(member, request.fields["why"])
                return before or Message("left")
            case "lease" if self.plan.server.needed_workers > len(self.members):
                return None
            case "lease" if self._may_step_in(member):  # it joins again, with a lower number
                self._remove(member, "takes a place that is free")
                return Message("unknown")
        return self._answer(request, member.worker) if self._ready else None

    def _may_step_in(self, member: Member) -> bool:
        """Return whether a worker that stands by may take the place of one that left."""
        most = self.plan.server.most_workers
        return member.worker >= most > self.members.free_number()

    def _before_leave(self, worker: int) -> Message | None:
        """Return what a worker has to do before it leaves."""
        del worker

    def statistics(self) -> dict[str, Any]:
        """Return measurements for speed.jsonl: clocks, staleness, and the sums of the shards.

        `received` and `sent` are the bytes of the servers' frames; `worker_bytes` those between
        workers and all others, of which `state_bytes` were copies of their own states for
        snapshots; `queue` are pushes that wait for others.
        """
        with self._changed:
            found = {"clock": self._clocks(), "staleness": self._staleness(), **self._counts()}
        try:
            replies = self._shards.call_all("statistics", {})
        except ShardsLostError:  # the loop restores them
            return found
        total = {name: sum(reply.fields[name] for reply in replies) for name in replies[0].fields}
        asked = self.traffic()
        total["worker_bytes"] += asked.received + asked.sent - asked.named
        total["state_bytes"] = self.state_bytes
        seconds = time.monotonic() - self._began
        total["updates"] -= self._first_update() * len(replies)
        return found | {**total, "updates_per_second": total["updates"] / seconds}

    def _first_update(self) -> int:
        """Return the number from which the shards count."""
        return 0

    @abc.abstractmethod
    def _updates(self) -> int | None:
        """Return the number of updates that are done; None: the servers' own numbers hold."""

    def _count_missed(self, missed: Sequence[int]) -> None:
        """Take the number of updates that each shard has missed since it was loaded; here none."""
        del missed

    def _counts(self) -> dict[str, int]:
        return {}

    def _clocks(self) -> dict[int, int]:
        return {}

    def _staleness(self) -> dict[int, int]:
        return {}

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`, watching over the processes."""
        due = time.monotonic() + self.plan.server.timeout
        while True:
            with self._changed:
                if self._changed.wait_for(ready, POLL):
                    return
            self._supervise()
            self._shards.check()
            if time.monotonic() > due:  # a server that hangs lets all workers hang
                self._shards.call_all("statistics", {})
                due = time.monotonic() + self.plan.server.timeout

    def _load(self, shards: Sequence[int]) -> None:
        """Begin from the snapshot, and load it into shards."""
        state = self.snapshot.state
        if isinstance(state.opt_state, LocalStepsState):
            self._load_inner(state.opt_state.inner)
        self.head = Head.of(state)
        self.epoch += 1
        self._send_snapshot(shards)

    def _send_snapshot(self, shards: Sequence[int]) -> None:
        """Load the snapshot into shards."""
        state = self.snapshot.state
        opt_state = state.opt_state
        if isinstance(opt_state, LocalStepsState):
            opt_state = opt_state.outer
        requests = {}
        for shard in shards:
            of, parts = self.plan.parts.of_state, self.plan.parts_of(shard)
            found = [of((state.params, opt_state), part) for part in parts]
            arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
            requests[shard] = Message("load", {"version": self._loaded_version()}, arrays)
        self._shards.load(requests)

    def _load_inner(self, inner: Any) -> None:
        """Take the optimizer state of each share of the rows from the snapshot."""
        take = lambda share: jax.tree.map(lambda leaf: leaf[share], inner)
        self._inner = [take(share) for share in range(self.plan.server.workers)]

    def _stack_inner(self) -> Any:
        """Return the optimizer states of the shares, as the snapshot has them."""
        return jax.tree.map(lambda *xs: np.stack(xs), *self._inner)

    @abc.abstractmethod
    def _complete(self) -> None:
        """Wait until all of the state is in the shards or here."""

    def _loaded_version(self) -> int:
        return self.snapshot.step

    @abc.abstractmethod
    def _recover(self) -> None:
        """Restore the shards that were lost."""

    @abc.abstractmethod
    def _catch_up(self, step: int) -> None:
        """Take the steps up to `step` again, if a restored shard has set the run back."""

    def _send_head(self, head: Head, fields: dict[str, Any]) -> Message:
        return Message("lease", fields, [np.asarray(leaf) for leaf in jax.tree.leaves(head)])
