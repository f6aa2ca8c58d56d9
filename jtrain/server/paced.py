"""Workers that go at their own pace: asynchronous, or with bounded staleness."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.parallel.strategies.server_modes import SSP, Compensate
from jtrain.server.clock import Clock
from jtrain.server.compute import Head, finish, step_metrics
from jtrain.server.coordinator import Coordinator, ShardsLostError, StepResult
from jtrain.server.staleness import treat
from jtrain.server.wire import Message


class PacedCoordinator(Coordinator):
    """Coordinator of async and ssp: each step is a lease of one worker.

    State beside the parameters, such as the statistics of batch norm, is that of the gradient that
    was reported last: what others computed from older statistics is replaced.
    """

    def _begin(self) -> None:
        mode = self.plan.server.mode
        bound = mode.bound if isinstance(mode, SSP) else None
        self._policy = getattr(mode, "staleness")  # noqa: B009
        self._clock = Clock(self.snapshot.step, workers=self.plan.server.workers, bound=bound)
        self._results: dict[int, StepResult] = {}
        self._next = self.snapshot.step + 1
        self.lost_updates = 0
        """Updates that shards have lost with their process."""
        self.dropped = 0
        """Gradients that were too old."""

    def _updates(self) -> int:
        return self._next - 1

    def _clocks(self) -> dict[int, int]:
        return dict(sorted(self._clock.clocks.items()))

    def _staleness(self) -> dict[int, int]:
        return dict(sorted(self._clock.staleness.items()))

    def _counts(self) -> dict[str, int]:
        return {"dropped": self.dropped, "lost": self.lost_updates}

    def close(self) -> int:
        """Lease no further step; return the last one that was leased."""
        with self._changed:
            self._clock.limit = self._clock.newest
            return self._clock.limit

    def worker_left(self, worker: int) -> None:
        """Give its step to another."""
        with self._changed:
            self._clock.leave(worker)
            self._changed.notify_all()

    def _working(self) -> set[int]:
        return set(self._clock.leases)

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

    def _recover(self) -> None:
        """Restore shards from the snapshot; the others have gone on."""
        lost, self._lost = sorted(self._lost), set()
        head, epoch = self.head, self.epoch
        self._load(lost)
        self.head, self.epoch = head, epoch
        with self._changed:
            updates = self._next - 1 + len(self._results) - self.snapshot.step
        self.lost_updates += updates * len(lost)
        names = ", ".join(f"{shard}" for shard in lost)
        self._log(
            f"server {names} is restored from step {self.snapshot.step}: {updates} of its updates "
            f"are lost, and the others go on"
        )

    def _catch_up(self, step: int) -> None:
        del step  # the steps are done

    def _answer(self, request: Message, worker: int) -> Message | None:
        match request.name:
            case "lease":
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
        *leaves, grad_norm = request.arrays
        sums = jax.tree.structure(self.plan.sums).unflatten(leaves)
        before = self.head
        self.head, _ = finish(before, sums, grad_norm)
        norms = float(grad_norm), float(np.sqrt(request.fields["update"]))
        metrics = step_metrics(before, self.head, sums, norms)
        one = jnp.float32(1)
        metrics["staleness"] = type(metrics["loss"])(jnp.float32(staleness), one)
        self._results[step] = StepResult(step, metrics)
        self._changed.notify_all()
