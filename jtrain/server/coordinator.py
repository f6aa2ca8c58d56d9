"""Coordinator: what the workers ask for, in the run's own process.

Its subclasses are the orders of steps: `rounds`, in which all workers take part, and `paced`, where
each goes at its own pace. Workers ask in threads of the listener; the loop calls `advance` and
`fetch` in one thread, which alone talks to the shards.
"""

import abc
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.core.state import TrainState
from jtrain.core.types import Metrics
from jtrain.errors import PeerError
from jtrain.parallel.strategies.local_steps import LocalStepsState
from jtrain.server.client import Client, RefusedError, SilentError, call_all
from jtrain.server.compute import Head
from jtrain.server.engine import Role
from jtrain.server.server_plan import Plan
from jtrain.server.wire import Message

POLL = 0.05  # seconds between two looks at the processes
LATE = 10  # times the timeout: a worker may compile between two requests, a server may not
PATIENCE = 2.0  # seconds after which a waiting worker is told to ask again


class StepResult(NamedTuple):
    """A step that is done."""

    step: int
    metrics: Metrics


@dataclasses.dataclass
class Snapshot:
    """State of a run at a step, on the host."""

    step: int
    state: TrainState


class ShardsLostError(Exception):
    """A shard was restored, so that the step begins again from the snapshot."""


class Coordinator(abc.ABC):
    """Answers workers, and drives the shards.

    Args:
        shards: connections to the shards, used by the thread of the loop.
        supervise: called while the loop waits; restarts processes that died, and says by
            `worker_left` and `shard_left` which.
        log: takes a line.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Sequence[Client],
        *,
        supervise: Callable[["Coordinator"], None] = lambda coordinator: None,
        log: Callable[[str], None] = lambda line: None,
    ):
        self.plan, self._shards, self._supervise, self._log = plan, shards, supervise, log
        self._changed = threading.Condition()
        self._ready = self._ended = False
        self._lost: set[int] = set()  # shards that were restarted and hold nothing
        self._silent: set[int] = set()  # shards that do not answer
        self._heard: dict[int, float] = {}  # time of the last request, by worker
        self.inner: list[Any] = []
        """Optimizer state of each worker at the snapshot, where workers have their own."""
        self.epoch = 0  # starts from a snapshot
        self._began = time.monotonic()

    def start(self, step: int, state: TrainState) -> None:
        """Load a state into the shards."""
        self.snapshot = Snapshot(step, jax.device_get(state))
        self._load(range(len(self._shards)))
        with self._changed:
            self._begin()
            self._ready = True

    def end(self) -> None:
        """Tell the workers that the run ends."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @abc.abstractmethod
    def advance(self, limit: int) -> Sequence[StepResult]:
        """Return the next steps that are done, at most up to `limit`; wait for them."""

    @abc.abstractmethod
    def close(self) -> int:
        """Let no worker begin another step; return the last step that one has begun."""

    @abc.abstractmethod
    def worker_left(self, worker: int) -> None:
        """Take back what a worker that died was computing."""

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
        """Return the processes that should have been heard of, and forget what is known of them."""
        limit = time.monotonic() - LATE * self.plan.server.timeout
        with self._changed:
            working = self._working() if self._ready else set()
            late = {w for w in working if self._heard.get(w, limit) < limit}
            for worker in late:
                self._heard.pop(worker)
        shards, self._silent = self._silent, set()
        return [*(("worker", w) for w in late), *(("shard", s) for s in shards)]

    def shard_left(self, shard: int) -> None:
        """Note that a shard was started again, and holds nothing."""
        self._lost.add(shard)

    def fetch(self, step: int) -> TrainState:
        """Return the state on the host, when all steps up to `step` are done and no other is begun.

        It is the new snapshot.
        """
        while True:
            try:
                replies = self._call_shards("state", {"done": self._updates()})
                break
            except ShardsLostError:
                self._recover()
                self._catch_up(step)
        like = self.plan.setup.like.params, self.plan.shard_opt_state
        params, opt_state = self.plan.partition.join(like, [reply.arrays for reply in replies])
        if self.plan.is_local:
            stacked = jax.tree.map(lambda *xs: np.stack(xs), *self.inner)
            opt_state = LocalStepsState(opt_state, stacked)
        state = jax.device_get(self.head.state(params, opt_state))
        self.snapshot = Snapshot(step, state)
        return state

    def handle(self, request: Message) -> Message:
        """Answer a worker; called in a thread of its own."""
        worker = request.fields.get("worker")
        if not isinstance(worker, int) or not 0 <= worker < self.plan.server.workers:
            raise ValueError(f"there is no worker {worker!r}")
        end = time.monotonic() + PATIENCE
        with self._changed:
            self._heard[worker] = time.monotonic()
            while True:
                if self._ended:
                    return Message("end")
                reply = self._answer(request, worker) if self._ready else None
                if reply is not None:
                    return reply
                if time.monotonic() > end:
                    return Message("wait")
                self._changed.wait(end - time.monotonic() + 0.01)

    def statistics(self) -> dict[str, Any]:
        """Return measurements for speed.jsonl: clocks, staleness, and the sums of the shards.

        `received` and `sent` are bytes of arrays, `queue` pushes that wait for others.
        """
        with self._changed:
            found: dict[str, Any] = {"clock": self._clocks(), "staleness": self._staleness()}
            found |= self._counts()
        try:
            replies = self._call_shards("statistics", {})
        except ShardsLostError:  # the loop restores them
            return found
        total = {name: sum(reply.fields[name] for reply in replies) for name in replies[0].fields}
        seconds = time.monotonic() - self._began
        return found | {**total, "updates_per_second": total["updates"] / seconds}

    @abc.abstractmethod
    def _updates(self) -> int:
        """Return the number of updates that are done."""

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
            self._supervise(self)
            if self._lost:
                raise ShardsLostError
            if time.monotonic() > due:  # a server that hangs lets all workers hang
                self._call_shards("statistics", {})
                due = time.monotonic() + self.plan.server.timeout

    def _call_shards(self, name: str, fields: dict[str, Any]) -> list[Message]:
        """Return the replies of all shards.

        Raises:
            ShardsLostError: if one died, and was restarted.
        """
        return self._call(self._shards, [Message(name, fields)] * len(self._shards))

    def _call(self, shards: Sequence[Client], requests: Sequence[Message]) -> list[Message]:
        end = time.monotonic() + self.plan.server.timeout
        while True:
            try:
                return call_all(shards, requests)
            except (PeerError, RefusedError) as error:
                if isinstance(error, SilentError):
                    self._silent.add(self._shards.index(error.client))
                self._supervise(self)
                if self._lost:
                    raise ShardsLostError from None
                if isinstance(error, RefusedError) or time.monotonic() > end:
                    raise

    def _load(self, shards: Sequence[int]) -> None:
        """Load the snapshot into shards."""
        state = self.snapshot.state
        opt_state = state.opt_state
        if isinstance(opt_state, LocalStepsState):
            self.inner = [
                jax.tree.map(lambda leaf, w=worker: leaf[w], opt_state.inner)
                for worker in range(self.plan.server.workers)
            ]
            opt_state = opt_state.outer
        self.head = Head.of(state)
        self.epoch += 1
        clients = [self._shards[shard] for shard in shards]
        requests = []
        for shard in shards:
            part = self.plan.partition.of_state((state.params, opt_state), shard)
            arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(part)]
            requests.append(Message("load", {"version": self._loaded_version()}, arrays))
        while True:
            try:
                self._call(clients, requests)
                return
            except ShardsLostError:  # one that is loaded here, or else is restored later
                self._lost -= set(shards)

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
