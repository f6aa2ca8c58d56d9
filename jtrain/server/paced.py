"""Workers that go at their own pace: asynchronous, or with bounded staleness.

The clock says who may take the next step, and how old its result is. It is pure logic: no threads,
no time, no arrays. Steps are numbers from 1 on; a lease is the right to compute one. Each step is
reported once, by whoever has its lease, so that the rows of its batch count once.
"""

import collections
import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.mean import Mean
from jtrain.parallel.strategies.server_modes import SSP, Compensate, Drop, Scale, Staleness
from jtrain.server.client import ShardsLostError
from jtrain.server.compute import Head, finish, step_metrics
from jtrain.server.coordinator import Coordinator, StepResult
from jtrain.server.wire import Message


@dataclasses.dataclass(frozen=True)
class Lease:
    """The right of a worker to compute a step."""

    step: int
    done: int
    """Steps that were done when the lease was given: their updates are in what is pulled."""


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
        self.clocks: dict[int, int] = {}
        """Steps done, by worker; those that are gone are not in it."""
        self.staleness: collections.Counter[int] = collections.Counter()
        """Number of gradients by staleness."""
        self.leases: dict[int, Lease] = {}
        """Leases by worker."""
        self._bound, self._most_workers = bound, workers
        self._next, self._free = start + 1, []
        self._done = 0  # steps reported
        self._admitted = 0  # steps of which a gradient was admitted
        self._pending: set[int] = set()  # those of them that are not reported
        self._admissions: dict[int, int] = {}  # staleness by worker, of the lease that it has
        self._gone: dict[int, int] = {}  # clocks of workers that are gone

    @property
    def newest(self) -> int:
        """The last step that was ever leased."""
        return self._next - 1

    def join(self, worker: int) -> None:
        """Let a worker begin, with the clock of the slowest, or its own if it had one."""
        self.leave(worker)
        slowest = min(self.clocks.values(), default=0)
        self.clocks[worker] = max(slowest, self._gone.pop(worker, 0))

    def leave(self, worker: int) -> None:
        """Take a worker out: its lease is free for another, and nobody waits for it."""
        clock = self.clocks.pop(worker, None)
        lease = self.leases.pop(worker, None)
        if lease is not None:
            heapq.heappush(self._free, lease.step)
        if clock is not None:  # what was admitted may be applied
            self._gone[worker] = clock + (self._admissions.pop(worker, None) is not None)

    def lease(self, worker: int) -> Lease | None:
        """Return the worker's lease, an open one or a new one; None: it has to wait."""
        if worker not in self.clocks:
            self.join(worker)
        if worker in self.leases:
            return self.leases[worker]
        # Steps are shared, so that a slow worker has none to catch up: it begins with the slowest
        # of the others, which therefore wait for its step, and not for all that it is behind.
        others = [clock for other, clock in self.clocks.items() if other != worker]
        own = self.clocks[worker] = max(self.clocks[worker], min(others, default=0))
        if self._bound is not None and own - min(self.clocks.values()) > self._bound:
            return None
        step = self._take_step()
        if step is None:
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
        if worker not in self._admissions:
            counted = step in self._pending  # for a worker that is gone
            stale = self._admitted - lease.done - counted
            self._admissions[worker] = stale
            self._admitted += not counted
            self._pending.add(step)
            self.staleness[stale] += 1
            if self._bound is not None:
                most = (2 * self._bound + 1) * (self._most_workers - 1)
                assert stale <= most, f"staleness {stale} is above the bound of {most}"
        return self._admissions[worker]

    def report(self, worker: int, step: int) -> bool:
        """Record that a step is done; return False if its lease is another's."""
        lease = self.leases.get(worker)
        if lease is None or lease.step != step:
            return False
        del self.leases[worker]
        self._admissions.pop(worker, None)
        self._pending.discard(step)
        self.clocks[worker] += 1
        self._done += 1
        return True

    def _take_step(self) -> int | None:
        if self._free:
            return heapq.heappop(self._free)
        if self._next > self.limit:
            return None
        self._next += 1
        return self._next - 1


class LeasesCoordinator(Coordinator):
    """Coordinator whose workers push whenever they are done, and wait for no other.

    A shard that dies loses its updates since the snapshot, and is restored from it while the others
    go on.
    """

    def _begin_leases(self, clock: Clock) -> None:
        """Begin from the snapshot, which the shards hold."""
        self._clock = clock
        self._missed = dict.fromkeys(range(self.plan.server.shards), 0)  # since it was loaded
        self.lost_updates = 0
        """Updates that shards have lost with their process."""

    def _clocks(self) -> dict[int, int]:
        return dict(sorted(self._clock.clocks.items()))

    def _staleness(self) -> dict[int, int]:
        return dict(sorted(self._clock.staleness.items()))

    def _counts(self) -> dict[str, int]:
        return {"lost": self.lost_updates}

    def _give_back(self, worker: int) -> None:
        self._clock.leave(worker)

    def _working(self) -> set[int]:
        return set(self._clock.leases)

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
                self._log(f"server {shard} has lost {more} updates up to step {self._step}")

    def _catch_up(self, step: int) -> None:
        del step  # the steps are done


class PacedCoordinator(LeasesCoordinator):
    """Coordinator of async and ssp: each step is a lease of one worker.

    State beside the parameters, such as the statistics of batch norm, is that of the gradient that
    was reported last: what others computed from older statistics is replaced.
    """

    def _begin(self) -> None:
        mode = self.plan.server.mode
        bound = mode.bound if isinstance(mode, SSP) else None
        self._policy = getattr(mode, "staleness")  # noqa: B009
        workers = self.plan.server.most_workers
        self._begin_leases(Clock(self.snapshot.step, workers=workers, bound=bound))
        self._results: dict[int, StepResult] = {}
        self._next = self.snapshot.step + 1
        self.dropped = 0
        """Gradients that were too old."""

    def _updates(self) -> int:
        return self._next - 1

    def _counts(self) -> dict[str, int]:
        return {"dropped": self.dropped, **super()._counts()}

    def close(self) -> int:
        """Lease no further step; return the last one that was leased."""
        with self._changed:
            self._clock.limit = self._clock.newest
            return self._clock.limit

    @property
    def _step(self) -> int:
        return self._next - 1

    def _complete(self) -> None:
        """Do nothing: workers have no state of their own."""

    def advance(self, limit: int) -> Sequence[StepResult]:
        """Return the next steps that are done, in order."""
        with self._changed:
            self._clock.limit = max(limit, self._clock.limit)
            self._changed.notify_all()
        while True:
            try:
                self._wait(lambda: self._next in self._results)
                break
            except ShardsLostError:
                self._recover()
        with self._changed:
            found = []
            while self._next in self._results:
                found.append(self._results.pop(self._next))
                self._next += 1
            return found

    def _answer(self, request: Message, worker: int) -> Message | None:
        match request.name:
            case "lease":
                if worker >= self.plan.server.most_workers:  # it stands by
                    return None
                lease = self._clock.lease(worker)
                if lease is None:
                    return None
                keep = isinstance(self._policy, Compensate)
                fields = {"first": lease.step, "number": lease.step, "keep": keep}
                head = self._head_at(lease.step)
                return self._send_head(head, fields)
            case "admit":
                return self._admit(request, worker)
            case "report":
                self._report(request, worker)
                return Message("thanks")
        raise ValueError(f"unknown request {request.name!r}")

    def _head_at(self, step: int) -> Head:
        """Return the head for a step, whose random key and loss scale it has."""
        return dataclasses.replace(self.head, step=jnp.int32(step - 1))

    def _admit(self, request: Message, worker: int) -> Message:
        staleness = self._clock.admit(worker, request.fields["step"])
        if staleness is None:
            return Message("late")
        factor, compensate = treat(self._policy, staleness)
        self.dropped += factor == 0
        return Message("admitted", {"factor": factor, "compensate": compensate})

    def _report(self, request: Message, worker: int) -> None:
        step = request.fields["step"]
        staleness = self._clock.admit(worker, step)
        if not self._clock.report(worker, step):
            return
        self.members[worker].leases += 1
        *leaves, grad_norm = request.arrays
        sums = jax.tree.structure(self.plan.sums).unflatten(leaves)
        before = self.head
        # What the loss carries is dropped with the gradient.
        if staleness is not None and treat(self._policy, staleness).factor == 0:
            sums = sums._replace(changes=jax.tree.map(lambda _: None, before.extra))
        self.head, _ = finish(before, sums, grad_norm)
        norms = float(grad_norm), float(np.sqrt(request.fields["update"]))
        metrics = step_metrics(before, self.head, sums, norms)
        late = Mean(jnp.float32(staleness), jnp.float32(1))
        self._results[step] = StepResult(step, {**metrics, "staleness": late})
        self._changed.notify_all()


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
