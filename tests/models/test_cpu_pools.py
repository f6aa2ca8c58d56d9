"""Max pools of other libraries' modules on a CPU."""

import inspect

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import distance
from jax.core import Tracer

from jtrain.models.adapters.cpu_pools import fast_pools
from jtrain.models.adapters.libraries import from_equinox

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 9, 12, 6)), jnp.float32)


def _compare(function, *args, tolerance: float = 0.0) -> tuple[str, str]:
    """Compare values and gradients of a function, and return both programs."""

    def loss(function, *args):
        y = function(*args)
        weights = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
        return (jnp.sin(y) * weights).sum(), y

    both = [
        jax.jit(jax.grad(lambda *args, f=f: loss(f, *args), range(len(args)), has_aux=True))
        for f in (function, fast_pools(function))
    ]
    want, got = (jax.tree.leaves(one(*args)) for one in both)
    for a, b in zip(want, got, strict=True):
        assert distance(b, a) <= tolerance
    before, after = (one.lower(*args).as_text() for one in both)
    return before, after


@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [
        ((2, 2), (2, 2), "VALID"),  # one row is cut off
        ((2, 2), (2, 2), "SAME"),
        ((3, 3), (2, 2), ((1, 1), (1, 1))),
        ((3, 3), (1, 1), "SAME"),
        ((2, 3), (3, 2), "VALID"),
        ((3, 2), (2, 1), ((2, 0), (0, 1))),
    ],
)
@pytest.mark.parametrize("ties", [False, True])
def test_a_max_pool_and_its_gradient_are_those_of_flax(window, strides, padding, ties: bool):
    x = jnp.round(X) if ties else X  # equal maxima: the first has the gradient
    pool = lambda x: nn.max_pool(x, window, strides=strides, padding=padding)
    # The same bits, but for numbers in several windows: their gradient is a sum of at most 9.
    overlap = any(np.greater(window, strides))
    before, after = _compare(pool, x, tolerance=1e-6 if overlap else 0)
    assert "select_and_scatter" in before
    assert "select_and_scatter" not in after
    assert "reduce_window" not in after


def test_a_program_for_a_gpu_has_the_operations_as_they_were():
    pool = fast_pools(lambda x: nn.max_pool(x, (2, 2), strides=(2, 2)))
    traced = jax.jit(jax.grad(lambda x: pool(x).sum())).trace(X)
    texts = [traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")]
    assert ["select_and_scatter" in text for text in texts] == [False, True]


class _Net(eqx.Module):
    conv: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d

    def __init__(self, key: jax.Array):
        self.conv, self.pool = eqx.nn.Conv2d(9, 4, 3, key=key), eqx.nn.MaxPool2d(2, 2)

    def __call__(self, x):
        return self.pool(jax.nn.relu(self.conv(x)))


@pytest.mark.thorough
def test_equinox_pools_the_same_over_channels_first():
    model = from_equinox(_Net)
    params, extra = model.init(jax.random.key(0))
    _, after = _compare(lambda p: inspect.unwrap(model.apply)(p, extra, X)[0], params)
    assert "select_and_scatter" not in after


def test_a_scan_and_a_checkpoint_around_a_pool_give_the_same():
    pool = jax.checkpoint(lambda x: nn.max_pool(x, (3, 3), padding="SAME"))
    scan = lambda x: jax.lax.scan(lambda x, _: (jnp.sin(pool(x)), None), x, length=3)[0]
    _, after = _compare(scan, X, tolerance=1e-5)  # sums of 9, three times
    assert "select_and_scatter" not in after


def test_outputs_that_are_no_arrays_and_concrete_calls_stay():
    seen = []

    def call(x, name):
        seen.append(isinstance(x, Tracer))
        return nn.max_pool(x, (2, 2)), name, None

    fast = fast_pools(call)
    assert fast(X, "a")[1:] == ("a", None)
    assert seen == [False]
    made = []
    jax.jit(lambda x: made.append(fast(x, "b")) or made[0][0])(X)
    assert made[0][1:] == ("b", None)
