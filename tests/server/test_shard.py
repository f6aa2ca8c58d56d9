"""Shards: equal bytes, the same update in parts, each push once, compressed as by its formula."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from comparison import assert_close, bitwise, distance
from server_runs import host, server_setup, train_on_servers

from jtrain.core.pytree import norm
from jtrain.errors import ShardingError
from jtrain.optim import LBFGS, SGD, AdamW, Lamb, Muon
from jtrain.parallel.strategies.server_modes import (
    E3M0,
    BFloat16,
    Int4,
    Int8,
    TopK,
    Uncompressed,
    has_feedback,
)
from jtrain.server.codec import Publisher, PushEncoder, Subscriber, make_codec
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


DRAWN = np.random.default_rng(0)
LOSSY = [BFloat16(), Int8(), Int4(), E3M0(), TopK(share=0.1)]


def leaves(scale=1.0):
    shapes = [(30, 7), (), (101,), (0, 4)]
    return [(scale * DRAWN.normal(size=shape)).astype(np.float32) for shape in shapes]


def through(compress, found):
    codec = make_codec(compress)
    arrays = codec.encode(found)
    return codec.decode(arrays, found), sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("compress", [Uncompressed(), *LOSSY], ids=lambda each: each.kind)
def test_shapes_dtypes_zeros_and_what_is_not_finite_are_kept(compress):
    found = [*leaves(), leaves()[0].astype(ml_dtypes.bfloat16)]
    read, size = through(compress, found)
    assert [(a.shape, a.dtype) for a in read] == [(a.shape, a.dtype) for a in found]
    if compress.kind == "none":
        assert bitwise(read, found)
        assert size == sum(leaf.nbytes for leaf in found)
    zeros = [np.zeros((4, 4), np.float32)]
    assert bitwise(through(compress, zeros)[0], zeros)
    for bad in (np.nan, np.inf):
        (read,), _ = through(compress, [np.float32([1, bad, 2])])
        assert not np.isfinite(read).all()


def test_bytes_are_those_of_the_formats():
    """312 numbers: 4 bytes a block of 64 in five blocks, and one or a half byte a number."""
    found = leaves()
    assert through(BFloat16(), found)[1] == 2 * 312
    assert through(Int8(block=64), found)[1] == 312 + 5 * 4
    assert through(Int4(block=64), found)[1] == 156 + 5 * 4
    assert through(E3M0(block=64), found)[1] == 156 + 5 * 4
    assert through(TopK(share=0.1), found)[1] == 8 * 31


@pytest.mark.parametrize(("compress", "levels"), [(Int8(block=16), 127), (Int4(block=16), 7)])
def test_levels_are_off_by_half_a_level_at_most(compress, levels):
    found = DRAWN.normal(size=160).astype(np.float32)
    (read,), _ = through(compress, [found])
    units = np.abs(found).reshape(10, 16).max(axis=1).repeat(16) / levels
    assert np.all(np.abs(read - found) <= units * 0.5000001)
    assert_close(read / units, np.rint(read / units), 1e-6, says="whole levels")
    largest = np.abs(found) == units * levels
    assert largest.sum() == 10
    assert_close(read[largest], found[largest], 1e-7)


def test_e3m0_is_the_nearest_of_fifteen_numbers():
    """0 and seven powers of two of the largest magnitude, by trying all of them."""
    found = (DRAWN.normal(size=64) * np.logspace(-4, 0, 64)).astype(np.float32)
    (read,), _ = through(E3M0(block=64), [found])
    scale = np.abs(found).max()
    powers = scale * 2.0 ** -np.arange(7)
    table = np.concatenate([[0], powers, -powers])
    nearest = table[np.abs(found[:, None] - table).argmin(axis=1)]
    assert_close(read, nearest, 1e-7)
    assert len(np.unique(read)) > 8


def test_top_k_sends_the_largest_and_keeps_the_others():
    found = np.float32([0.1, -3, 0.2, 2, 0, -0.3])
    (read,), size = through(TopK(share=0.34), [found])
    assert read.tolist() == [0, -3, 0, 2, 0, 0]
    assert size == 16
    (all_of_it,), _ = through(TopK(share=1.0), [found])
    assert bitwise(all_of_it, found)


FEEDBACK = [each for each in LOSSY if has_feedback(each)]


@pytest.mark.parametrize("compress", FEEDBACK, ids=lambda each: each.kind)
def test_what_is_sent_and_what_is_left_are_all_that_was_pushed(compress):
    """After n pushes their sum is that of what was sent and the residual, to float32's rounding."""
    params = {"a": np.zeros((40, 5), np.float32), "b": np.zeros((), np.float32)}
    parts = 3
    partition = make_partition(params, parts)
    encoder = PushEncoder(make_codec(compress), partition, feedback=True)
    pushed = {name: np.zeros(leaf.shape) for name, leaf in params.items()}
    sent = {name: np.zeros(leaf.shape) for name, leaf in params.items()}
    for _ in range(20):
        grads = {name: DRAWN.normal(size=x.shape).astype(np.float32) for name, x in params.items()}
        found = []
        for part in range(parts):
            mine = partition.of_params(grads, part)
            push = encoder.encode(part, [mine["a"], mine["b"]])
            encoder.keep(part, push)
            found.append(push.sent)
        joined = partition.join(params, found)
        pushed = {name: pushed[name] + grads[name] for name in params}
        sent = {name: sent[name] + joined[name] for name in params}
    residual = encoder.residual(params)
    total = {name: sent[name] + residual[name] for name in params}
    assert distance(total, pushed) <= 1e-6
    again = PushEncoder(make_codec(compress), partition, feedback=True)
    again.load(residual)
    assert bitwise(again.residual(params), residual)
    again.load(())
    assert not any(leaf.any() for leaf in again.residual(params).values())


PLAIN_SGD = "optimizer={kind: sgd, lr: 0.3}"
CADENCE = ("evaluate.every=0", "checkpoint.every=0")
INT4 = "parallel.compress={kind: int4, block: 16}"


def rounded(tree):
    return jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), tree)


@pytest.mark.thorough
def test_pushes_and_pulls_of_async_are_those_of_the_formula(study):
    """Three steps of SGD of one worker: w - lr x C(g(bf16(w)) + e), e what C has left out."""
    more = INT4, "parallel.pulls=bf16"
    program = server_setup(study, "{kind: async}", PLAIN_SGD, "steps=3", *CADENCE, *more, workers=1)
    served = train_on_servers(program).state

    plain = server_setup(study, "{kind: async}", PLAIN_SGD, "steps=3", workers=1)
    step, codec = jax.jit(plain._step(plain.schedule)[0]), make_codec(Int4(block=16))
    params, residual = host(plain.initial_state().params), None
    state = plain.initial_state()
    for number in range(3):
        start = rounded(params)
        state = dataclasses.replace(state, params=start)
        state, _ = step(state, plain.batches().train[number])
        scaled = lambda old, new: (old - new) / np.float32(0.3)
        grads = jax.tree.map(scaled, start, host(state.params))
        leaves, tree = jax.tree.flatten(grads)
        wanted = [g + e for g, e in zip(leaves, residual or [0] * len(leaves), strict=True)]
        sent = codec.decode(codec.encode(wanted), wanted)
        residual = [w - s for w, s in zip(wanted, sent, strict=True)]
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, tree.unflatten(sent))
    assert distance(served.params, params) <= 1e-2, "a number on an edge may be rounded otherwise"


CODEC = make_codec(Int8())


def draw(seed):
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape).astype(np.float32) for shape in ((300,), (4, 5))]


def test_a_worker_that_misses_changes_gets_all_and_others_what_has_changed():
    publisher, regular, late = Publisher(CODEC), Subscriber(CODEC), Subscriber(CODEC)
    published, kinds = draw(0), []
    for update in range(4):
        if update:
            published = publisher.publish(draw(update), published)
        for worker in (regular,) if update in (1, 2) else (regular, late):
            answer = publisher.answer(worker.known(0), published)
            kinds.append(answer.kind)
            assert bitwise(worker.take(0, answer), published)
    assert kinds == ["all", "all", "change", "change", "change", "all"]
    answer = publisher.answer(regular.known(0), published)
    assert answer.kind == "nothing"
    assert bitwise(regular.take(0, answer), published)
    publisher.reset()
    assert publisher.answer(regular.known(0), published).kind == "all", "another state was loaded"


def test_what_a_change_leaves_out_is_in_the_next_one():
    """Each change leaves out at most 1/254 of a block's largest."""
    params, published = draw(1), draw(0)
    publisher, apart = Publisher(CODEC), []
    for _ in range(3):
        published = publisher.publish(params, published)
        apart.append(distance(published, params))
    assert apart[0] > 1e-3 > 1e-6 > apart[-1], apart
