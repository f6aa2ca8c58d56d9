"""The four networks of experiments/mnist1d.py: their sizes, their formulas, and that they learn."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from quick_study import config_of, trained

from jtrain.core.pytree import named_leaves

pytestmark = pytest.mark.thorough

CONFIGS = Path(__file__).parents[2] / "configs"
X = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)


def model(kind: str):
    return config_of(CONFIGS / f"mnist1d_{kind}.yaml").model


# Those of the modules in notebooks/models.py of https://github.com/greydanus/mnist1d, by hand.
@pytest.mark.parametrize(
    ("kind", "size"), [("logistic", 410), ("mlp", 15210), ("cnn", 5210), ("gru", 5134)]
)
def test_has_as_many_parameters_as_the_published_network(kind: str, size: int):
    params = jax.eval_shape(model(kind).init, jax.random.key(0))
    assert sum(leaf.size for leaf in named_leaves(params).values()) == size


def test_the_recurrent_network_walks_both_ways():
    gru = model("gru")
    params = jax.tree.map(np.float64, gru.init(jax.random.key(1)))
    bend = lambda x: 1 / (1 + np.exp(-x))

    def walk(way, curve):
        (given, remembered), h, states = params[way], np.zeros(6), []
        for x in curve:
            r, z, n = np.split(x * given["kernel"][0] + given["bias"], 3)
            rh, zh, nh = np.split(h @ remembered["kernel"] + remembered["bias"], 3)
            h = (1 - bend(z + zh)) * np.tanh(n + bend(r + rh) * nh) + bend(z + zh) * h
            states.append(h)
        return np.array(states)

    flat = [np.hstack([walk("there", x), walk("back", x[::-1])[::-1]]).ravel() for x in X]
    wanted = np.array(flat) @ params["head"]["kernel"] + params["head"]["bias"]
    found = jax.jit(gru.apply)(jax.tree.map(jnp.float32, params), X)
    assert_close(found, wanted, 1e-5)


def test_the_convolutions_take_every_second_place():
    cnn = model("cnn")
    params = jax.tree.map(np.float64, cnn.init(jax.random.key(1)))
    *layers, head = params

    def convolved(h, layer):  # t i
        padded = np.pad(h, ((1, 1), (0, 0)))
        kernel = layer["kernel"]  # size i o
        places = range(0, len(padded) - len(kernel) + 1, 2)
        sums = [np.einsum("si,sio->o", padded[p : p + len(kernel)], kernel) for p in places]
        return np.maximum(np.array(sums) + layer["bias"], 0)

    flat = []
    for h in X[:, :, None]:
        for layer in layers:
            h = convolved(h, layer)
        flat.append(h.ravel())
    wanted = np.array(flat) @ head["kernel"] + head["bias"]
    found = jax.jit(cnn.apply)(jax.tree.map(jnp.float32, params), X)
    assert_close(found, wanted, 1e-5)


def test_the_perceptron_adds_its_second_layer_to_its_first():
    mlp = model("mlp")
    params = mlp.init(jax.random.key(1))
    first, second, head = jax.tree.map(np.asarray, params)
    of = lambda layer, x: x @ layer["kernel"] + layer["bias"]
    h = np.maximum(of(first, X), 0)
    wanted = of(head, h + np.maximum(of(second, h), 0))
    assert_close(jax.jit(mlp.apply)(params, X), wanted, 1e-5)


def test_the_linear_map_finds_its_minimum_in_steps_of_all_rows():
    settings = ("steps=30", "parallel={kind: single}", "data.rows=500", "batch=400")
    outcome = trained(CONFIGS / "mnist1d_logistic.yaml", *settings, "evaluate.batch=100")
    assert outcome.results[30]["accuracy"] > 0.15
    assert outcome.step == 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "published"), [("logistic", 0.32), ("mlp", 0.68), ("cnn", 0.94), ("gru", 0.91)]
)
def test_reaches_the_published_accuracy(kind: str, published: float):
    found = [
        trained(
            CONFIGS / f"mnist1d_{kind}.yaml",
            f"seed={seed}",
            f"name=seed-{seed}",
            "parallel={kind: single}",
        )
        for seed in range(3)
    ]
    assert np.mean([max(x.results.items())[1]["accuracy"] for x in found]) > published - 0.01
