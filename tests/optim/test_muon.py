"""Muon's matrices against the singular value decomposition, and which leaves it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.core.pytree import named_leaves
from jtrain.optim import AdamW, Muon

SHAPES = [(16, 48), (128, 64)]


def direction(gradient: np.ndarray, **values) -> np.ndarray:
    """Return a matrix's first update at a rate of 1, uphill; size sqrt(max) x 1."""
    optimizer = Muon(lr=1.0, rms=1.0, weight_decay=0.0, momentum=0.0, **values).build(1)
    params = {"w": jnp.zeros(gradient.shape)}
    update = jax.jit(optimizer.update)
    updates, _ = update({"w": jnp.asarray(gradient)}, optimizer.init(params), params)
    return -np.asarray(updates["w"]) / max(gradient.shape[-2:]) ** 0.5


def decomposed(gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return singular values over the Frobenius norm, before and after."""
    left, s, right = np.linalg.svd(gradient.astype(np.float64), full_matrices=False)
    turned = left.T @ direction(gradient) @ right.T
    size = np.abs(turned - np.diag(np.diag(turned))).max()
    assert size < 2e-5, "singular vectors stay as they were"
    return s / np.linalg.norm(s), np.diag(turned)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spread", [0, 2], ids=["as drawn", "over four decades"])
def test_singular_values_are_brought_near_to_one(shape: tuple[int, int], spread: int):
    draw = np.random.default_rng(sum(shape))
    gradient = draw.normal(size=shape)
    if spread:
        left, s, right = np.linalg.svd(gradient, full_matrices=False)
        gradient = (left * np.logspace(-spread, spread, len(s))) @ right
    before, after = decomposed(gradient.astype(np.float32))
    large = before > 0.01
    assert large.any()
    assert spread == 0 or (~large).any(), "both kinds are tried"
    assert after[large].min() >= 0.68
    assert after[large].max() <= 1.14
    # The others are still on their way: the polynomial's slope at zero is 3.4445 an iteration.
    assert after[~large].max(initial=0) <= 1.21
    np.testing.assert_array_less(after[before < 1e-4], 3.4445**5 * before[before < 1e-4] * 1.01)


@pytest.mark.thorough
def test_a_stack_is_each_of_its_matrices_alone():
    gradient = np.random.default_rng(0).normal(size=(1, 2, 8, 4)).astype(np.float32)
    whole = direction(gradient, stacks=("w",))
    for i in np.ndindex(1, 2):
        assert_close(whole[i], direction(gradient[i]), 1e-5)


@pytest.mark.thorough
def test_scale_of_the_gradient_and_of_the_matrix_do_not_matter():
    gradient = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    assert_close(direction(1e3 * gradient), direction(gradient), 1e-5)
    big = np.random.default_rng(0).normal(size=(128, 32)).astype(np.float32)
    for one in (gradient, big):
        size = np.sqrt(np.mean(np.square(direction(one)))) * max(one.shape) ** 0.5
        assert 0.68 <= size <= 1.14, "the root mean square that `rms` is multiplied by"


PARAMS = {
    "tokens": jnp.ones((5, 4)),
    "blocks": {"0": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}},
    "conv": {"kernel": jnp.ones((3, 3, 2, 2))},
    "head": jnp.ones((5, 4)),
}
OTHERS = {"tokens", "head", "blocks/0/bias", "conv/kernel"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("values", "adam"),
    [
        ({}, OTHERS),
        ({"adamw": []}, OTHERS - {"head", "tokens"}),
        ({"stacks": ["conv/*"]}, OTHERS - {"conv/kernel"}),
    ],
)
def test_what_is_no_matrix_inside_takes_the_steps_of_adamw(values, adam: set[str]):
    draw = np.random.default_rng(0)
    gradient = jax.tree.map(lambda p: jnp.float32(draw.normal(size=p.shape)), PARAMS)
    groups = tuple(values.get("groups", ()))

    def first(optimizer):
        update = jax.jit(optimizer.update)
        return named_leaves(update(gradient, optimizer.init(PARAMS), PARAMS)[0])

    mine = Muon(lr=0.1, **values).build(3)
    found, wanted = first(mine), first(AdamW(lr=0.1, groups=groups).build(3))
    same = {name for name in found if np.abs(found[name] - wanted[name]).max() < 1e-6}
    frozen = {name for name in found if not np.any(found[name])}
    assert same - frozen == adam
    state = named_leaves(mine.init(PARAMS))
    squares = {name.partition("nu/")[2] for name in state if "/nu/" in name}
    assert squares == adam, "only these have Adam's second moment"
