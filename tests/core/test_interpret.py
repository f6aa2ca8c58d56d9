"""What an output is computed from, and which operations a program holds."""

import jax
import jax.numpy as jnp
import pytest

from jtrain.core.interpret import (
    DifferentProgramsError,
    executions,
    pair_equations,
)
from jtrain.core.loss_checks import dependence


def carried(x, y):
    """The second carry is the first of the round before: x once, then y."""
    return jax.lax.scan(lambda c, _: ((y * 2, c[0] * 2), None), (x, x), None, length=3)[0]


@jax.custom_vjp
def custom(x, y):
    return x * 2, y


custom.defvjp(lambda x, y: (custom(x, y), None), lambda _, up: up)
ONE = jnp.float32(1)
PROGRAMS = {
    "each its own": (lambda x, y: (x + 1, y * 2), [{0}, {1}]),
    "a constant": (lambda x, y: (jnp.float32(3), x * y), [set(), {0, 1}]),
    "stop_gradient": (lambda x, y: (jax.lax.stop_gradient(x), y), [{0}, {1}]),
    "jit": (lambda x, y: jax.jit(lambda a, b: (b, a))(x, y), [{1}, {0}]),
    "remat": (lambda x, y: jax.checkpoint(lambda a, b: (a * 2, jnp.sin(b)))(x, y), [{0}, {1}]),
    "custom_vjp": (custom, [{0}, {1}]),
    "scan": (carried, [{1}, {0, 1}]),
    "scan over rows": (
        lambda x, y: jax.lax.scan(lambda c, r: (c + x, (r, c)), y, jnp.ones((3, 2)) * x),
        [{0, 1}, {0}, {0, 1}],
    ),
    "cond": (
        lambda x, y: jax.lax.cond(x > 0, lambda a, b: (a + 1, b), lambda a, b: (a, b + 1), x, y),
        [{0}, {0, 1}],
    ),
    "cond takes any branch": (
        lambda x, y: jax.lax.cond(True, lambda a, b: a, lambda a, b: b, x, y),
        [{0, 1}],
    ),
    "while": (
        lambda x, y: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (x, y)),
        [{0}, {0, 1}],
    ),
}


@pytest.mark.parametrize(("program", "wanted"), PROGRAMS.values(), ids=PROGRAMS.keys())
def test_names_what_an_output_is_computed_from(program, wanted):
    assert dependence(program, ONE, ONE) == wanted


def test_of_a_cond_the_most_expensive_branch_may_be_counted_alone():
    fn = lambda x: jax.lax.cond(x > 0, lambda x: jnp.sin(jnp.sin(x)), jnp.cos, x)
    names = lambda **cost: {
        e.equation.primitive.name for e in executions(jax.make_jaxpr(fn)(ONE), **cost)
    }
    assert {"sin", "cos"} <= names()
    assert "cos" not in names(cost=lambda equation: float(equation.primitive.name == "sin"))


def test_two_traces_of_one_program_are_paired_and_of_two_are_refused():
    trace = lambda fn, rows: jax.make_jaxpr(jax.jit(fn))(jnp.ones(rows))
    pairs = list(pair_equations(trace(jnp.sin, 4), trace(jnp.sin, 8)))
    assert [a.primitive.name for _, a, _ in pairs][-1] == "sin"
    assert [len(calls) for calls, _, _ in pairs] == list(range(len(pairs)))
    with pytest.raises(DifferentProgramsError):
        list(pair_equations(trace(jnp.sin, 4), trace(jnp.cos, 4)))
