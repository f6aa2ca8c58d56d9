"""Workers that go at their own pace: asynchronous, or with bounded staleness."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.mean import Mean
from jtrain.parallel.strategies.server_modes import SSP, Compensate, Drop, Scale, Staleness
from jtrain.server.client import ShardsLostError
from jtrain.server.clock import Clock
from jtrain.server.compute import Head, finish, step_metrics
from jtrain.server.coordinator import Coordinator, StepResult
from jtrain.server.wire import Message


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
