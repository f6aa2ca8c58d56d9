"""Rounds: steps in which all workers take part, and which end when their results are added up."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.types import Metrics
from jtrain.parallel.strategies.server_modes import Sync
from jtrain.server.client import ShardsLostError
from jtrain.server.compute import Head, Sums, finish, step_metrics
from jtrain.server.coordinator import Coordinator, StepResult
from jtrain.server.plan import Plan
from jtrain.server.shares import Shares
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
        self._done, self._number = self.snapshot.step, self._loaded_version()
        self._open: tuple[int, int] | None = None
        self._reports: dict[int, Message] = {}  # by share, as the next two
        self._weights: dict[int, Sequence[np.ndarray]] = {}
        self._shares = Shares(self.plan.server.workers, keeps=self.plan.is_local, step=self._done)
        self._lost_shares: set[int] = set()  # those whose optimizer state is lost
        self._collects = False

    @property
    def _backups(self) -> int:
        mode = self.plan.server.mode
        return mode.backups if isinstance(mode, Sync) else 0

    def _loaded_version(self) -> int:
        return self.epoch << 32  # shards count rounds; a push of an earlier epoch is never next

    def _first_update(self) -> int:
        return self._loaded_version()

    def _updates(self) -> int | None:
        return self._number

    @property
    def _step(self) -> int:
        return self._done

    def _clocks(self) -> dict[int, int]:
        shares = range(self.plan.server.workers)
        return {share: self._done + (share in self._reports) for share in shares}

    def close(self) -> int:
        """Return the last step: the loop begins each round, and none is open between two."""
        return self._done

    def _give_back(self, worker: int) -> None:
        self._lost_shares |= self._shares.leave(worker)

    def _working(self) -> set[int]:
        return set() if self._open is None else set(self.members)

    def advance(self, limit: int) -> Sequence[StepResult]:
        """Take one round."""
        while True:
            try:
                return self._advance(limit)
            except ShardsLostError:
                self._recover()

    def _recover(self) -> None:
        lost = self._shards.take_lost()
        names = ", ".join(f"{shard}" for shard in lost)
        who = f"server {names} is restored"
        if not lost:
            names = ", ".join(f"{share}" for share in sorted(self._lost_shares))
            who = f"the optimizer state of share {names} is restored"
        self._log(
            f"{who} from step {self.snapshot.step}: the steps since then are taken again, with the "
            f"same result"
        )
        with self._changed:
            self._open = None  # nothing is leased while the shards are loaded
        self._load(range(len(self._shards)))
        with self._changed:
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
            self._changed.notify_all()
        needed = self.plan.server.workers - self._backups
        self._wait_for_shares(lambda: len(self._reports) >= needed)
        with self._changed:
            self._open = None
            reports = dict(sorted(self._reports.items()))
            self._shares.end_round()
        results = self._end_steps(first, last, reports)
        with self._changed:
            self._done, self._number = last, self._number + 1
        return results

    def _wait_for_shares(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`.

        Raises:
            ShardsLostError: if a shard or the optimizer state of a share was lost.
        """
        self._wait(lambda: bool(self._lost_shares) or ready())
        if self._lost_shares:
            raise ShardsLostError

    def _complete(self) -> None:
        """Collect the optimizer state of each share from the worker that has it."""
        if not self.plan.is_local:
            return
        with self._changed:
            self._collects = True
            self._changed.notify_all()
        try:
            self._wait_for_shares(lambda: not self._shares.behind())
        finally:
            with self._changed:
                self._collects = False

    def _answer(self, request: Message, worker: int) -> Message | None:
        match request.name:
            case "lease":
                return self._lease(worker)
            case "weights":
                return self._sum_weights(request, worker)
            case "report":
                if self._is_open(request, worker):
                    share, (_, last) = request.fields["share"], self._open or (0, 0)
                    self._reports[share] = request
                    self._shares.report(share, last)
                    self.members[worker].leases += 1
                    self._changed.notify_all()
                return Message("thanks")
            case "inner":
                late = request.fields["epoch"] != self.epoch
                return Message("late") if late else self._inner_state(request.fields["share"])
            case "hand_over":
                self._take_over(request, worker)
                return Message("thanks")
        raise ValueError(f"unknown request {request.name!r}")

    def _is_open(self, request: Message, worker: int) -> bool:
        """Return whether a request is about the share that the worker computes."""
        fields = request.fields
        if self._open is None or self._open[0] != fields["step"] or fields["epoch"] != self.epoch:
            return False
        return self._shares.lease_of(worker) == fields["share"]

    def _lease(self, worker: int) -> Message | None:
        if worker >= self.plan.server.most_workers:  # it stands by
            return None
        others = [w for w in self.members if w < self.plan.server.most_workers]
        shares = self._shares.to_hand_over(worker, self._collects, others)
        if shares:
            return Message("hand_over", {"shares": shares})
        if self._open is None or self._collects:
            return None
        share = self._shares.lease(worker, self._reports)
        if share is None:
            return None
        first, last = self._open
        fields = {"first": first, "last": last, "number": self._number + 1, "epoch": self.epoch}
        fields |= {"share": share, "weighs": not self._backups}
        return self._send_head(self.head, fields)

    def _inner_state(self, share: int) -> Message:
        """Return the optimizer state of a share."""
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(self._inner[share])]
        self.state_bytes += sum(array.nbytes for array in arrays)
        return Message("inner", arrays=arrays)

    def _take_over(self, request: Message, worker: int) -> None:
        """Take the optimizer state of a share from the worker that has it."""
        fields, share = request.fields, request.fields["share"]
        self.state_bytes += request.frame_bytes
        if fields["epoch"] != self.epoch:
            return
        if self._shares.take_over(share, worker, fields["done"]):
            self._inner[share] = jax.tree.structure(self.plan.inner_state).unflatten(request.arrays)
            self._changed.notify_all()

    def _before_leave(self, worker: int) -> Message | None:
        self._shares.end_lease(worker)  # it has stopped in the middle of a round
        shares = self._shares.to_hand_over(worker, True)
        return Message("hand_over", {"shares": shares}) if shares else None

    def _sum_weights(self, request: Message, worker: int) -> Message | None:
        if not self._is_open(request, worker):
            return Message("late")
        self._weights[request.fields["share"]] = request.arrays
        if len(self._weights) < self.plan.server.workers:
            return None
        self._changed.notify_all()
        totals = [
            sum(self._weights[share][i] for share in sorted(self._weights))
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
        norm = self._reduce(self._factors(reports))
        self._apply(True, 0.0, norm)
        self.head, results = take_metrics(self.plan, first, last, reports)
        return results

    def _factors(self, reports: dict[int, Message]) -> dict[int, float]:
        """Return the weight of the rows of each share in a round, of that of all rows."""
        size, tree = len(jax.tree.leaves(self.plan.metrics)), jax.tree.structure(self.plan.metrics)
        metrics = [tree.unflatten(each.arrays[:size]) for each in reports.values()]
        weights = _row_weights(metrics)
        total = sum(weights)
        factors = [weight / total if total else 0.0 for weight in weights]
        return dict(zip(reports, factors, strict=True))

    def _reduce(self, factors: dict[int, float], which: dict[str, Any] | None = None) -> float:
        """Add up the shares in the shards; return the norm of the sum.

        Args:
            which: number of the update, and the fragment, if there are several.
        """
        which = which or {"number": self._number + 1}
        fields = {**which, "factors": [*factors.items()]}
        replies = self._shards.call_all("reduce", fields)
        return float(np.sqrt(sum(reply.fields["squares"] for reply in replies)))

    def _apply(
        self, finite: bool, value: float, grad_norm: float, which: dict[str, Any] | None = None
    ) -> float:
        """Update the shards; return the norm of the update."""
        facts: dict[str, Any] = {"finite": finite, "value": value, "grad_norm": grad_norm}
        which = which or {"number": self._number + 1}
        replies = self._shards.call_all("apply", {**which, "facts": facts})
        return float(np.sqrt(sum(reply.fields["update"] for reply in replies)))


def take_metrics(
    plan: Plan, first: int, last: int, reports: Mapping[int, Message]
) -> tuple[Head, list[StepResult]]:
    """Return the mean of the workers' heads, and the metrics of their steps, all rows together."""
    metrics, heads = [], []
    shapes, tree = jax.tree.flatten(plan.metrics)
    head_size = len(jax.tree.leaves(plan.head))
    for report in reports.values():
        metrics.append(tree.unflatten(report.arrays[: len(shapes)]))
        head = report.arrays[len(shapes) : len(shapes) + head_size]
        heads.append(jax.tree.structure(plan.head).unflatten(head))
    total: Metrics = jax.tree.map(lambda *xs: jnp.asarray(sum(xs[1:], start=xs[0])), *metrics)
    take = lambda i: jax.tree.map(lambda x: x[i], total)
    results = [StepResult(step, take(step - first)) for step in range(first, last + 1)]
    return _mean_head(heads, _row_weights(metrics)), results


def _row_weights(metrics: Sequence[Metrics]) -> list[float]:
    """Return the weight of the rows that each worker's metrics are of, over all their steps."""
    return [float(np.sum(each["loss"].weight, dtype=np.float64)) for each in metrics]


def _mean_head(heads: Sequence[Head], weights: Sequence[float]) -> Head:
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
    first = heads[0]
    return Head(step=first.step, skipped=skipped, scale=first.scale, extra=extra, seed=first.seed)
