"""A loss with layout-dependent draws is reported, and everything else in it is compared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults_of_draws import by_first_row, mixed_up, one_by_first_row, scaled
from faults_of_losses import dropout, foreign_dropout
from line import line, points

import jtrain as jt
from jtrain.parallel import Mirrored

# One program for the whole batch, and one copy of the program for each part.
STRATEGIES = {
    "one program": Mirrored(devices=2),
    "copies": Mirrored(devices=2, impl="shard_map"),
}


def check(loss, **more):
    return jt.testing.assert_invariant(loss, line(), points(8), strategies=STRATEGIES, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        foreign_dropout,
        pytest.param(scaled(by_first_row), marks=pytest.mark.slow),
        pytest.param(scaled(one_by_first_row), marks=pytest.mark.slow),
    ],
)
def test_it_fails_and_the_last_line_has_the_size_of_the_effect(loss):
    with pytest.raises(AssertionError) as error:
        check(loss)
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
    report = check(foreign_dropout, draws=False)
    assert {row.verdict for row in report.rows} <= {"ok", "rounding"}
    assert "all draws are fixed" in report.describe()
    assert report.describe().splitlines()[-1].startswith("one result")


@pytest.mark.thorough
def test_draws_by_row_key_do_not_depend_on_the_layout():
    report = check(dropout)
    assert report.causes == []
    assert report.plain()["ok"]


@pytest.mark.thorough
def test_mixup_of_an_unsplit_batch_does_not_depend_on_the_layout():
    report = check(mixed_up, couples="batch")
    assert report.ok, report.describe()
    assert [row.check for row in report.rows][-2:] == ["state given up", "one program"]
    assert "copies was not compared" in report.describe()
    assert "Random draws were not compared where a mask hides rows" in report.describe()


@pytest.mark.thorough
def test_a_draw_of_all_rows_by_another_generator_is_named():
    def loss(params, batch, rng):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, batch["row"])
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
        return jt.Mean.of(jnp.square(noise @ params["w"]), batch["mask"])

    with (
        jax.default_prng_impl("rbg"),
        pytest.raises(
            AssertionError, match=r"key<rbg> draws for all rows from the first key.*row_"
        ),
    ):
        jt.testing.assert_invariant(
            loss, {"w": jnp.ones(3)}, {"x": np.zeros((8, 1), np.float32)}, strategies={}
        )
