"""Codecs and error feedback, against closed forms."""

import ml_dtypes
import numpy as np
import pytest
from comparison import assert_close, bitwise, distance

from jtrain.parallel.strategies.compression import (
    E3M0,
    BFloat16,
    Int4,
    Int8,
    TopK,
    Uncompressed,
    has_feedback,
)
from jtrain.server.shards.codec import make_codec
from jtrain.server.shards.feedback import PushEncoder
from jtrain.server.shards.partition import make_partition

DRAW = np.random.default_rng(0)
LOSSY = [BFloat16(), Int8(), Int4(), E3M0(), TopK(share=0.1)]


def leaves(scale=1.0):
    shapes = [(30, 7), (), (101,), (0, 4)]
    return [(scale * DRAW.normal(size=shape)).astype(np.float32) for shape in shapes]


def through(compress, found):
    codec = make_codec(compress)
    arrays = codec.encode(found)
    return codec.decode(arrays, found), sum(array.nbytes for array in arrays)


def test_none_is_what_it_was():
    found = leaves()
    read, size = through(Uncompressed(), found)
    assert bitwise(read, found)
    assert size == sum(leaf.nbytes for leaf in found)


@pytest.mark.parametrize("compress", LOSSY, ids=lambda each: each.kind)
def test_leaves_have_the_shapes_and_dtypes_that_they_had(compress):
    found = [*leaves(), leaves()[0].astype(ml_dtypes.bfloat16)]
    read, _ = through(compress, found)
    assert [(a.shape, a.dtype) for a in read] == [(a.shape, a.dtype) for a in found]


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


@pytest.mark.parametrize("compress", LOSSY, ids=lambda each: each.kind)
def test_zeros_nothing_and_what_is_not_finite(compress):
    zeros = [np.zeros((4, 4), np.float32)]
    assert bitwise(through(compress, zeros)[0], zeros)
    assert through(compress, [np.zeros((0, 3), np.float32)])[0][0].shape == (0, 3)
    for bad in (np.nan, np.inf):
        (read,), _ = through(compress, [np.float32([1, bad, 2])])
        assert not np.isfinite(read).all()


FEEDBACK = [each for each in LOSSY if has_feedback(each)]


@pytest.mark.parametrize("compress", FEEDBACK, ids=lambda each: each.kind)
@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_sent_and_what_is_left_are_all_that_was_pushed(compress, parts):
    """After n pushes their sum is that of what was sent and the residual, to float32's rounding."""
    params = {"a": np.zeros((40, 5), np.float32), "b": np.zeros((), np.float32)}
    partition = make_partition(params, parts)
    encoder = PushEncoder(make_codec(compress), partition, keeps=True)
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
    again = PushEncoder(make_codec(compress), partition, keeps=True)
    again.load(residual)
    assert bitwise(again.residual(params), residual)
    again.load(())
    assert not any(leaf.any() for leaf in again.residual(params).values())


def test_feedback_sends_in_time_what_rounding_would_lose():
    """Of a constant 0.05 beside a 1, int4 rounds each to 0, and with feedback sends all in time."""
    grads = [np.float32([1, 0.05])]
    partition = make_partition({"w": grads[0]}, 1)
    totals = []
    for keeps in (False, True):
        encoder = PushEncoder(make_codec(Int4()), partition, keeps=keeps)
        total = 0.0
        for _ in range(60):
            push = encoder.encode(0, grads)
            encoder.keep(0, push)
            total += push.sent[0][1]
        totals.append(total)
    assert totals[0] == 0
    assert totals[1] == pytest.approx(60 * 0.05, abs=1 / 7)


def test_without_feedback_nothing_is_kept():
    encoder = PushEncoder(make_codec(Int8()), make_partition({"w": np.ones(3)}, 1), keeps=False)
    encoder.keep(0, encoder.encode(0, leaves()[:1]))
    assert encoder.residual({"w": np.ones(3)}) == ()
    assert not has_feedback(BFloat16())
    assert not has_feedback(Int8(feedback=False))
