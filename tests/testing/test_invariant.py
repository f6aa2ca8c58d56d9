"""Inputs of a check: accepted forms, draws by layout, errors, and float64 as the judge."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close
from faults_of_rows import by_first_row, scaled
from line import height, line, points, squared
from planted import dropout

import jtrain as jt
import jtrain.parallel
from jtrain.core.mean import Mean
from jtrain.errors import LossError
from jtrain.parallel import Mirrored
from jtrain.testing.case import build_case
from jtrain.testing.compare import distance
from jtrain.testing.float64 import to_float64, widen
from jtrain.testing.loss_checks import compare_loss
from jtrain.testing.run_step import list_layouts

SGD = {"optimizer": optax.sgd(0.1)}


def scalar(params, batch, rng):
    return jnp.square(height(params, batch) - batch["y"]).mean()


@pytest.mark.thorough
def test_a_plain_scalar_is_checked_without_masks():
    report = jt.testing.assert_invariant(scalar, line(), points(8), strategies={})
    assert "Masks, padding and ragged batches were not compared" in report.describe()
    assert "jt.Mean.of(values_by_row" in report.describe()
    checks = [row.check for row in report.rows]
    assert "first and second half" in checks
    assert "padded" not in checks


@pytest.mark.thorough
def test_batches_with_declared_coupling_are_not_split():
    centred = lambda p, b, rng: jt.Mean.of(
        jnp.square(height(p, b) - RealMean.of(height(p, b), b["mask"])), b["mask"]
    )
    strategies = {"named": Mirrored(devices=2), "copies": Mirrored(devices=2, impl="shard_map")}
    report = jt.testing.assert_invariant(
        centred, line(), points(8), rows_interact="batch", strategies=strategies
    )
    assert 'the rows interact, by rows_interact="batch"' in report.describe()
    assert "copies was not compared: it would cut the batch" in report.describe()
    assert report.rows[-1].check == "named"


class RealMean:
    """A mean over the rows that count."""

    @staticmethod
    def of(values, mask):
        return jnp.where(mask, values, 0).sum() / mask.sum()


def test_a_batch_without_unmasked_rows_raises():
    with pytest.raises(LossError, match="the mask hides all rows of the batch"):
        jt.testing.build_case(squared, line(), points(4, hidden=4), **SGD)


def test_parameters_without_a_gradient_raise():
    with pytest.raises(LossError, match=r"int32 values, which have no gradient.*`extra`"):
        jt.testing.build_case(squared, {**line(), "count": jnp.int32(3)}, points(4), **SGD)
    with pytest.raises(LossError, match="there are no parameters"):
        jt.testing.build_case(lambda p, b, rng: jt.Mean.of(b["y"], b["mask"]), {}, points(4), **SGD)


def test_an_odd_row_is_dropped_and_row_and_mask_are_added():
    x, y = (points(7)[name] for name in ("x", "y"))
    case = jt.testing.build_case(squared, line(), {"x": x, "y": y}, **SGD)
    assert case.rows == 6
    np.testing.assert_array_equal(case.batch["row"], np.arange(6))
    assert case.batch["mask"].all()


def test_default_strategies_divide_the_rows():
    assert list(list_layouts(8, {}, most=4)) == [
        "mirrored on 2",
        "mirrored on 4",
        "shard_map on 4",
        "pmap on 4",
        "zero 1 on 4",
        "zero 2 on 4",
        "fsdp on 4 (zero 3)",
    ]
    assert "shard_map on 2" in list_layouts(6, {})
    assert list_layouts(7, {}) == {}
    dims = {"blocks/up": ("layers", "width", "hidden"), "q": ("width", "heads", None)}
    along = [name for name in list_layouts(8, dims) if "data" in name]
    assert along == ["tensor 2, data 4", "stage 2, data 4", "context 2, data 4"]


def test_distances_are_relative_over_the_whole_tree():
    expected = {"a": np.array([3.0, 4.0]), "b": np.array([0.0])}
    actual = {"a": np.array([3.0, 4.0]), "b": np.array([0.5])}
    assert distance(actual, expected) == (pytest.approx(0.1), "b")
    assert distance(expected, expected).by == 0
    assert distance({"a": expected["a"]}, expected).by == float("inf")
    assert distance({**expected, "a": np.array([3.0, np.nan])}, expected).by == float("inf")
    assert distance({"n": np.int32(3)}, {"n": np.int32(4)}) == (float("inf"), "n")


# One program for the whole batch, and one copy of the program for each part.
STRATEGIES = {"one program": Mirrored(devices=2), "copies": Mirrored(devices=2, impl="shard_map")}


def check(loss, **more):
    return jt.testing.assert_invariant(loss, line(), points(8), strategies=STRATEGIES, **more)


@pytest.mark.slow
def test_a_draw_by_layout_fails_and_the_last_line_has_the_size_of_the_effect():
    with pytest.raises(AssertionError) as error:
        check(scaled(by_first_row))
    *_, last = str(error.value).splitlines()
    assert last.startswith("NOT one result: random draws depend on the layout in")
    assert "and move loss or gradient by up to" in last
    assert "--without-draws (draws=False)" in last
    assert "one draw for the batch" not in last
    lines = {line.split("  ")[0]: line for line in str(error.value).splitlines()}
    assert lines["one program"].endswith("ok")  # the same draws as on one device
    assert lines["copies"].endswith("named")
    assert lines["2 microbatches"].endswith("named")


@pytest.mark.thorough
def test_without_draws_everything_else_agrees():
    report = check(scaled(by_first_row), draws=False)
    assert {row.verdict for row in report.rows} <= {"ok", "rounding"}
    assert "all draws are fixed" in report.describe()
    assert report.describe().splitlines()[-1].startswith("one result")


@pytest.mark.thorough
def test_draws_by_row_key_do_not_depend_on_the_layout():
    report = check(dropout)
    assert report.causes == []
    assert report.plain()["ok"]


def in_double(fn, *args):
    with jax.enable_x64(True):
        return jax.device_get(jax.jit(widen(fn))(*to_float64(args)))


def test_draws_are_those_of_float32():
    key = jax.random.key(3)
    flips = lambda key: jax.random.bernoulli(key, 0.3, (100,))
    np.testing.assert_array_equal(in_double(flips, key), flips(key))
    normal = lambda key: jax.random.normal(key, (100,))
    drawn = in_double(normal, key)
    assert drawn.dtype == np.float64
    # In the tail float32 has three digits less.
    assert_close(drawn, normal(key), 1e-5)


def program(x, w, cast):
    """Return value and gradient of a program with loops, branches, a table and products."""

    def loss(w):
        rows = w[jnp.array([0, 2, 2])]
        y = jax.nn.softmax(cast(cast(x) @ rows.T))
        last, states = jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c), y[0], y)
        start = jax.lax.stop_gradient(states.max(0))
        y = jax.lax.while_loop(lambda c: c.sum() < 2, lambda c: c * 1.5, start) + last
        return jax.lax.cond(y[0] > 0, lambda: jnp.exp(y).sum(), lambda: y.sum())

    return jax.jit(jax.value_and_grad(jax.checkpoint(loss)))(w)


@pytest.mark.thorough
def test_casts_to_float32_do_not_round():
    draw = np.random.default_rng(0)
    x, w = (jnp.asarray(draw.normal(size=size), jnp.float32) for size in ((4, 3), (3, 3)))
    actual = in_double(lambda x, w: program(x, w, lambda y: y.astype(jnp.float32)), x, w)
    with jax.enable_x64(True):  # the same without the casts
        expected = jax.device_get(program(*to_float64((x, w)), lambda y: y))
    assert_close(actual[0], expected[0], 1e-14)
    assert_close(actual[1], expected[1], 1e-12)


def test_complex_numbers_are_computed_in_double():
    draw = np.random.default_rng(1)
    x = jnp.asarray(draw.normal(size=(4, 8)) + 1j * draw.normal(size=(4, 8)), jnp.complex64)
    power = lambda x: jnp.square(jnp.abs(jnp.fft.fft(x) @ x.T)).sum()
    expected = np.square(np.abs(np.fft.fft(np.complex128(x)) @ np.complex128(x).T)).sum()
    assert_close(in_double(power, x), expected, 1e-14)


def test_an_opaque_callback_raises():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    hidden = lambda x: jax.pure_callback(lambda x: x, shape, x)
    with pytest.raises(NotImplementedError, match="pure_callback"):
        in_double(hidden, jnp.ones(3))


@pytest.mark.thorough
def test_large_sums_that_cancel_are_named_and_no_fault():
    def cancelling(params, batch, rng):
        del rng
        each, mask = (batch["x"] @ params["w"])[:, 0] ** 2 + 1e6, batch["mask"]
        return Mean(jnp.sum(each * mask) - 1e6 * jnp.sum(mask), jnp.sum(mask))

    params = {"w": jnp.ones((4, 1))}
    batch = {"x": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)}
    case = build_case(cancelling, params, batch, optimizer=optax.sgd(0.1))
    rows = list(compare_loss(case))
    assert {row.verdict for row in rows} <= {"ok", "rounding", "named"}
    assert {row.cause for row in rows if row.verdict == "named"} == {"cancellation"}
