"""The losses of a router, by the formulas of their papers written as loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.core.mean import Mean, Terms
from jtrain.losses.balance import balance, with_router

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("strict_dtypes")]
ROWS, LAYERS, TIME, EXPERTS = 4, 2, 6, 3
LOGITS = np.random.default_rng(0).standard_normal((ROWS, LAYERS, TIME, EXPERTS)).astype("float32")
REAL = np.arange(TIME) < np.array([6, 4, 0, 1])[:, None]


def uneven(tokens: np.ndarray, top_k: int) -> float:
    """Compute the balance of tokens n e at one layer."""
    shares, chances = np.zeros(EXPERTS), np.zeros(EXPERTS)
    for token in tokens.astype(np.float64):
        shares[np.argsort(-token)[:top_k]] += 1 / (top_k * len(tokens))
        chances += np.exp(token) / np.exp(token).sum() / len(tokens)
    return EXPERTS * float(shares @ chances)


def test_is_the_formula_in_each_row_layer_by_layer():
    total = 0.0
    for row in range(ROWS):
        if count := REAL[row].sum():
            layers = [uneven(LOGITS[row, i, :count], 2) for i in range(LAYERS)]
            total += count * np.mean(layers)
    found = balance(jnp.asarray(LOGITS), jnp.asarray(REAL), top_k=2)
    assert float(found.weight) == REAL.sum() == 11
    assert_close(found.value(), total / REAL.sum(), 1e-6)


def test_of_the_batch_is_the_formula_over_all_real_tokens():
    layers = [uneven(LOGITS[:, i][REAL], 2) for i in range(LAYERS)]
    found = balance(jnp.asarray(LOGITS), jnp.asarray(REAL), top_k=2, group="batch")
    assert_close(found.value(), np.mean(layers), 1e-6)
    rows = balance(jnp.asarray(LOGITS), jnp.asarray(REAL), top_k=2)
    assert abs(rows.value() - found.value()) > 1e-3, "rows that meet make no difference"


def test_the_gradient_of_the_batchs_is_that_of_the_formula_with_shares_held():
    took = jax.nn.one_hot(jax.lax.top_k(jnp.asarray(LOGITS), 2)[1], EXPERTS).sum(-2)
    seen = jnp.asarray(REAL, jnp.float32)[:, None, :, None]

    def plain(logits):
        shares = (took * seen).sum((0, 2)) / (2 * seen.sum())
        chances = (jax.nn.softmax(logits, -1) * seen).sum((0, 2)) / seen.sum()
        return (EXPERTS * shares * chances).sum(-1).mean()

    mean = lambda m: m.total / m.weight
    ours = lambda x: mean(balance(x, jnp.asarray(REAL), top_k=2, group="batch"))
    assert_close(jax.grad(ours)(LOGITS), jax.grad(plain)(LOGITS), 2e-6)


def test_both_are_terms_beside_the_loss():
    value = Mean(jnp.float32(6), jnp.float32(3))
    terms, metrics = with_router(
        value, jnp.asarray(LOGITS), jnp.asarray(REAL), top_k=2, group="row", uneven=0.1, z=0.01
    )
    assert isinstance(terms, Terms)
    assert terms.coefficients == (1.0, 0.1, 0.01)
    squares = np.log(np.exp(LOGITS).sum(-1)) ** 2
    expected = np.mean([squares[:, i][REAL].mean() for i in range(LAYERS)])
    assert_close(metrics["router_z"].value(), expected, 1e-6)
    assert metrics["balance"].value() == terms.means[1].value()
