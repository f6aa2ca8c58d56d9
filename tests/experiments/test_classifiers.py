"""Classifiers of clothes and of curves: their statistics, their sizes, and that they learn."""

from pathlib import Path

import jax
import numpy as np
import pytest
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
    assert x.rows_interact == "batch"
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


def model(kind: str):
    return config_of(CONFIGS / f"mnist1d_{kind}.yaml").model


# Those of the modules in notebooks/models.py of https://github.com/greydanus/mnist1d, by hand.
def test_has_as_many_parameters_as_the_published_network():
    for kind, size in {"logistic": 410, "mlp": 15210, "cnn": 5210, "gru": 5134}.items():
        params = jax.eval_shape(model(kind).init, jax.random.key(0))
        assert sum(leaf.size for leaf in named_leaves(params).values()) == size


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
