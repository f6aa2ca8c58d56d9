"""Worker: pulls parameters, computes what its lease says, and pushes the result."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jtrain.core.rows import with_rows
from jtrain.core.types import Batch, Params
from jtrain.data.batches.skip import SkipBatches
from jtrain.server.client import Client, call_all
from jtrain.server.compute import Head, splits_rows
from jtrain.server.server_plan import Plan
from jtrain.server.wire import Message


class Worker:
    """A worker of a run.

    Args:
        index: of the worker.
        coordinator: connection to the run's own process.
        shards: connections to the servers.
        slow: seconds that each step waits, for benchmarks.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        coordinator: Client,
        shards: Sequence[Client],
        *,
        slow: float = 0.0,
    ):
        self._plan, self.index, self._slow = plan, index, slow
        self._coordinator, self._shards = coordinator, shards
        batches = plan.setup.experiment.train
        self._copies = splits_rows(plan.server.mode) and plan.server.workers > 1
        if self._copies:
            batches = batches.shard(index, plan.server.workers)
        self._batches = SkipBatches(batches, plan.setup.windows)
        self._programs = jax.tree.map(jax.jit, plan.programs)
        self._inner: Any = None  # the optimizer state of local steps
        self._inner_at = (-1, -1)  # the epoch of the run and the step that it is for

    def run(self) -> None:
        """Work until the run ends."""
        while True:
            lease = self._ask("lease")
            if lease.name == "end":
                return
            if lease.name == "lease":
                self._work(lease)

    def _work(self, lease: Message) -> None:
        head = jax.tree.unflatten(jax.tree.structure(self._plan.head), lease.arrays)
        if self._plan.is_local:
            self._take_steps(lease, head)
        elif self._plan.has_clock:
            self._compute_batch(lease, head)
        else:
            self._compute_share(lease, head)

    def _compute_share(self, lease: Message, head: Head) -> None:
        """Compute the sums and the gradient of this worker's rows of a step."""
        step, batch = lease.fields["first"], self._batch(lease.fields["first"])
        state = head.state(self._pull())
        weights = self._programs.weights(state, batch)
        if lease.fields["weighs"]:
            reply = self._ask("weights", {"step": step}, weights)
            if reply.name != "weights":
                return
            weights = reply.arrays
        sums, grads = self._programs.share(state, batch, list(weights))
        self._wait_if_slow()
        self._push(lease, grads)
        self._ask("report", {"step": step}, [*jax.tree.leaves(sums), *_scalars(weights)])

    def _compute_batch(self, lease: Message, head: Head) -> None:
        """Compute a whole step, at the pace of this worker."""
        step, batch = lease.fields["first"], self._batch(lease.fields["first"])
        state = head.state(self._pull(keep=lease.fields["keep"]))
        sums, grads, grad_norm, finite = jax.block_until_ready(self._programs.whole(state, batch))
        self._wait_if_slow()
        admitted = self._ask("admit", {"step": step})
        if admitted.name != "admitted":
            return
        facts = {"finite": bool(finite), "value": float(sums.value), "grad_norm": float(grad_norm)}
        squares = self._push(lease, grads, {"facts": facts, **admitted.fields})
        fields = {"step": step, "update": squares}
        self._ask("report", fields, [*jax.tree.leaves(sums), np.float32(grad_norm)])

    def _take_steps(self, lease: Message, head: Head) -> None:
        """Take the steps of a round from the pulled parameters, and push how far they went."""
        first, last = lease.fields["first"], lease.fields["last"]
        before = self._pull()
        state = head.state(before, self._inner_state(lease))
        metrics = []
        for step in range(first, last + 1):
            state, found = self._programs.inner(state, self._batch(step))
            metrics.append(found)
            self._wait_if_slow()
        self._inner, self._inner_at = state.opt_state, (lease.fields["epoch"], last + 1)
        change = jax.tree.map(lambda old, new: np.asarray(old) - new, before, state.params)
        self._push(lease, change)
        stacked = jax.tree.map(lambda *xs: np.stack(xs), *metrics)
        arrays = [*jax.tree.leaves(stacked), *jax.tree.leaves(Head.of(state))]
        inner = jax.tree.leaves(state.opt_state) if lease.fields["gather"] else []
        self._ask("report", {"step": first, "inner": len(inner)}, [*arrays, *inner])

    def _inner_state(self, lease: Message) -> Any:
        """Return this worker's optimizer state, from the run if it has none for this step."""
        if self._inner_at != (lease.fields["epoch"], lease.fields["first"]):
            reply = self._ask("inner")
            self._inner = jax.tree.unflatten(
                jax.tree.structure(self._plan.inner_state), reply.arrays
            )
        return self._inner

    def _batch(self, step: int) -> Batch:
        return with_rows(dict(self._batches[step - 1]), copies=self._copies)

    def _pull(self, *, keep: bool = False) -> Params:
        request = Message("pull", {"worker": self.index, "keep": keep})
        replies = call_all(self._shards, [request] * len(self._shards))
        like = self._plan.setup.like.params
        return self._plan.partition.join(like, [reply.arrays for reply in replies])

    def _push(self, lease: Message, grads: Params, fields: dict[str, Any] | None = None) -> float:
        """Push to all shards; return the sum of squares of the update, if it was applied."""
        fields = {"number": lease.fields["number"], "worker": self.index, **(fields or {})}
        grads = jax.tree.map(np.asarray, grads)
        parts = [self._plan.partition.of_params(grads, i) for i in range(len(self._shards))]
        requests = [Message("push", fields, jax.tree.leaves(part)) for part in parts]
        replies = call_all(self._shards, requests)
        return sum(reply.fields.get("update", 0.0) for reply in replies)

    def _ask(
        self, name: str, fields: dict[str, Any] | None = None, arrays: Sequence[Any] = ()
    ) -> Message:
        """Ask the coordinator until it has an answer; it says `wait` every few seconds."""
        fields = {"worker": self.index, **(fields or {})}
        request = Message(name, fields, [np.asarray(array) for array in arrays])
        for _ in itertools.count():
            reply = self._coordinator.call(request)
            if reply.name != "wait":
                return reply
        raise AssertionError("endless")

    def _wait_if_slow(self) -> None:
        if self._slow:
            time.sleep(self._slow)


def _scalars(arrays: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(array) for array in arrays]
