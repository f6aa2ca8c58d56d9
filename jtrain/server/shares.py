"""Shares of the rows of a round: which worker has which, and where their optimizer states are.

Pure logic: no threads, no network. A share stays with its worker from round to round. It is free
when that worker is gone, and moves when another worker has none.
"""

from collections.abc import Collection, Iterable


class Shares:
    """Leases of shares in the rounds after a snapshot.

    Args:
        count: of the shares.
        keeps: whether each share has a state of its own, which its worker keeps. Then a worker may
            take several shares one after the other; otherwise all are computed at the same time.
        step: of the snapshot, whose states are in the run's own process.
    """

    def __init__(self, count: int, *, keeps: bool, step: int):
        self._count, self._keeps = count, keeps
        self._holders: dict[int, int] = {}  # worker, by share
        self._leased: set[int] = set()  # shares that are being computed
        self._steps = [step] * count  # the step that the state of a share is after
        self._copies = [step] * count  # that of the copy in the run's own process

    def held(self, worker: int) -> list[int]:
        """Return the shares of a worker."""
        return [share for share in range(self._count) if self._holders.get(share) == worker]

    def lease(self, worker: int, reported: Collection[int]) -> int | None:
        """Return the share that a worker computes next; None: there is none for it."""
        held = self.held(worker)
        if (current := self.lease_of(worker)) is not None:
            return current
        busy = self._leased | set(reported)
        share = next((share for share in held if share not in busy), None)
        if share is None and (self._keeps or not held):
            free = [share for share in range(self._count) if share not in self._holders]
            free = [share for share in free if share not in busy]
            share = worker if worker in free else next(iter(free), None)
        if share is not None:
            self._holders[share] = worker
            self._leased.add(share)
        return share

    def lease_of(self, worker: int) -> int | None:
        """Return the share that a worker is computing."""
        return next((share for share in self.held(worker) if share in self._leased), None)

    def step(self, share: int) -> int:
        """Return the step that the state of a share is after."""
        return self._steps[share]

    def report(self, share: int, step: int) -> None:
        """Record that a share is computed up to a step."""
        self._leased.discard(share)
        self._steps[share] = step

    def end_lease(self, worker: int) -> None:
        """End the lease of a worker that has stopped; the share stays its own until it leaves."""
        self._leased -= set(self.held(worker))

    def end_round(self) -> None:
        """End all leases of a round."""
        self._leased.clear()

    def leave(self, worker: int) -> set[int]:
        """Free the shares of a worker that is gone; return those whose state is gone with it."""
        held = self.held(worker)
        for share in held:
            del self._holders[share]
            self._leased.discard(share)
        return {share for share in held if not self._is_here(share)}

    def behind(self) -> list[int]:
        """Return the shares whose state is not in the run's own process."""
        return [share for share in range(self._count) if not self._is_here(share)]

    def to_hand_over(self, worker: int, everything: bool, others: Iterable[int] = ()) -> list[int]:
        """Return the shares whose state a worker has to hand over before it goes on.

        Args:
            everything: all of its shares; otherwise one, if another worker has none. That one is
                free as soon as its state is in the run's own process.
            others: the workers that are there.
        """
        held = [share for share in self.held(worker) if share not in self._leased]
        if not everything and held:
            counts = {other: len(self.held(other)) for other in others}
            most = max(counts, key=lambda other: counts[other], default=worker)
            moves = 0 in counts.values() and counts[most] > 1 and most == worker
            held = held[-1:] if moves else []
            for share in held:
                if self._is_here(share):
                    del self._holders[share]
        return [share for share in held if not self._is_here(share)]

    def take_over(self, share: int, worker: int, done: int) -> bool:
        """Record that the state of a share is in the run's own process; False if it is not that."""
        if self._holders.get(share) != worker or done != self._steps[share]:
            return False
        self._copies[share] = done
        return True

    def _is_here(self, share: int) -> bool:
        return self._copies[share] == self._steps[share] or not self._keeps
