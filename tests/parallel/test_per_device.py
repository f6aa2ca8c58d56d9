"""A function on each device, of split and of replicated arrays, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from layouts import strategy

from jtrain.errors import ShardingError
from jtrain.parallel import Axes, Single
from jtrain.parallel.custom_loop import run_per_device

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


def test_a_replicated_argument_is_whole_on_every_device():
    def fn(w, x):
        assert (w.shape, x.shape) == ((3, 2), (2, 3))
        return x @ w

    got = run_per_device(fn, MESH, in_specs=(SAME, ROWS))(W, X)
    assert_close(got, X @ W, 1e-5)


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
        lambda x: jax.lax.axis_index(MESH.axis_names) == 2,
        lambda x: x.sum().astype(jnp.bfloat16),
        lambda x: x.sum() * 1j,
        lambda x: jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(MESH.axis_names)),
    ],
    ids=["a sum", "one NaN", "a sign", "a bool", "bfloat16", "complex", "a key"],
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


def test_a_result_is_not_compared_where_the_caller_says_so():
    fn = lambda x: jax.lax.axis_index(MESH.axis_names)
    assert run_per_device(fn, MESH, ROWS, SAME, check=False)(X) == 0


def test_other_shapes_and_results_may_follow():
    copies = run_per_device(lambda x: {f"of {x.ndim}": psum(x.sum())}, MESH, ROWS, SAME)
    for x in (X, X[:, 0], X):
        assert copies(x).keys() == {f"of {x.ndim}"}


@pytest.mark.parametrize(
    ("specs", "args", "said"),
    [
        ((), (X[:13],), r"13 rows of argument 0 do not divide into 8 devices .*Nearest: 8 or 16"),
        (
            (),
            (X[:3],),
            r"3 rows of argument 0 .*Nearest: 8; pad the argument, .* mask .*jax\.P\(\) in in_s",
        ),
        ((), (X, np.float32(2)), r"argument 1 splits its dim 0, and it has none: it is a single"),
        (((ROWS, SAME),), (X, W, X), r"in_specs has the structure .* one spec for all, or one for"),
        ((jax.P("model"),), (X,), r"in_specs names the axis 'model', and the mesh has data"),
        (("data",), (X,), r"in_specs holds 'data', which is no spec\. Write jax\.P\(\)"),
        ((jax.P(None, "data"),), (X,), r"3 elements of dim 1 of argument 0 do not divide into 8"),
        ((ROWS, {"y": ROWS}), (X,), r"out_specs has the structure .*\['y'\]|out_specs has the str"),
        (
            (ROWS, jax.P(None, None, "data")),
            (X,),
            r"the result splits its dim 2, and it has 2 dims",
        ),
    ],
)
def test_specs_that_do_not_fit_say_what_to_write(specs, args, said):
    with pytest.raises(ShardingError, match=said):
        run_per_device(lambda x, *rest: x, MESH, *specs)(*args)
