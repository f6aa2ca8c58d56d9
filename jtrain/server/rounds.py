"""Rounds: steps in which all workers take part, and which end when their results are added up."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.state import TrainState
from jtrain.core.types import Metrics
from jtrain.parallel.strategies.server_modes import Sync
from jtrain.server.coordinator import Coordinator, Steps
from jtrain.server.plan import Plan, Sums, finish, step_metrics
from jtrain.server.wire import Message


class RoundCoordinator(Coordinator):
    """Coordinator of sync, local_sgd and diloco.

    The rows of a round have a fixed number of shares, which the workers that are there lease; the
    parts are added up in the order of the shares. So nothing depends on who computes and when,
    except with backups, and a shard that died is restored by taking the steps since the snapshot
    again.

    A share of local steps has an optimizer state of its own. It stays in the worker that has the
    share, is handed over when that worker leaves, and is lost when it dies: then the steps since
    the snapshot are taken again, too.
    """

    def _begin(self) -> None:
        super()._begin()
        self._number = self._loaded_version()
        self._open: tuple[int, int] | None = None
        self._reports: dict[int, Message] = {}  # by share
        self._weights: dict[int, Sequence[np.ndarray]] = {}  # by share

    @property
    def _backups(self) -> int:
        mode = self.plan.server.mode
        return mode.backups if isinstance(mode, Sync) else 0

    def _loaded_version(self) -> int:
        return self.epoch << 32  # shards count rounds; a push of an earlier epoch is never next

    def _updates(self) -> int | None:
        return self._number

    def _clocks(self) -> dict[int, int]:
        shares = range(self.plan.server.workers)
        return {share: self.done + (share in self._reports) for share in shares}

    def close(self) -> int:
        """Return the last step: the loop begins each round, and none is open between two."""
        return self.done

    def _give_back(self, worker: int) -> None:
        self._lost_shares |= self._shares.leave(worker)

    def _recover(self) -> None:
        lost = self._shards.take_lost()
        who = "server" if lost else "the optimizer state of share"
        names = ", ".join(f"{each}" for each in lost or sorted(self._lost_shares))
        self._log(
            f"{who} {names} is restored from step {self.snapshot.step}: the steps since then are "
            f"taken again, with the same result"
        )
        with self._changed:
            self._stop()
        self._load()

    def _stop(self) -> None:
        """Lease nothing while the shards are loaded."""
        self._open = None

    def _advance(self, limit: int) -> Steps:
        first = self.done + 1
        last = min(self.done + self.plan.inner_steps, limit)
        with self._changed:
            self._reports, self._weights = {}, {}
            self._open = first, last
        needed = self.plan.server.workers - self._backups
        self._wait(lambda: len(self._reports) >= needed)
        with self._changed:
            self._open = None
            reports = dict(sorted(self._reports.items()))
            self._shares.end_leases()
        results = self._end_steps(first, last, reports)
        with self._changed:
            self.done, self._number = last, self._number + 1
        return results

    def _answer(self, request: Message, worker: int) -> Message | None:
        is_open = self._is_open(request, worker)
        match request.name:
            case "weights":
                return self._sum_weights(request) if is_open else Message("late")
            case "report":
                if is_open:
                    assert self._open is not None, "it is"
                    share, (_, last) = request.fields["share"], self._open
                    self._reports[share] = request
                    self._shares.report(share, last)
                    self.members[worker].leases += 1
                    self._changed.notify_all()
                return Message("thanks")
        raise ValueError(f"unknown request {request.name!r}")

    def _is_open(self, request: Message, worker: int) -> bool:
        """Return whether a request is about the share that the worker computes."""
        fields = request.fields
        if self._open is None or self._open[0] != fields["step"] or fields["epoch"] != self.epoch:
            return False
        return self._shares.lease_of(worker) == fields["share"]

    def _lease(self, worker: int) -> Message | None:
        if self._open is None:
            return None
        share = self._shares.lease(worker, self._reports)
        if share is None:
            return None
        first, last = self._open
        fields = {"last": last, "number": self._number + 1, "share": share}
        return self._send_lease(first, {**fields, "weighs": not self._backups})

    def _sum_weights(self, request: Message) -> Message | None:
        self._weights[request.fields["share"]] = request.arrays
        if len(self._weights) < self.plan.server.workers:
            return None
        self._changed.notify_all()
        totals = [
            sum(self._weights[share][i] for share in sorted(self._weights))
            for i in range(len(request.arrays))
        ]
        return Message("weights", arrays=[np.asarray(total) for total in totals])

    def _end_steps(self, first: int, last: int, reports: dict[int, Message]) -> Steps:
        """Update the shards and the head; return the metrics of the steps."""
        if self.plan.is_local:
            norm = self._reduce(self._factors(reports))
            self._apply(True, 0.0, norm)
            self.head, results = take_metrics(self.plan, first, last, reports)
            return results
        leaves, tree = jax.tree.flatten(self.plan.report)
        shares = [tree.unflatten(report.arrays[: len(leaves)]) for report in reports.values()]
        factors = dict.fromkeys(reports, 1.0)
        if self._backups:
            weights = [float(report.arrays[len(leaves)]) for report in reports.values()]
            factors = _normalize(reports, weights)
            scaled = zip(shares, factors.values(), strict=True)
            shares = [s._replace(value=s.value * np.float32(factor)) for s, factor in scaled]
        sums: Sums = jax.tree.map(lambda *xs: jnp.asarray(sum(xs[1:], start=xs[0])), *shares)
        grad_norm = self._reduce(factors)
        before, (self.head, finite) = self.head, finish(self.head, sums, jnp.float32(grad_norm))
        norms = grad_norm, self._apply(bool(finite), float(sums.value), grad_norm)
        return [(first, step_metrics(before, self.head, sums, norms))]

    def _factors(self, reports: dict[int, Message]) -> dict[int, float]:
        """Return the weight of the rows of each share in a round, of that of all rows."""
        metrics = [read_report(self.plan, report)[0] for report in reports.values()]
        return _normalize(reports, _row_weights(metrics))

    def _reduce(self, factors: dict[int, float], which: dict[str, Any] | None = None) -> float:
        """Add up the shares in the shards; return the norm of the sum.

        Args:
            which: number of the update, and the fragment, if there are several.
        """
        which = which or {"number": self._number + 1}
        replies = self._shards.call_all("reduce", {**which, "factors": [*factors.items()]})
        return float(np.sqrt(sum(reply.fields["squares"] for reply in replies)))

    def _apply(
        self, finite: bool, value: float, grad_norm: float, which: dict[str, Any] | None = None
    ) -> float:
        """Update the shards; return the norm of the update."""
        which = which or {"number": self._number + 1}
        facts = {"finite": finite, "value": value, "grad_norm": grad_norm}
        replies = self._shards.call_all("apply", {**which, "facts": facts})
        return float(np.sqrt(sum(reply.fields["update"] for reply in replies)))


def _normalize(shares: Iterable[int], weights: Sequence[float]) -> dict[int, float]:
    """Return each weight over their sum, by share; zeros if all are."""
    total = sum(weights)
    return {s: w / total if total else 0.0 for s, w in zip(shares, weights, strict=True)}


def read_report(plan: Plan, report: Message) -> tuple[Metrics, TrainState]:
    """Return the metrics of the steps of a lease, and the head after them."""
    return jax.tree.structure(plan.report).unflatten(report.arrays)


def take_metrics(
    plan: Plan, first: int, last: int, reports: Mapping[int, Message]
) -> tuple[TrainState, Steps]:
    """Return the mean of the workers' heads, and the metrics of their steps, all rows together."""
    found = [read_report(plan, report) for report in reports.values()]
    metrics, heads = zip(*found, strict=True)
    total: Metrics = jax.tree.map(lambda *xs: jnp.asarray(sum(xs[1:], start=xs[0])), *metrics)
    take = lambda i: jax.tree.map(lambda x: x[i], total)
    results = [(step, take(step - first)) for step in range(first, last + 1)]
    return _mean_head(heads, _row_weights(metrics)), results


def _row_weights(metrics: Sequence[Metrics]) -> list[float]:
    """Return the weight of the rows that each worker's metrics are of, over all their steps."""
    return [float(np.sum(each["loss"].weight, dtype=np.float64)) for each in metrics]


def _mean_head(heads: Sequence[TrainState], weights: Sequence[float]) -> TrainState:
    """Return the head of the first worker, with the mean of what the workers carry beside params.

    The mean is by the weights of the workers' rows, as that of the parameters. Counts are those of
    the first worker, and steps that any of them skipped are skipped.
    """
    weights = weights if sum(weights) else [1.0] * len(heads)  # none had a row: all are alike

    def mean(*leaves: Any) -> Any:
        first = np.asarray(leaves[0])
        if not np.issubdtype(first.dtype, np.floating):
            return first
        return np.average(np.stack(leaves), axis=0, weights=weights).astype(first.dtype)

    extra = jax.tree.map(mean, *[head.extra for head in heads])
    skipped = np.max([head.skipped for head in heads]).astype(np.int32)
    return dataclasses.replace(heads[0], skipped=skipped, extra=extra)
