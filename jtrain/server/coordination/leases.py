"""Coordinator of leases that each worker takes at its own pace."""

from collections.abc import Sequence

from jtrain.server.coordination.clock import Clock
from jtrain.server.coordination.coordinator import Coordinator


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
