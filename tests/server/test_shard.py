"""Partition and shards: equal bytes, and the same update in parts; each push once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import bitwise, distance

from jtrain.core.pytree import norm
from jtrain.errors import ShardingError
from jtrain.optim import LBFGS, SGD, AdamW, Lamb, Muon
from jtrain.server.partition import make_partition
from jtrain.server.plan_checks import check_splits
from jtrain.server.shard import Facts, Shard

DRAW = np.random.default_rng(0)


def arrays(**shapes):
    return {name: DRAW.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


PARAMS = arrays(a=(5, 3), b=(), c=(100, 4), d=(7,))
GOOD = Facts(finite=True, value=1.0, grad_norm=1.0)


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_have_equal_bytes_and_join_to_the_whole(shards):
    found = make_partition(PARAMS, shards)
    rows = [found.of_params(PARAMS, shard) for shard in range(shards)]
    sizes = [sum(leaf.nbytes for name, leaf in each.items() if name != "b") for each in rows]
    assert sum(sizes) == sum(leaf.nbytes for name, leaf in PARAMS.items() if name != "b")
    assert max(sizes) - min(sizes) <= 2 * 4 * 4, "two rows of the widest leaf"
    parts = [jax.tree.leaves(found.of_params(PARAMS, shard)) for shard in range(shards)]
    assert bitwise(found.join(PARAMS, parts), PARAMS)


RULES = {
    "sgd": SGD(lr=0.1, momentum=0.9, clip=0.3),
    "adamw": AdamW(lr=0.1, weight_decay=0.1, clip=0.3, ema=0.9),
}
THOROUGH = pytest.mark.thorough


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_update_in_parts_is_that_of_the_whole(name):
    optimizer, shards = RULES[name].build(10), 3
    found = make_partition(PARAMS, shards)
    state = optimizer.init(PARAMS)
    servers = [Shard(optimizer, *found.of_state((PARAMS, state), i)) for i in range(shards)]
    params = jax.tree.map(jnp.asarray, PARAMS)

    @jax.jit
    def whole(grads, state, params, size):
        known = {"grad": grads, "grad_norm": size, "value": jnp.float32(1)}
        updates, state = optimizer.update(grads, state, params, **known)
        return updates, state, optax.apply_updates(params, updates)

    for number in (1, 2, 3):
        grads = arrays(a=(5, 3), b=(), c=(100, 4), d=(7,))
        size = float(norm(grads))
        updates, state, params = whole(grads, state, params, jnp.float32(size))
        squares, changes = 0.0, 0.0
        for i, server in enumerate(servers):
            half = jax.tree.leaves(jax.tree.map(lambda g: g / 2, found.of_params(grads, i)))
            server.push(number, 1, half)
            server.push(number, 0, half)
            squares += server.reduce(number, {0: 1.0, 1: 1.0})
        for server in servers:
            changes += server.apply(number, Facts(finite=True, value=1.0, grad_norm=size))
        assert squares**0.5 == pytest.approx(size, rel=1e-6)
        assert changes**0.5 == pytest.approx(float(norm(updates)), rel=1e-5)
    joined = found.join((params, state), [server.state() for server in servers])
    assert distance(joined, (params, state)) <= 1e-6


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(Muon(lr=0.1).build(10), marks=THOROUGH, id="muon"),
        pytest.param(Lamb(lr=0.1).build(10), marks=THOROUGH, id="lamb"),
        pytest.param(LBFGS().build(10), id="lbfgs"),
        pytest.param(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), id="optax clip"),
        # A bound above the norm of a gradient whose numbers are about 1.
        pytest.param(SGD(lr=0.1, clip=30, clip_value=20).build(10), id="clip of clipped values"),
    ],
)
def test_an_optimizer_that_needs_the_whole_is_refused_in_parts(optimizer):
    params = arrays(a=(6, 4), b=(6, 4))
    with pytest.raises(ShardingError, match=r"parallel.shards=1\."):
        check_splits(optimizer, params, make_partition(params, 3))


def shard(version=0):
    optimizer = optax.sgd(1.0)
    params = {"w": np.zeros(2, np.float32)}
    return Shard(optimizer, params, optimizer.init(params), version=version)


def ones(scale=1.0):
    return [np.full(2, scale, np.float32)]


def value(server):
    return float(server.params["w"][0])


def test_a_push_that_comes_again_is_applied_once():
    server = shard()
    for _ in range(3):
        server.push_and_apply(1, 0, ones(), GOOD)
    server.push_and_apply(1, 1, ones(), GOOD)  # by another worker, which got the step
    assert value(server) == -1
    server.push_and_apply(3, 0, ones(), GOOD)
    server.push_and_apply(2, 0, ones(), GOOD)
    server.push_and_apply(3, 0, ones(), GOOD)
    assert (value(server), server.version) == (-3, 3)


def test_parts_that_come_again_or_late_change_nothing():
    server = shard()
    server.push(1, 0, ones())
    server.push(1, 0, ones())
    server.push(2, 1, ones(100))  # of a step that has not begun
    with pytest.raises(LookupError, match=r"parts \[1\] of update 1 are missing"):
        server.reduce(1, {0: 1.0, 1: 1.0})
    server.push(1, 1, ones(2))
    server.reduce(1, {0: 1.0, 1: 1.0})
    first = server.apply(1, GOOD)
    assert server.apply(1, GOOD) == first
    server.push(1, 0, ones())
    assert (value(server), server.version, server.queue) == (-3, 1, 0)


def test_a_step_that_is_not_finite_changes_nothing():
    server = shard()
    server.push(1, 0, ones(np.nan))
    server.reduce(1, {0: 1.0})
    server.apply(1, Facts(finite=False, value=1.0, grad_norm=float("nan")))
    assert (value(server), server.version) == (0, 1)


def test_a_factor_scales_and_drops():
    server = shard()
    server.push_and_apply(1, 0, ones(), GOOD, factor=0.25)
    server.push_and_apply(2, 0, ones(), GOOD, factor=0.0)
    assert (value(server), server.version) == (-0.25, 2)


def test_delay_compensation_is_its_formula():
    """g + strength g g (v - w): pulled at w = 0, applied at v = -1."""
    server = shard()
    server.pull(7, keep=True)
    server.push_and_apply(1, 0, ones(), GOOD)
    server.push_and_apply(2, 7, ones(3.0), GOOD, compensate=0.1)
    assert value(server) == pytest.approx(-1 - (3 + 0.1 * 9 * (-1 - 0)))


def test_an_update_is_made_in_place_and_never_below_a_reply():
    server = shard()
    server.push_and_apply(1, 0, ones(), GOOD)
    place = server.params["w"].unsafe_buffer_pointer()
    server.pull(0)
    server.push_and_apply(2, 0, ones(), GOOD)
    assert server.params["w"].unsafe_buffer_pointer() == place, "no new memory"
    (reply,) = server.pull(0)
    server.push_and_apply(3, 0, ones(), GOOD)
    assert reply.tolist() == [-2, -2], "what is being sent is what was pulled"
    assert value(server) == -3


def test_the_arrays_that_a_shard_is_loaded_with_stay_as_they_are():
    params = {"w": jnp.zeros(2)}
    server = Shard(optax.sgd(1.0), params, optax.sgd(1.0).init(params))
    server.push_and_apply(1, 0, ones(), GOOD)
    assert params["w"].tolist() == [0, 0]
