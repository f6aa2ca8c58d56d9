"""The mixture of experts against a plain loop over tokens and experts, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close, assert_leaves_close

from jtrain.core.placement import Unplaced
from jtrain.models.adapters.nnx import from_nnx
from jtrain.models.experts import Capacity, Dropless
from jtrain.models.layers.dropout import KeySequence
from jtrain.models.layers.feed_forward import MixtureOfExperts
from jtrain.models.networks.block import STD
from jtrain.models.transformer import Transformer

pytestmark = pytest.mark.usefixtures("strict_dtypes")
ROWS, TIME, WIDTH, HIDDEN, EXPERTS = 3, 12, 8, 16, 4
X = np.random.default_rng(0).standard_normal((ROWS, TIME, WIDTH)).astype(np.float32)
HOWS = {
    "dropless": Dropless(count=EXPERTS),
    "dropless, all weights": Dropless(count=EXPERTS, weights="all"),
    "capacity": Capacity(count=EXPERTS, factor=1.0),
    "capacity, one of them": Capacity(count=EXPERTS, top_k=1, weights="all", factor=1.0),
    "dropless, gelu": Dropless(count=EXPERTS, top_k=3),
}
DROPS = {"capacity", "capacity, one of them"}


@functools.cache
def made(name: str):
    """Make the layer as pure functions, and parameters far from their initial values."""
    activation = "gelu" if name.endswith("gelu") else "swiglu"
    config = Transformer(width=WIDTH, hidden=HIDDEN, activation=activation)
    stds = 30 * STD, 30 * STD
    model = from_nnx(
        lambda rngs: MixtureOfExperts(
            config, HOWS[name], Unplaced(), KeySequence(rngs.params.key[...]), stds
        )
    )
    params, _ = jax.jit(model.init)(jax.random.key(0))
    apply = lambda params, x, whole=True: model.apply(params, {}, x, whole)[0]
    return params, jax.jit(apply, static_argnums=2)


def wide(x):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), x)


def by_hand(how, params, x, *, whole=True):
    """Return the output b t d and the number of dropped choices, a token at a time."""
    params, x, out, dropped = wide(params), wide(x), np.zeros(x.shape), 0
    for row in range(len(x)):
        taken = np.zeros(how.count, int)
        for now, token in enumerate(x[row]):
            logits = token @ params["router"]
            best = np.argsort(-logits, kind="stable")[: how.top_k]
            over = logits[best] if how.weights == "chosen" else logits
            for expert in best:
                taken[expert] += 1
                if whole and how.kind == "capacity" and taken[expert] > how.places(len(x[row])):
                    dropped += 1
                    continue
                weight = np.exp(logits[expert]) / np.exp(over).sum()
                up = token @ params["up"][expert]
                if "gate" in params:
                    gate = token @ params["gate"][expert]
                    up = up * gate / (1 + np.exp(-gate))
                else:
                    up = up / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
                out[row, now] += weight * (up @ params["down"][expert])
    return out, dropped


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", HOWS)
def test_gives_what_a_loop_over_tokens_and_experts_gives(name: str):
    params, apply = made(name)
    expected, dropped = by_hand(HOWS[name], params, X)
    (got, logits) = apply(params, X)
    assert np.abs(expected).max() > 1
    assert (dropped > 3) == (name in DROPS), "nothing was put to the test"
    assert_close(got, expected, 5e-6)
    assert_close(logits, wide(X) @ wide(params["router"]), 2e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dropless", "capacity"])
def test_the_gradient_is_that_of_all_experts_at_once(name: str):
    """Against the same choices as a mask over the outputs of every expert, which autodiff knows."""
    params, apply = made(name)
    how, toward = HOWS[name], np.random.default_rng(1).standard_normal(X.shape, np.float32)
    params, x = jax.tree.map(jnp.asarray, (params, X))

    def masked(params, x):
        logits = x @ params["router"]
        highest, chosen = jax.lax.top_k(logits, how.top_k)
        picks = jax.nn.one_hot(chosen, how.count)  # b t k e
        before = jnp.cumsum(picks.sum(2), 1) - picks.sum(2)  # b t e
        places = how.places(TIME) if name == "capacity" else TIME
        picks = jnp.where((before < places)[:, :, None], picks, 0)
        weights = (picks * jax.nn.softmax(highest, -1)[..., None]).sum(2)
        gate, up = (jnp.einsum("btd,edf->btef", x, params[part]) for part in ("gate", "up"))
        each = jnp.einsum("btef,efd->bted", jax.nn.silu(gate) * up, params["down"])
        return (each * weights[..., None]).sum(2)

    slope = lambda fn: jax.jit(jax.grad(lambda *given: (fn(*given) * toward).sum(), (0, 1)))
    ours = slope(lambda *given: apply(*given)[0])(params, x)
    theirs = slope(masked)(params, x)
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(theirs)) > 0.1
    assert_leaves_close(ours, theirs, 5e-6)


@pytest.mark.parametrize("name", ["dropless", "capacity"])
def test_no_row_knows_of_another_and_no_token_of_a_later_one(name: str):
    params, apply = made(name)
    other = np.random.default_rng(2).standard_normal(X.shape).astype(np.float32)
    whole, _ = apply(params, X)
    rows, _ = apply(params, np.concatenate([X[:1], other[1:]]))
    np.testing.assert_array_equal(rows[0], whole[0])
    later, _ = apply(params, np.concatenate([X[:, :7], other[:, 7:]], 1))
    assert_close(later[:, :7], whole[:, :7], 2e-6)
    assert np.abs(np.asarray(later - whole)[:, 7:]).max() > 0.1


@pytest.mark.thorough
def test_a_text_written_token_by_token_is_that_read_at_once_and_nothing_is_dropped():
    small = {"vocab": 11, "context": 8, "layers": 2, "heads": 2, "width": 16, "tied": False}
    kinds = {"dropless": {}, "capacity": {"factor": 1.0}}
    dropless, capacity = (
        Transformer(**small, experts={"kind": kind, "count": 4, **more}).build()
        for kind, more in kinds.items()
    )
    params, _ = jax.jit(dropless.init)(jax.random.key(0))
    params = jax.tree.map(lambda leaf: 8 * leaf, params)
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 11, (2, 8)), jnp.int32)
    whole, _ = jax.jit(lambda p: dropless.apply(p, {}, tokens))(params)
    short, _ = jax.jit(lambda p: capacity.apply(p, {}, tokens))(params)
    assert np.abs(short - whole).max() > 0.1, "every choice had a place"

    def written(params):
        _, cache = capacity.extend(params, capacity.empty(params, 2), tokens[:, :7], 0)
        return capacity.extend(params, cache, tokens[:, 7:], 7)[0]

    assert_close(jax.jit(written)(params), whole[:, -1], 2e-5)
