"""State that a loss carries beside the parameters, where rows of workers count differently."""

import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.core.mean import Mean
from jtrain.core.precision.loss_scale import Unscaled
from jtrain.parallel.strategies.server_modes import Drop
from jtrain.server.coordination.paced import PacedCoordinator
from jtrain.server.coordination.rounds import take_metrics
from jtrain.server.plan.compute import Head, Sums
from jtrain.server.transport.wire import Message


def head(mean: float) -> Head:
    extra = {"mean": jnp.full(2, mean), "count": jnp.int32(4)}
    zero = jnp.int32(0)
    return Head(step=zero, skipped=zero, scale=Unscaled(), extra=extra, seed=jnp.uint32(0))


@pytest.mark.parametrize(("rows", "want"), [([4, 0], 1.0), ([3, 1], 3.0), ([0, 0], 5.0)])
def test_the_mean_over_workers_is_by_the_weights_of_their_rows(rows, want):
    metrics = [{"loss": Mean(jnp.ones(1), jnp.full(1, float(n)))} for n in rows]
    heads = [head(1.0), head(9.0)]
    plan: Any = SimpleNamespace(metrics=metrics[0], head=heads[0])
    reports = {
        worker: Message("report", {}, [np.asarray(x) for x in jax.tree.leaves(each)])
        for worker, each in enumerate(zip(metrics, heads, strict=True))
    }
    found, _ = take_metrics(plan, 1, 1, reports)
    np.testing.assert_array_equal(found.extra["mean"], np.full(2, want, np.float32))
    assert found.extra["count"] == 4


@pytest.mark.parametrize(("limit", "reporter", "want"), [(0, 0, 1.0), (1, 0, 6.0), (0, 1, 6.0)])
def test_the_state_of_a_dropped_gradient_is_dropped(limit, reporter, want):
    # The first worker is one update late, and leaves its step to the second where that reports.
    changes = {"mean": Mean(jnp.full(2, 12.0), jnp.float32(2)), "count": None}
    sums = Sums(jnp.float32(1), {"loss": Mean(jnp.float32(1), jnp.float32(1))}, changes)
    one: Any = object.__new__(PacedCoordinator)
    one.plan, one.head, one._policy = SimpleNamespace(sums=sums), head(1.0), Drop(limit=limit)
    one._clock = SimpleNamespace(
        admit=lambda worker, step: 1 - worker, report=lambda worker, step: True
    )
    one.members, one._results = {w: SimpleNamespace(leases=0) for w in (0, 1)}, {}
    one.dropped, one._changed = 0, threading.Condition()
    arrays = [np.asarray(x) for x in [*jax.tree.leaves(sums), jnp.float32(1)]]
    with one._changed:
        one._admit(Message("admit", {"step": 3}), 0)
        one._report(Message("report", {"step": 3, "update": 0.0}, arrays), reporter)
    assert one.dropped == (limit == 0)
    np.testing.assert_array_equal(one.head.extra["mean"], np.full(2, want, np.float32))
