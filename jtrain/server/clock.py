"""Clock of asynchronous workers: who may take the next step, and how old its result is.

Pure logic: no threads, no time, no arrays. Steps are numbers from 1 on; a lease is the right to
compute one. Each step is reported once, by whoever has its lease, so that the rows of its batch
count once.
"""

import collections
import dataclasses
import heapq


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
