"""Experts that are balanced by biases: against loops over tokens, in training and in sampling."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, bitwise

import jtrain as jt
from jtrain.core.loss import update_extra
from jtrain.losses.balance import bias_update, expert_choices, max_violation
from jtrain.models.transformer import BIAS, Transformer

pytestmark = pytest.mark.usefixtures("strict_dtypes")
ROWS, LAYERS, TIME, EXPERTS, TOP_K = 4, 2, 6, 5, 2
DRAW = np.random.default_rng(0)
SCORES = DRAW.uniform(size=(ROWS, LAYERS, TIME, EXPERTS)).astype(np.float32)
REAL = np.arange(TIME) < np.array([6, 4, 0, 1])[:, None]
SMALL = {"vocab": 11, "context": 8, "layers": 2, "heads": 2, "width": 16, "bias": False}
HOW = {"kind": "dropless", "count": 4, "weights": "sigmoid", "bias_update_rate": 1e-2}


def loads() -> np.ndarray:
    found = np.zeros((LAYERS, EXPERTS))
    for row, layer, token in np.ndindex(ROWS, LAYERS, TIME):
        if REAL[row, token]:
            found[layer, np.argsort(-SCORES[row, layer, token])[:TOP_K]] += 1
    return found


def test_a_bias_moves_towards_the_mean_load_of_the_whole_batch_once():
    scores = jnp.asarray(np.where(REAL[:, None, :, None], SCORES, np.nan), jnp.float32)
    real, bias = jnp.asarray(REAL), np.full((LAYERS, EXPERTS), 0.25, np.float32)
    change = jax.jit(lambda x, real: bias_update(expert_choices(x, real, TOP_K), real, 0.125))
    move = lambda update: update_extra({"b": jnp.asarray(bias)}, {"b": update})["b"]
    halves = jax.tree.map(jnp.add, change(scores[:2], real[:2]), change(scores[2:], real[2:]))
    load = loads()
    wanted = bias + np.float32(0.125) * np.sign(load.mean(1, keepdims=True) - load, dtype="f")
    for update in (change(scores, real), halves):
        np.testing.assert_array_equal(update.total, load)
        assert bitwise(move(update), wanted)
        assert_close(max_violation(update).value(), np.mean(load.max(1) / load.mean(1) - 1), 1e-6)
    assert bitwise(move(change(scores, jnp.zeros_like(real))), bias), "no token, no change"


@functools.cache
def built(scan: bool = False):
    """Return a model whose routers have favourites, and the initial biases."""
    model = Transformer(**SMALL, scan=scan, experts=HOW).build()
    params, extra = jax.jit(model.init)(jax.random.key(0))
    shared = jnp.asarray(0.02 * DRAW.standard_normal((1, 16)), jnp.float32)
    params = {**params, "tokens": params["tokens"] + shared}
    scale = lambda path, leaf: 10 * leaf if "router" in jax.tree_util.keystr(path) else leaf
    return model, jax.tree_util.tree_map_with_path(scale, params), extra


BATCH = {
    "tokens": jnp.asarray(DRAW.integers(0, 11, (8, 9)), jnp.int32),
    "row": jnp.arange(8, dtype=jnp.int32),
    "mask": jnp.arange(8) < 7,
}


@pytest.mark.thorough
def test_biases_even_out_the_loads_of_a_skewed_router():
    model, params, extra = built()
    rule, loss = optax.sgd(1e-2), jt.language_model(model)
    step = jax.jit(jt.make_step(loss, rule, microbatches=2, ragged=True))

    @jax.jit
    def load(params, extra):
        return loss.loss(params, extra, BATCH, None)[2][BIAS]

    violation = lambda *weights: max_violation(load(*weights)).value()
    with jax.numpy_dtype_promotion("standard"):  # optax promotes by itself
        state = jt.new_state(params, rule, jax.random.key(0), extra)
        for _ in range(30):
            state, _ = step(state, BATCH)
        assert violation(params, extra) > 0.4
        assert violation(state.params, state.extra) < 0.15
        assert violation(state.params, extra) > 0.4, "it is the biases that do it"


@pytest.mark.thorough
def test_a_bias_chooses_experts_and_does_not_weigh_them():
    model, params, extra = built()
    run = jax.jit(lambda extra: model.apply(params, extra, BATCH["tokens"][:, :-1])[0])
    plain = run(extra)
    shifted = run({BIAS: extra[BIAS] + 0.5})
    assert bitwise(plain, shifted), "the same choices"
    assert not bitwise(plain, run({BIAS: extra[BIAS].at[:, 1].set(0.5)}))


@pytest.mark.thorough
@pytest.mark.parametrize("scan", [False, True])
def test_a_text_written_token_by_token_goes_through_the_same_experts(scan: bool):
    model, params, extra = built(scan)
    tokens, biases = (
        BATCH["tokens"][:, :8],
        {BIAS: jnp.asarray(DRAW.normal(size=(2, 4)), jnp.float32)},
    )
    whole = jax.jit(lambda extra: model.apply(params, extra, tokens)[0])

    @jax.jit
    def written(params):
        _, cache = model.extend(params, model.empty(params, 8), tokens[:, :7], 0)
        return model.extend(params, cache, tokens[:, 7:], 7)[0]

    assert np.abs(whole(biases) - whole(extra))[:, -1].max() > 1e-3
    assert_close(written(model.with_bias(params, biases)), whole(biases)[:, -1], 2e-5)
    with pytest.raises(ValueError, match=f"carries {BIAS} beside its parameters"):
        written(params)
