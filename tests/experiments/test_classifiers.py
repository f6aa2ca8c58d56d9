"""Classifiers of clothes and of curves: their sizes, their formulas, and that they learn."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from image_files import write_fashion_mnist
from quick_study import config_of, trained

from jtrain.core.placement import Unplaced
from jtrain.core.pytree import named_leaves

pytestmark = pytest.mark.thorough

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL_RESNET = ("model.preset=none", "model.blocks=[1]", "model.width=4")


@pytest.fixture(autouse=True)
def _data(home: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_fashion_mnist(home / "fashion-mnist", train=80, test=20)
    monkeypatch.setenv("JTRAIN_DATA", str(folder.parent))


def test_batch_norm_carries_its_statistics_and_says_that_rows_meet():
    config = config_of(CONFIGS / "resnet18_fashion.yaml", [*SMALL_RESNET, "batch=8"])
    x = config.build(Unplaced())
    assert x.couples == "batch"
    params, extra = x.init(jax.random.key(0))
    _, _, after = jax.jit(x.loss.loss)(params, extra, x.train[0], jax.random.key(1))
    changed = named_leaves(after)
    assert any(name.startswith("norm/mean") for name in changed)
    _, _, same = jax.jit(x.loss.loss)(params, extra, x.train[0], None)
    for name, leaf in named_leaves(same).items():
        assert (leaf == named_leaves(extra)[name]).all()


def test_augments_what_is_trained_on_and_nothing_else():
    built = lambda *changes: config_of(
        CONFIGS / "fashion_mnist.yaml",
        ["batch=8", "model.channels=[4]", "data.augment.crop=0", *changes],
    ).build(Unplaced())
    plain, flipped = built("data.augment.flip=0"), built("data.augment.flip=1")
    assert (flipped.train[0]["image"] == plain.train[0]["image"][:, :, ::-1]).all()
    assert (flipped.valid[0]["image"] == plain.valid[0]["image"]).all()


X = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)


def model(kind: str):
    return config_of(CONFIGS / f"mnist1d_{kind}.yaml").model


# Those of the modules in notebooks/models.py of https://github.com/greydanus/mnist1d, by hand.
def test_has_as_many_parameters_as_the_published_network():
    for kind, size in {"logistic": 410, "mlp": 15210, "cnn": 5210, "gru": 5134}.items():
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
