"""The ends of the curves: where the plain formulas overflow or bend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.losses.cross_entropy import binary_cross_entropy, distillation
from jtrain.losses.squared_error import huber

ONE = jnp.ones(1, bool)


def test_sure_logits_neither_overflow_nor_vanish():
    row = lambda x: jnp.full((1, 1), x)
    of = jax.jit(lambda z, y: binary_cross_entropy(row(z), row(y), ONE)[0].total)
    assert of(1e4, True) == 0
    assert of(1e4, False) == of(-1e4, True) == 1e4
    assert_close(of(0.0, 0.25), np.log(2), 1e-6)
    slope = jax.jit(jax.grad(of))
    assert slope(1e4, 1.0) == 0
    assert slope(-1e4, 1.0) == -1


def test_the_straight_part_has_the_slope_of_delta():
    of = jax.jit(lambda z: huber(jnp.full((1, 1), z), jnp.zeros((1, 1)), ONE, delta=2.0)[0].total)
    slopes = [float(jax.jit(jax.grad(of))(z)) for z in (-9.0, -2.5, -1.0, 0.0, 1.5, 7.0)]
    assert slopes == [-2.0, -2.0, -1.0, 0.0, 1.5, 2.0]
    assert of(2.0) == 2.0  # both parts meet
    assert of(3.0) == 4.0


def test_a_delta_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"delta 0\.0 .*positive number, delta=1\.0"):
        huber(jnp.ones((1, 1)), jnp.ones((1, 1)), ONE, delta=0.0)
    huber(jnp.ones((1, 1)), jnp.ones((1, 1)), ONE, delta=1.0)


def test_a_student_of_other_classes_or_no_temperature_is_refused():
    two, three = jnp.ones((1, 2)), jnp.ones((1, 3))
    with pytest.raises(ValueError, match=r"2 classes and the teacher's logits 3"):
        distillation(two, three, ONE)
    with pytest.raises(ValueError, match=r"temperature 0\.0 .*temperature=1\.0"):
        distillation(two, two, ONE, temperature=0.0)
    value, metrics = distillation(two, two, ONE, temperature=1.0)
    assert value.total == 0
    assert metrics["agreement"].total == 1


def test_a_teacher_learns_nothing():
    z = jnp.array([[1.0, 2.0, -1.0]])
    grad = jax.grad(lambda t: distillation(z, t, ONE)[0].total)(z[:, ::-1])
    assert not grad.any()
