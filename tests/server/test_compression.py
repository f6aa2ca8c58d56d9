"""Compressed pushes and pulls, against closed forms: codecs, error feedback, and whole runs."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from comparison import assert_close, bitwise, distance
from server_runs import host, server_setup, train_on_servers

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

DRAW = np.random.default_rng(0)
LOSSY = [BFloat16(), Int8(), Int4(), E3M0(), TopK(share=0.1)]


def leaves(scale=1.0):
    shapes = [(30, 7), (), (101,), (0, 4)]
    return [(scale * DRAW.normal(size=shape)).astype(np.float32) for shape in shapes]


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
    found = DRAW.normal(size=160).astype(np.float32)
    (read,), _ = through(compress, [found])
    units = np.abs(found).reshape(10, 16).max(axis=1).repeat(16) / levels
    assert np.all(np.abs(read - found) <= units * 0.5000001)
    assert_close(read / units, np.rint(read / units), 1e-6, says="whole levels")
    largest = np.abs(found) == units * levels
    assert largest.sum() == 10
    assert_close(read[largest], found[largest], 1e-7)


def test_e3m0_is_the_nearest_of_fifteen_numbers():
    """0 and seven powers of two of the largest magnitude, by trying all of them."""
    found = (DRAW.normal(size=64) * np.logspace(-4, 0, 64)).astype(np.float32)
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
        grads = {name: DRAW.normal(size=x.shape).astype(np.float32) for name, x in params.items()}
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


SGD = "optimizer={kind: sgd, lr: 0.3}"
CADENCE = ("evaluate.every=0", "checkpoint.every=0")
INT4 = "parallel.compress={kind: int4, block: 16}"


def rounded(tree):
    return jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), tree)


@pytest.mark.thorough
def test_pushes_and_pulls_of_async_are_those_of_the_formula(study):
    """Three steps of SGD of one worker: w - lr x C(g(bf16(w)) + e), e what C has left out."""
    more = INT4, "parallel.pulls=bf16"
    program = server_setup(study, "{kind: async}", SGD, "steps=3", *CADENCE, *more, workers=1)
    served = train_on_servers(program).state

    plain = server_setup(study, "{kind: async}", SGD, "steps=3", workers=1)
    step, codec = jax.jit(plain._step()[0]), make_codec(Int4(block=16))
    params, residual = host(plain.initial_state().params), None
    state = plain.initial_state()
    for number in range(3):
        start = rounded(params)
        state = dataclasses.replace(state, params=start)
        state, _ = step(state, plain.batches().train[number])
        grads = jax.tree.map(
            lambda old, new: (old - new) / np.float32(0.3), start, host(state.params)
        )
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
