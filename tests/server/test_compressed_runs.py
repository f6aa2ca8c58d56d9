"""Runs whose pushes or pulls are compressed: the formula, the worker's state, bytes and kills."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from comparison import bitwise, distance
from quick_study import write_study
from server_runs import host, server_setup, train_on_servers

from jtrain.parallel.strategies.compression import Int4
from jtrain.server.plan.server_plan import Plan
from jtrain.server.processes.local_worker import LocalWorker
from jtrain.server.shards.codec import make_codec
from jtrain.server.threads import thread_cluster
from jtrain.server.transport.wire import Message

SGD = "optimizer={kind: sgd, lr: 0.3}"
CADENCE = ("evaluate.every=0", "checkpoint.every=0")
DILOCO = "{kind: diloco, inner_steps: 2, lr: 0.5, momentum: 0.8}"
INT4 = "parallel.compress={kind: int4, block: 16}"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


def rounded(tree):
    return jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), tree)


@pytest.mark.thorough
def test_pushes_and_pulls_of_async_are_those_of_the_formula(study):
    """Three steps of SGD of one worker: w - lr x C(g(bf16(w)) + e), e what C has left out."""
    more = INT4, "parallel.pulls=bf16"
    setup = server_setup(study, "{kind: async}", SGD, "steps=3", *CADENCE, *more, workers=1)
    served = train_on_servers(setup).state

    plain = server_setup(study, "{kind: async}", SGD, "steps=3", workers=1)
    step, codec = jax.jit(plain._step()[0]), make_codec(Int4(block=16))
    params, residual = host(plain.fresh().params), None
    state = plain.fresh()
    for number in range(3):
        start = rounded(params)
        state = dataclasses.replace(state, params=start)
        state, _ = step(state, plain.train[number])
        grads = jax.tree.map(
            lambda old, new: (old - new) / np.float32(0.3), start, host(state.params)
        )
        leaves, tree = jax.tree.flatten(grads)
        wanted = [g + e for g, e in zip(leaves, residual or [0] * len(leaves), strict=True)]
        sent = codec.decode(codec.encode(wanted), wanted)
        residual = [w - s for w, s in zip(wanted, sent, strict=True)]
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, tree.unflatten(sent))
    assert distance(served.params, params) <= 1e-2, "a number on an edge may be rounded otherwise"


def diloco(study, *settings, **options):
    setup = server_setup(study, DILOCO, SGD, "steps=8", *CADENCE, *settings, **options)
    return setup, train_on_servers(setup).state


@pytest.mark.thorough
def test_all_of_the_numbers_are_what_is_pushed_uncompressed(study):
    _, want = diloco(study, workers=2, shards=2)
    everything = "parallel.compress={kind: top_k, share: 1}"
    _, got = diloco(study, everything, workers=2, shards=2)
    assert bitwise(host(got.params), host(want.params))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(got.opt_state.inner.residual))
    _, eight = diloco(study, "parallel.compress={kind: int8, block: 32}", workers=2, shards=2)
    assert 0 < distance(eight.params, want.params) <= 5e-3


@pytest.mark.thorough
def test_the_residual_is_part_of_a_worker_state_of_any_number_of_servers(study):
    setup, state = diloco(study, INT4, workers=2, shards=3)
    residual = state.opt_state.inner.residual
    assert jax.tree.leaves(residual)[0].shape[0] == 2
    assert any(np.any(leaf) for leaf in jax.tree.leaves(residual))
    other = server_setup(study, DILOCO, SGD, "steps=12", *CADENCE, INT4, workers=2, shards=1)
    assert jax.tree.structure(other.like.opt_state) == jax.tree.structure(setup.like.opt_state)


@pytest.mark.parametrize("fresh", [True, False])
def test_an_older_residual_is_not_taken_up(study, fresh):
    """It was pushed since: only one that no push has followed is taken."""
    setup = server_setup(study, DILOCO, SGD, "steps=8", *CADENCE, INT4, workers=2)
    plan = Plan(setup)
    saved = jax.tree.map(lambda x: np.full(x.shape, 2, x.dtype), plan.inner_state)
    worker = LocalWorker(plan, 0, None, [])
    worker._take_up(0, Message("inner", {}, jax.tree.leaves(saved)), fresh=fresh)
    found = worker._encoder(0).residual(setup.like.params)
    assert all(np.all(leaf == (2 if fresh else 0)) for leaf in jax.tree.leaves(found))


@pytest.mark.thorough
def test_a_snapshot_is_fresh_until_a_worker_has_pushed(study):
    mode = "{kind: async_diloco, inner_steps: 2}"
    setup = server_setup(study, mode, SGD, "steps=4", *CADENCE, INT4, workers=1)
    with thread_cluster(Plan(setup)) as (coordinator, _):
        coordinator.start(0, setup.fresh())
        fresh = [coordinator._is_fresh(0)]
        coordinator.advance(2)
        fresh.append(coordinator._is_fresh(0))
        coordinator.advance(4)
        coordinator.fetch(4)
        fresh.append(coordinator._is_fresh(0))
    assert fresh == [True, False, True]


@pytest.mark.thorough
def test_bytes_are_those_of_the_format(study):
    """Of 26 numbers frames are mostly headers: the difference is that of the arrays."""
    sizes = {}
    for kind in ("none", "bf16"):
        setup = server_setup(
            study,
            "{kind: async}",
            SGD,
            "steps=40",
            *CADENCE,
            f"parallel.compress.kind={kind}",
            "model.width=4096",
            workers=1,
        )
        with thread_cluster(Plan(setup)) as (coordinator, _):
            coordinator.start(0, setup.fresh())
            while coordinator.advance(40)[-1].step < 40:
                pass
            sizes[kind] = coordinator.statistics()["worker_bytes"]
    numbers = sum(leaf.size for leaf in jax.tree.leaves(setup.like.params))
    assert abs((sizes["none"] - sizes["bf16"]) / (40 * 2 * numbers) - 1) < 0.01
