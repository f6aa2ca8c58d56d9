"""Custom training loops: a function on each device, gather and reduce, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from layouts import strategy

from jtrain.errors import ShardingError
from jtrain.parallel import Axes, Single
from jtrain.parallel.custom_loop import gather, reduce, run_per_device


def placed(**arrays: np.ndarray):
    return strategy("fsdp", 8).place({name: np.asarray(array) for name, array in arrays.items()})


def test_rows_come_back_in_the_order_of_the_data_without_padding():
    batch = placed(x=np.arange(32.0).reshape(16, 2), row=np.arange(16), mask=np.arange(16) < 13)
    got = gather({"x": batch["x"], "row": batch["row"]}, batch["mask"])
    assert isinstance(got["x"], np.ndarray)
    np.testing.assert_array_equal(got["row"], np.arange(13))
    np.testing.assert_array_equal(got["x"], np.arange(26.0).reshape(13, 2))
    assert len(gather(batch["x"])) == 16


@pytest.mark.thorough
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


X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(3, 2)).astype(np.float32)
MESH = strategy("mirrored jit", 8).mesh
ROWS, SAME = jax.P(MESH.axis_names), jax.P()
psum = lambda x: jax.lax.psum(x, MESH.axis_names)


def test_a_function_sees_a_devices_rows_and_may_sum_over_all():
    axes = MESH.axis_names

    def fn(x):  # 2 rows of 16
        assert x.shape == (2, 3)
        return x + jax.lax.axis_index(axes), psum(x.sum(0))[None]

    x = np.ones((16, 3), np.float32)
    got, total = run_per_device(fn, MESH)(x)
    np.testing.assert_array_equal(got[:, 0], 1 + np.repeat(np.arange(8), 2))
    np.testing.assert_array_equal(total, np.full((8, 3), 16))


def test_a_replicated_result_is_the_one_that_all_devices_came_to():
    def fn(params, batch):
        y = batch["x"] @ params["w"]
        return y, {"total": psum(y.sum()), "rows": psum(len(y))}

    copies = run_per_device(fn, MESH, in_specs=(SAME, ROWS), out_specs=(ROWS, SAME))
    y, sums = copies({"w": W}, {"x": X})
    assert_close(y, X @ W, 1e-5)
    # Off by less than a rounding of float32 of all numbers for each of the 32.
    assert_close(sums["total"], (X @ W).sum(), 32 * 6e-8, terms=np.abs(X @ W).sum())
    assert sums["rows"] == 16
    assert sums["total"].shape == ()


def test_a_gradient_is_of_the_devices_own_rows_until_it_is_summed():
    def loss(w, x):
        return ((x @ w) ** 2).sum()

    def fn(w, x):
        own = jax.grad(loss)(w, x)
        return own[None], psum(own)

    own, whole = run_per_device(fn, MESH, in_specs=(SAME, ROWS), out_specs=(ROWS, SAME))(W, X)
    want = [2 * part.T @ (part @ W) for part in np.split(X, 8)]
    assert_close(own, want, 1e-5)
    assert_close(whole, sum(want), 1e-5, terms=want)


def test_an_argument_may_be_split_over_some_of_the_axes():
    mesh = Axes(devices=8, data=4, fsdp=1, tensor=2).build().mesh
    fn = lambda w, x: jax.lax.psum(x @ w, "tensor")  # each has a part of the products' sums
    specs = (jax.P("tensor"), jax.P("data", "tensor"))
    w, x = np.ones((4, 2), np.float32), np.arange(32, dtype=np.float32).reshape(8, 4)
    got = run_per_device(fn, mesh, in_specs=specs, out_specs=jax.P("data"))(w, x)
    np.testing.assert_array_equal(got, x @ w)
    with pytest.raises(ShardingError, match=r"the result equal on all devices, and it diff"):
        run_per_device(lambda w, x: x @ w, mesh, in_specs=specs, out_specs=jax.P("data"))(w, x)


def test_one_device_is_a_mesh_too():
    mesh = Single(devices=[3]).build().mesh
    got = run_per_device(lambda w, x: jax.lax.psum(x @ w, mesh.axis_names), mesh, SAME, SAME)(W, X)
    assert_close(got, X @ W, 1e-5)
    assert got.sharding.device_set == {jax.devices()[3]}


@pytest.mark.parametrize(
    "differs",
    [
        lambda x: x.sum(),
        lambda x: jnp.where(jax.lax.axis_index(MESH.axis_names) == 5, jnp.nan, 1.0),
        lambda x: jnp.where(jax.lax.axis_index(MESH.axis_names) == 7, -0.0, 0.0),
        lambda x: jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(MESH.axis_names)),
    ],
    ids=["a sum", "one NaN", "a sign", "a key"],
)
def test_a_result_that_is_not_the_same_on_all_devices_is_refused(differs):
    said = r"^out_specs declares result same equal on all devices, and it differs .*psum\(x"
    with pytest.raises(ShardingError, match=said):
        run_per_device(
            lambda x: {"own": x, "same": differs(x)}, MESH, ROWS, {"own": ROWS, "same": SAME}
        )(X)


def test_nans_that_all_devices_came_to_are_the_same():
    got = run_per_device(lambda x: jnp.log(psum(x) * 0 - 1), MESH, ROWS, SAME)(X)
    assert np.isnan(got).all()


@pytest.mark.parametrize(
    ("specs", "args", "said"),
    [
        ((), (X[:13],), r"13 rows of argument 0 do not divide into 8 devices .*Nearest: 8 or 16"),
        ((), (X, np.float32(2)), r"argument 1 splits its dim 0, and it has none: it is a single"),
        (((ROWS, SAME),), (X, W, X), r"in_specs has the structure .* one spec for all, or one for"),
        ((jax.P("model"),), (X,), r"in_specs names the axis 'model', and the mesh has data"),
        (("data",), (X,), r"in_specs holds 'data', which is not a spec\. Write jax\.P\(\)"),
    ],
)
def test_specs_that_do_not_fit_say_what_to_write(specs, args, said):
    with pytest.raises(ShardingError, match=said):
        run_per_device(lambda x, *rest: x, MESH, *specs)(*args)
