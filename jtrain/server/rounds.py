"""Rounds: steps in which all workers take part, and which end when their results are added up."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.types import Metrics
from jtrain.parallel.strategies.server_modes import Sync
from jtrain.server.compute import Head, Sums, finish, step_metrics
from jtrain.server.coordinator import Coordinator, ShardsLostError, StepResult
from jtrain.server.wire import Message


class RoundCoordinator(Coordinator):
    """Coordinator of sync, local_sgd and diloco.

    Nothing depends on the time at which a worker answers, except with backups: shares are added up
    in the order of the workers. So a shard that died is restored by taking the steps since the
    snapshot again.
    """

    def _begin(self) -> None:
        self._done, self._number = self.snapshot.step, self._loaded_version()
        self._open: tuple[int, int] | None = None
        self._reports: dict[int, Message] = {}
        self._weights: dict[int, Sequence[np.ndarray]] = {}

    @property
    def _backups(self) -> int:
        mode = self.plan.server.mode
        return mode.backups if isinstance(mode, Sync) else 0

    def _loaded_version(self) -> int:
        return 0  # shards count rounds, from their snapshot on

    def _updates(self) -> int:
        return self._number

    def _clocks(self) -> dict[int, int]:
        workers = range(self.plan.server.workers)
        return {w: self._done + (w in self._reports) for w in workers}

    def close(self) -> int:
        """Return the last step: the loop begins each round, and none is open between two."""
        return self._done

    def worker_left(self, worker: int) -> None:
        """Do nothing: the worker that takes its place gets the same rows of the same step."""

    def _working(self) -> set[int]:
        busy = set(range(self.plan.server.workers)) - set(self._reports)
        return busy if self._open is not None else set()

    def advance(self, limit: int) -> Sequence[StepResult]:
        """Take one round."""
        while True:
            try:
                return self._advance(limit)
            except ShardsLostError:
                self._recover()

    def _recover(self) -> None:
        lost, self._lost = sorted(self._lost), set()
        names = ", ".join(f"{shard}" for shard in lost)
        self._log(
            f"server {names} is restored from step {self.snapshot.step}: the steps since then are "
            f"taken again, with the same result"
        )
        with self._changed:
            self._load(range(len(self._shards)))
            self._begin()

    def _catch_up(self, step: int) -> None:
        while self._done < step:
            self.advance(step)

    def _advance(self, limit: int) -> Sequence[StepResult]:
        first = self._done + 1
        last = min(self._done + self.plan.inner_steps, limit)
        with self._changed:
            self._reports, self._weights = {}, {}
            self._open = first, last
            self._gather = last == limit
            self._changed.notify_all()
        needed = self.plan.server.workers - self._backups
        self._wait(lambda: len(self._reports) >= needed)
        with self._changed:
            self._open = None
            reports = dict(sorted(self._reports.items()))
        results = self._end_steps(first, last, reports)
        self._done, self._number = last, self._number + 1
        return results

    def _answer(self, request: Message, worker: int) -> Message | None:
        match request.name:
            case "lease":
                return self._lease(worker)
            case "weights":
                return self._sum_weights(request, worker)
            case "report":
                if self._is_open(request) and worker not in self._reports:
                    self._reports[worker] = request
                    self._changed.notify_all()
                return Message("thanks")
            case "inner":
                return Message(
                    "inner", arrays=[*map(np.asarray, jax.tree.leaves(self.inner[worker]))]
                )
        raise ValueError(f"unknown request {request.name!r}")

    def _is_open(self, request: Message) -> bool:
        return self._open is not None and self._open[0] == request.fields["step"]

    def _lease(self, worker: int) -> Message | None:
        if self._open is None or worker in self._reports:
            return None
        first, last = self._open
        fields = {"first": first, "last": last, "number": self._number + 1, "epoch": self.epoch}
        fields |= {"weighs": not self._backups, "gather": self._gather}
        return self._send_head(self.head, fields)

    def _sum_weights(self, request: Message, worker: int) -> Message | None:
        if not self._is_open(request):
            return Message("late")
        self._weights[worker] = request.arrays
        if len(self._weights) < self.plan.server.workers:
            return None
        self._changed.notify_all()
        totals = [
            sum(self._weights[w][i] for w in sorted(self._weights))
            for i in range(len(request.arrays))
        ]
        return Message("weights", arrays=[np.asarray(total) for total in totals])

    def _end_steps(self, first: int, last: int, reports: dict[int, Message]) -> list[StepResult]:
        """Update the shards and the head; return the metrics of the steps."""
        if self.plan.is_local:
            return self._average(first, last, reports)
        leaves, tree = jax.tree.flatten(self.plan.sums)
        shares = [tree.unflatten(report.arrays[: len(leaves)]) for report in reports.values()]
        factors = dict.fromkeys(reports, 1.0)
        if self._backups:
            weights = {w: float(report.arrays[len(leaves)]) for w, report in reports.items()}
            total = sum(weights.values())
            factors = {w: weight / total if total else 0.0 for w, weight in weights.items()}
            scaled = zip(shares, factors.values(), strict=True)
            shares = [s._replace(value=s.value * np.float32(factor)) for s, factor in scaled]
        sums: Sums = jax.tree.map(lambda *xs: jnp.asarray(sum(xs[1:], start=xs[0])), *shares)
        grad_norm = self._reduce(factors)
        before, (self.head, finite) = self.head, finish(self.head, sums, jnp.float32(grad_norm))
        update_norm = self._apply(bool(finite), float(sums.value), grad_norm)
        norms = grad_norm, update_norm
        return [StepResult(first, step_metrics(before, self.head, sums, norms))]

    def _average(self, first: int, last: int, reports: dict[int, Message]) -> list[StepResult]:
        """Take the outer step of the mean change; return the means of the workers' metrics."""
        metrics, heads = [], []
        shapes, tree = jax.tree.flatten(self.plan.metrics)
        head_size = len(jax.tree.leaves(self.plan.head))
        for worker, report in reports.items():
            arrays = list(report.arrays)
            count = report.fields["inner"]
            if count:
                inner = jax.tree.structure(self.plan.inner_state)
                self.inner[worker] = inner.unflatten(arrays[-count:])
                arrays = arrays[:-count]
            metrics.append(tree.unflatten(arrays[: len(shapes)]))
            head = arrays[len(shapes) : len(shapes) + head_size]
            heads.append(jax.tree.structure(self.plan.head).unflatten(head))
        norm = self._reduce(dict.fromkeys(reports, 1 / len(reports)))
        self._apply(True, 0.0, norm)
        self.head = _mean_head(heads)
        total: Metrics = jax.tree.map(lambda *xs: jnp.asarray(sum(xs[1:], start=xs[0])), *metrics)
        take = lambda i: jax.tree.map(lambda x: x[i], total)
        return [StepResult(step, take(step - first)) for step in range(first, last + 1)]

    def _reduce(self, factors: dict[int, float]) -> float:
        """Add up the shares in the shards; return the norm of the sum."""
        fields = {"number": self._number + 1, "factors": [*factors.items()]}
        replies = self._call_shards("reduce", fields)
        return float(np.sqrt(sum(reply.fields["squares"] for reply in replies)))

    def _apply(self, finite: bool, value: float, grad_norm: float) -> float:
        """Update the shards; return the norm of the update."""
        facts: dict[str, Any] = {"finite": finite, "value": value, "grad_norm": grad_norm}
        replies = self._call_shards("apply", {"number": self._number + 1, "facts": facts})
        return float(np.sqrt(sum(reply.fields["update"] for reply in replies)))


def _mean_head(heads: Sequence[Head]) -> Head:
    """Return the head of the first worker, with the mean of what the workers carry beside params.

    Counts are those of the first worker, and steps that any of them skipped are skipped.
    """

    def mean(*leaves: Any) -> Any:
        first = np.asarray(leaves[0])
        if not np.issubdtype(first.dtype, np.floating):
            return first
        return np.mean(np.stack(leaves), axis=0).astype(first.dtype)

    extra = jax.tree.map(mean, *[head.extra for head in heads])
    skipped = np.max([head.skipped for head in heads]).astype(np.int32)
    first = heads[0]
    return Head(step=first.step, skipped=skipped, scale=first.scale, extra=extra, seed=first.seed)
