"""The autoencoder of experiments/vae.py, against a script without a line of jtrain."""

import importlib.util
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from image_files import write_digits
from quick_study import config_of, trained

from jtrain.core.placement import Unplaced
from jtrain.data.images.digits import Digits

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "vae.yaml"


@pytest.fixture(autouse=True)
def _data(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JTRAIN_DATA", str(write_digits(home / "digits", rows=500).parent))


def study():
    config_of(CONFIG)  # puts the directory of the experiments where modules are found
    from experiments import vae

    return vae


def script():
    path = ROOT / "benchmarks" / "peers" / "plain_vae.py"
    spec = importlib.util.spec_from_file_location("plain_vae", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_pixel_surprises_as_a_count_of_sixteen_tosses():
    logits = jnp.linspace(-6, 6, 51).reshape(3, 17)
    inked = np.tile(np.arange(17.0), (3, 1))
    chances = 1 / (1 + np.exp(-np.float64(logits)))
    ways = np.array([math.comb(16, k) for k in range(17)])
    likely = ways * chances**inked * (1 - chances) ** (16 - inked)
    wanted = -np.log(likely).sum(1)
    assert_close(study().surprise(logits, jnp.float32(inked)), wanted, 1e-5)


def test_the_bound_is_the_scripts():
    config = config_of(CONFIG, ["model.widths=[256]", "batch=40"])
    x = config.build(Unplaced())
    params, _ = x.init(jax.random.key(5))
    batch = {name: jnp.asarray(array) for name, array in x.train[0].items()}
    # Whatever is drawn changes nothing, for the decoder's first kernel is zero.
    decoder = jax.tree.map(lambda leaf: leaf + 0.1, params["decoder"])
    decoder["layers"]["0"]["kernel"] = jnp.zeros_like(decoder["layers"]["0"]["kernel"])
    params = {"encoder": params["encoder"], "decoder": decoder}
    terms, _ = jax.jit(x.loss)(params, batch, jax.random.key(1))
    found = sum(c * m.value() for c, m in zip(terms.coefficients, terms.means, strict=True))
    both = [params["encoder"]["layers"], decoder["layers"]]
    # jtrain.models.layers.linear keeps a map that narrows the other way round.
    layers = [(part["0"]["kernel"], part["1"]["kernel"].T) for part in both]
    biases = [(part["0"]["bias"], part["1"]["bias"]) for part in both]
    theirs = [
        pair for ks, bs in zip(layers, biases, strict=True) for pair in zip(ks, bs, strict=True)
    ]
    counts = 16 * batch["image"].reshape(-1, 64)
    with jax.numpy_rank_promotion("allow"):
        wanted = jax.jit(script().bound)(theirs, counts, jax.random.key(9))
    assert_close(found, wanted, 1e-5)


def test_digits_are_drawn_side_by_side():
    images = np.zeros((2, 8, 8), np.float32)
    images[1, 0, :2] = 1.0, 0.5
    lines = study().drawn(images).split("\n")
    assert len(lines) == 8
    assert lines[0] == " " * 18 + "@@++"


@pytest.mark.slow
def test_training_comes_to_the_scripts_bound_within_one_percent():
    digits = Digits().build()
    counts = [16 * s[np.arange(len(s))]["image"].reshape(-1, 64) for s in (digits[0], digits[1])]
    ours, theirs = [], []
    for seed in range(2):
        settings = ("steps=600", f"seed={seed}", f"name=seed-{seed}", "parallel={kind: single}")
        ours.append(trained(CONFIG, *settings, "evaluate.batch=100").results[600]["loss"])
        with jax.numpy_rank_promotion("allow"):
            theirs.append(script().bound_after(*counts, seed=seed, steps=600))
    assert_close(np.mean(ours), np.mean(theirs), 0.01)
