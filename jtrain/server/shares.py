"""Shares of the rows of a round: which worker has which, and where their optimizer states are.

Pure logic: no threads, no network. A share stays with its worker from round to round. It is free
when that worker is gone, and moves when another worker has none.
"""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any


@dataclasses.dataclass
class Share:
    """A share of the rows."""

    step: int
    """Step that its state is after."""
    saved: int
    """Step that the copy of its state in the run's own process is after."""
    worker: int | None = None
    """Worker that has it."""
    is_leased: bool = False
    """Whether it is being computed."""
    state: Any = None
    """Copy of its state."""


class Shares:
    """Leases of shares in the rounds after a snapshot.

    Args:
        count: of the shares.
        stateful: whether each share has a state of its own, which its worker has. Then a worker may
            take several shares one after the other; otherwise all are computed at the same time.
        step: of the snapshot, whose states are in the run's own process.
    """

    def __init__(self, count: int, *, stateful: bool, step: int):
        self.all = [Share(step, step) for _ in range(count)]
        """The shares, by their numbers."""
        self._stateful = stateful

    def held(self, worker: int) -> list[int]:
        """Return the shares of a worker."""
        return [share for share, each in enumerate(self.all) if each.worker == worker]

    def lease(self, worker: int, reported: Collection[int]) -> int | None:
        """Return the share that a worker computes next; None: there is none for it."""
        if (current := self.lease_of(worker)) is not None:
            return current
        wanted = held = self.held(worker)
        if self._stateful or not held:
            free = [share for share, each in enumerate(self.all) if each.worker is None]
            wanted = [*held, *sorted(free, key=lambda share: share != worker)]
        for share in wanted:
            if not self.all[share].is_leased and share not in reported:
                self.all[share].worker, self.all[share].is_leased = worker, True
                return share
        return None

    def lease_of(self, worker: int) -> int | None:
        """Return the share that a worker is computing."""
        return next((share for share in self.held(worker) if self.all[share].is_leased), None)

    def report(self, share: int, step: int) -> None:
        """Record that a share is computed up to a step."""
        self.all[share].step, self.all[share].is_leased = step, False

    def end_leases(self, worker: int | None = None) -> None:
        """End the lease of a worker, whose share stays its own, or the leases of all."""
        for each in self.all:
            each.is_leased &= worker is not None and each.worker != worker

    def leave(self, worker: int) -> set[int]:
        """Free the shares of a worker that is gone; return those whose state is gone with it."""
        held = self.held(worker)
        for share in held:
            self.all[share].worker, self.all[share].is_leased = None, False
        return {share for share in held if not self.is_saved(share)}

    def is_saved(self, share: int) -> bool:
        """Return whether the state of a share is in the run's own process."""
        return self.all[share].saved == self.all[share].step or not self._stateful

    def unsaved(self) -> list[int]:
        """Return the shares whose state only a worker has."""
        held = [share for share, each in enumerate(self.all) if each.worker is not None]
        return [share for share in held if not self.is_saved(share)]

    def to_hand_over(self, worker: int, everything: bool, others: Iterable[int] = ()) -> list[int]:
        """Return the shares whose state a worker has to hand over before it goes on.

        Args:
            everything: all of its shares; otherwise one, if another worker has none. That one is
                free as soon as its state is in the run's own process.
            others: the workers that are there.
        """
        held = [share for share in self.held(worker) if not self.all[share].is_leased]
        if not everything and held:
            counts = {other: len(self.held(other)) for other in others}
            most = max(counts, key=lambda other: counts[other], default=worker)
            moves = 0 in counts.values() and counts[most] > 1 and most == worker
            held = held[-1:] if moves else []
            for share in held:
                if self.is_saved(share):
                    self.all[share].worker = None
        return [share for share in held if not self.is_saved(share)]

    def take_over(self, share: int, worker: int, step: int, state: Any = None) -> None:
        """Take the state of a share that its worker hands over, unless it is another's or older."""
        found = self.all[share]
        if (found.worker, found.step) == (worker, step):
            found.saved, found.state = step, state
