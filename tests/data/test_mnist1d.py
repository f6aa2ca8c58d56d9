"""MNIST-1D: the numbers of its package."""

import sys
import types

import numpy as np
import pytest
from comparison import assert_close

from jtrain.data.images.mnist1d import MNIST1D


def test_the_curves_equal_those_of_the_package():
    train, test = MNIST1D().build()
    curves, labels = train.arrays["curve"], train.arrays["label"]
    assert curves.shape == (4000, 40)
    assert curves.dtype == np.float32
    assert len(test) == 1000
    # From mnist1d 0.0.2.post1: make_dataset(get_dataset_args()).
    first = [
        [-0.33200567, -0.47191037, -0.77869708, -1.00974083],
        [1.96548088, 2.30021254, 2.21339278, 1.98917376],
    ]
    assert_close(curves[:2, :4], first, 1e-6)
    last = [0.65987565, 0.87773435, 1.19315184]
    assert_close(test.arrays["curve"][-1, -3:], last, 1e-6)
    assert labels[:10].tolist() == [2, 6, 4, 5, 6, 6, 6, 0, 3, 1]


def test_fewer_rows_have_as_many_of_each_digit():
    train, test = MNIST1D(rows=50).build()
    assert (len(train), len(test)) == (40, 10)
    labels = np.concatenate([train.arrays["label"], test.arrays["label"]])
    assert np.bincount(labels).tolist() == [5] * 10
    both = np.concatenate([train.arrays["curve"], test.arrays["curve"]])
    assert abs(both.mean()) < 1e-6
    assert both.std() == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_every_number_is_the_packages(monkeypatch: pytest.MonkeyPatch):
    for name in (
        "requests",
        "matplotlib",
        "matplotlib.pyplot",
    ):  # imported by the package, and not used here
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    published = pytest.importorskip("mnist1d.data")
    wanted = published.make_dataset(published.get_dataset_args())
    train, test = MNIST1D().build()
    for part, suffix in ((train, ""), (test, "_test")):
        assert (part.arrays["label"] == wanted["y" + suffix]).all()
        assert_close(part.arrays["curve"], wanted["x" + suffix], 1e-6)
