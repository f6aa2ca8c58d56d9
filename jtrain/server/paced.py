"""Workers that go at their own pace: asynchronous, or with bounded staleness.

The clock says who may take the next step, and how old its result is. It is pure logic: no threads,
no time, no arrays. Steps are numbers from 1 on; a lease is the right to compute one. Each step is
reported once, by whoever has its lease, so that the rows of its batch count once.
"""

import abc
import collections
import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.mean import Mean
from jtrain.core.types import Metrics
from jtrain.parallel.strategies.server_modes import SSP, Compensate, Drop, Scale, Staleness
from jtrain.server.coordinator import Coordinator, Steps
from jtrain.server.plan import finish, step_metrics
from jtrain.server.wire import Message


@dataclasses.dataclass
class Lease:
    """The right of a worker to compute a step."""

    step: int
    done: int
    """Steps that were done when the lease was given: their updates are in what is pulled."""
    staleness: int | None = None
    """That of its gradient, once it is admitted."""


class Clock:
    """Leases of steps, and the clock of each worker: the steps that it has done or was spared.

    Args:
        start: the last step that is done.
        workers: of the run, for the bound.
        bound: largest lead of a worker over the slowest one; None: no bound.
    """

    def __init__(self, start: int = 0, *, workers: int, bound: int | None = None):
        self.limit = start
        """The last step that may be leased."""
        self.newest = start
        """The last step that was ever leased."""
        self.clocks: dict[int, int] = {}
        """Steps done, by worker; those that are gone are not in it."""
        self.staleness: collections.Counter[int] = collections.Counter()
        """Number of gradients by staleness."""
        self.leases: dict[int, Lease] = {}
        """Leases by worker."""
        self._bound, self._most_workers = bound, workers
        self._free: list[int] = []  # leased to workers that are gone
        self._done = 0  # steps reported
        self._admitted = 0  # steps of which a gradient was admitted
        self._pending: set[int] = set()  # those of them that are not reported
        self._gone: dict[int, int] = {}  # clocks of workers that are gone

    def leave(self, worker: int) -> None:
        """Take a worker out: its lease is free for another, and nobody waits for it."""
        lease = self.leases.pop(worker, None)
        if lease is not None:
            heapq.heappush(self._free, lease.step)
        if worker in self.clocks:  # what was admitted may be applied
            admitted = lease is not None and lease.staleness is not None
            self._gone[worker] = self.clocks.pop(worker) + admitted

    def lease(self, worker: int) -> Lease | None:
        """Return the worker's lease, an open one or a new one; None: it has to wait."""
        if worker in self.leases:
            return self.leases[worker]
        # Steps are shared, so that a slow worker has none to catch up: it begins with the slowest
        # of the others, which therefore wait for its step, and not for all that it is behind.
        others = [clock for other, clock in self.clocks.items() if other != worker]
        own = self.clocks.get(worker, self._gone.pop(worker, 0))
        own = self.clocks[worker] = max(own, min(others, default=0))
        if self._bound is not None and own - min(self.clocks.values()) > self._bound:
            return None
        if self._free:
            step = heapq.heappop(self._free)
        elif self.newest < self.limit:
            step = self.newest = self.newest + 1
        else:
            return None
        self.leases[worker] = Lease(step, self._done)
        return self.leases[worker]

    def admit(self, worker: int, step: int) -> int | None:
        """Return the staleness of the gradient of a lease; None if the lease is another's.

        It is the number of updates of others that were admitted since the lease, or were admitted
        before and not done: at most (2s + 1)(workers - 1) with a bound of s, for another worker
        has done at least c - s steps when a lease is given at clock c, and begins at most its step
        c + s + 1 before the lease is done.
        """
        lease = self.leases.get(worker)
        if lease is None or lease.step != step:
            return None
        if lease.staleness is None:
            counted = step in self._pending  # for a worker that is gone
            lease.staleness = self._admitted - lease.done - counted
            self._admitted += not counted
            self._pending.add(step)
            self.staleness[lease.staleness] += 1
            if self._bound is not None:
                most = (2 * self._bound + 1) * (self._most_workers - 1)
                says = f"staleness {lease.staleness} is above the bound of {most}"
                assert lease.staleness <= most, says
        return lease.staleness

    def report(self, worker: int, step: int) -> bool:
        """Record that a step is done; return False if its lease is another's."""
        lease = self.leases.get(worker)
        if lease is None or lease.step != step:
            return False
        del self.leases[worker]
        self._pending.discard(step)
        self.clocks[worker] += 1
        self._done += 1
        return True


class LeasesCoordinator(Coordinator):
    """Coordinator whose workers push whenever they are done, and wait for no other.

    A shard that dies loses its updates since the snapshot, and is restored from it while the others
    go on.
    """

    _clock: Clock

    def _begin(self) -> None:
        super()._begin()
        self._missed = dict.fromkeys(range(self.plan.server.shards), 0)  # since it was loaded
        self.lost_updates = 0
        """Updates that shards have lost with their process."""

    def _clocks(self) -> dict[int, int]:
        return dict(sorted(self._clock.clocks.items()))

    def _counts(self) -> dict[str, Any]:
        staleness = dict(sorted(self._clock.staleness.items()))
        return {"staleness": staleness, "lost": self.lost_updates}

    def _give_back(self, worker: int) -> None:
        self._shares.leave(worker)
        self._clock.leave(worker)

    def _recover(self) -> None:
        lost = self._shards.take_lost()
        self._send_snapshot(lost)
        self._missed |= dict.fromkeys(lost, 0)
        names = ", ".join(f"{shard}" for shard in lost)
        self._log(
            f"server {names} is restored from step {self.snapshot.step}: its updates since then "
            f"are lost, and the others go on"
        )

    def _count_missed(self, missed: Sequence[int]) -> None:
        for shard, updates in enumerate(missed):
            more, self._missed[shard] = updates - self._missed[shard], updates
            if more:
                self.lost_updates += more
                self._log(f"server {shard} has lost {more} updates up to step {self.done}")

    def _answer(self, request: Message, worker: int) -> Message | None:
        number = request.fields["step"]
        staleness = self._clock.admit(worker, number)
        match request.name:
            case "admit":
                return Message("late") if staleness is None else self._admit(worker, staleness)
            case "report":
                if staleness is not None and self._clock.report(worker, number):
                    self.members[worker].leases += 1
                    self._take(request, number, staleness)
                    self._changed.notify_all()
                return Message("thanks")
        raise ValueError(f"unknown request {request.name!r}")

    @abc.abstractmethod
    def _admit(self, worker: int, staleness: int) -> Message:
        """Admit the push of a worker's lease."""

    @abc.abstractmethod
    def _take(self, report: Message, number: int, staleness: int) -> None:
        """Take the report of a lease."""


class PacedCoordinator(LeasesCoordinator):
    """Coordinator of async and ssp: each step is a lease of one worker.

    State beside the parameters, such as the statistics of batch norm, is that of the gradient that
    was reported last: what others computed from older statistics is replaced.
    """

    def _begin(self) -> None:
        super()._begin()
        mode = self.plan.server.mode
        bound = mode.bound if isinstance(mode, SSP) else None
        self._policy = getattr(mode, "staleness")  # noqa: B009
        self._clock = Clock(self.done, workers=self.plan.server.most_workers, bound=bound)
        self._results: dict[int, Metrics] = {}
        self.dropped = 0
        """Gradients that were too old."""

    def _loaded_version(self) -> int:
        return self.snapshot.step

    def _updates(self) -> int:
        return self.done

    def _counts(self) -> dict[str, Any]:
        return {"dropped": self.dropped, **super()._counts()}

    def close(self) -> int:
        """Lease no further step; return the last one that was leased."""
        with self._changed:
            self._clock.limit = self._clock.newest
            return self._clock.limit

    def _advance(self, limit: int) -> Steps:
        """Return the next steps that are done, in order."""
        with self._changed:
            self._clock.limit = max(limit, self._clock.limit)
        self._wait(lambda: self.done + 1 in self._results)
        with self._changed:
            found = []
            while self.done + 1 in self._results:
                self.done += 1
                found.append((self.done, self._results.pop(self.done)))
            return found

    def _lease(self, worker: int) -> Message | None:
        lease = self._clock.lease(worker)
        if lease is None:
            return None
        keep = isinstance(self._policy, Compensate)
        return self._send_lease(lease.step, {"number": lease.step, "keep": keep})

    def _admit(self, worker: int, staleness: int) -> Message:
        treatment = treat(self._policy, staleness)
        self.dropped += treatment.factor == 0
        return Message("admitted", treatment._asdict())

    def _take(self, report: Message, number: int, staleness: int) -> None:
        *leaves, grad_norm = report.arrays
        sums = jax.tree.structure(self.plan.report).unflatten(leaves)
        before = self.head
        # What the loss carries is dropped with the gradient.
        if treat(self._policy, staleness).factor == 0:
            sums = sums._replace(changes=jax.tree.map(lambda _: None, before.extra))
        self.head, _ = finish(before, sums, grad_norm)
        norms = float(grad_norm), float(np.sqrt(report.fields["update"]))
        metrics = step_metrics(before, self.head, sums, norms)
        late = Mean(jnp.float32(staleness), jnp.float32(1))
        self._results[number] = {**metrics, "staleness": late}


class Treatment(NamedTuple):
    """How a gradient is applied."""

    factor: float
    """Factor of the gradient; 0: it is dropped."""
    compensate: float = 0.0
    """Strength of the correction for what has changed since."""


def treat(policy: Staleness, staleness: int) -> Treatment:
    """Return the treatment of a gradient, by the updates since its parameters were pulled."""
    if isinstance(policy, Scale):
        return Treatment(1 / (1 + staleness))
    if isinstance(policy, Drop):
        return Treatment(float(staleness <= policy.limit))
    if isinstance(policy, Compensate):
        return Treatment(1.0, policy.strength)
    return Treatment(1.0)
