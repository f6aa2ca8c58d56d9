"""Gather and reduce, against numpy."""

import jax.numpy as jnp
import numpy as np
from layouts import strategy

from jtrain.parallel.custom_loop import gather, reduce


def placed(**arrays: np.ndarray):
    return strategy("fsdp", 8).place({name: np.asarray(array) for name, array in arrays.items()})


def test_rows_come_back_in_the_order_of_the_data_without_padding():
    batch = placed(x=np.arange(32.0).reshape(16, 2), row=np.arange(16), mask=np.arange(16) < 13)
    got = gather({"x": batch["x"], "row": batch["row"]}, batch["mask"])
    assert isinstance(got["x"], np.ndarray)
    np.testing.assert_array_equal(got["row"], np.arange(13))
    np.testing.assert_array_equal(got["x"], np.arange(26.0).reshape(13, 2))
    assert len(gather(batch["x"])) == 16


def test_four_rows_and_two_weigh_a_sixth_each():
    """Test the case of TensorFlow's guide: 4 rows on one device, 2 on another."""
    values = np.array([1, 2, 3, 4, 5, 6, 0, 0], np.float32)
    batch = strategy("mirrored jit", 2).place({"v": values, "mask": np.arange(8) < 6})
    assert reduce("mean", batch["v"], batch["mask"]) == 3.5
    assert reduce("sum", batch["v"], batch["mask"]) == 21
    assert reduce("mean", batch["v"]) == 21 / 8
    assert reduce("mean", jnp.stack([batch["v"], -batch["v"]], 1), batch["mask"]) == 0


def test_counts_are_added_up_to_the_last_one():
    counts = np.array([2**24, 1, 1, 1, 2**30, 2**30, 2**30, 7], np.int32)
    batch = placed(n=counts, mask=np.arange(8) < 7)
    assert reduce("sum", batch["n"], batch["mask"]) == 2**24 + 3 + 3 * 2**30
    assert reduce("mean", batch["n"]) == counts.mean(dtype=np.float64)
    assert np.isnan(reduce("mean", batch["n"], jnp.zeros(8, bool)))


def test_what_the_mask_hides_may_be_anything():
    values = np.where(np.arange(16) < 3, 2.0, np.nan).astype(np.float32)
    batch = placed(v=values, mask=np.arange(16) < 3)
    assert reduce("mean", batch["v"], batch["mask"]) == 2
