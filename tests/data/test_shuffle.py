import itertools

import numpy as np
import pytest

from jtrain.data.batches.shuffle import permute

GOLDEN_10 = [3, 5, 6, 2, 4, 0, 7, 9, 8, 1]
GOLDEN_LARGE = [274860752950, 924774190002, 429075405545, 958695470582, 200993238311, 228648995806]


def order(rows: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(rows), rows, seed=seed, epoch=epoch)


def sigmas(counts: np.ndarray, freedom: int) -> float:
    """Return the standard deviations of a chi-square of equal expectations above its mean."""
    expected = counts.mean()
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def test_is_a_permutation():
    pairs = [(0, 0), (0, 1), (-3, 0), (2**70, 10**9)]
    for rows, (seed, epoch) in itertools.product((1, 2, 5, 64, 65, 4097), pairs):
        np.testing.assert_array_equal(np.sort(order(rows, seed=seed, epoch=epoch)), np.arange(rows))


def test_stays_the_same_on_any_machine_and_with_any_numpy():
    assert order(10).tolist() == GOLDEN_10
    places = np.array([0, 1, 2, 3, 4_000_000_000, 999_999_999_999])
    assert permute(places, 10**12, seed=42, epoch=7).tolist() == GOLDEN_LARGE


def test_places_of_many_epochs_have_the_rows_of_each_epoch():
    rng = np.random.default_rng(0)
    for rows in (1, 6, 97, 1438):
        places, epochs = rng.integers(0, rows, (2, 40)), rng.integers(0, 10**9, (2, 40))
        found = permute(places, rows, seed=3, epoch=epochs)
        for index, place in np.ndenumerate(places):
            assert found[index] == order(rows, seed=3, epoch=int(epochs[index]))[place]


@pytest.mark.thorough
def test_every_order_of_four_rows_is_equally_likely():
    orders = {p: 0 for p in itertools.permutations(range(4))}
    for epoch in range(2400):
        orders[tuple(order(4, epoch=epoch).tolist())] += 1
    assert sigmas(np.array(list(orders.values())), 23) < 4


@pytest.mark.thorough
def test_every_row_is_equally_likely_at_every_place():
    rows = 10
    counts = np.zeros((rows, rows))
    for epoch in range(2000):
        counts[np.arange(rows), order(rows, epoch=epoch)] += 1
    assert sigmas(counts, (rows - 1) ** 2) < 4
