"""The autoencoder against a script without a line of jtrain, and adversaries against two steps."""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, assert_leaves_close
from image_files import write_digits
from quick_study import config_of, trained

import jtrain as jt
from jtrain.core.placement import Unplaced
from jtrain.core.pytree import named_leaves
from jtrain.data.known_sets import Digits

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "vae.yaml"


@pytest.fixture(autouse=True)
def _data(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JTRAIN_DATA", str(write_digits(home / "digits", rows=500).parent))


def script():
    path = ROOT / "benchmarks" / "peers" / "plain_vae.py"
    spec = importlib.util.spec_from_file_location("plain_vae", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    both = zip(layers, biases, strict=True)
    theirs = [pair for ks, bs in both for pair in zip(ks, bs, strict=True)]
    counts = 16 * batch["image"].reshape(-1, 64)
    with jax.numpy_rank_promotion("allow"):
        wanted = jax.jit(script().bound)(theirs, counts, jax.random.key(9))
    assert_close(found, wanted, 1e-5)


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


GAN = Path(__file__).parents[2] / "configs" / "gan.yaml"


def adversaries():
    config_of(GAN)  # puts the directory of the experiments where modules are found
    from experiments import gan

    return gan


def test_one_step_of_both_is_a_step_of_each_with_the_other_in_extra():
    gan = adversaries()
    optimizers = {"generator": optax.adam(1e-3, b1=0.5), "critic": optax.sgd(1e-2)}
    config = config_of(GAN, ["model.widths=[16]", "batch=32"])
    x = config.build(Unplaced())
    values = gan.Networks(widths=(16,), noise=2)
    models = [gan.MLP(inputs=2, widths=(16,), classes=outputs).build() for outputs in (2, 1)]
    losses = dict(zip(optimizers, gan.losses(*models, values), strict=True))
    key, batches = jax.random.key(3), x.train
    params, _ = x.init(key)
    together = optax.partition(optimizers, {name: name for name in optimizers})
    both = jt.new_state(params, together, key)
    alone = {n: jt.new_state(params[n], rule, key) for n, rule in optimizers.items()}

    def with_the_other(name):
        def loss(own, other, batch, rng):
            return losses[name](own, other, batch, rng), {}, other

        return jt.make_step(jt.stateful(loss), optimizers[name])

    @jax.jit
    def step(both, generator, critic, batch):
        after = jt.make_step(x.loss, together)(both, batch)[0]
        of_generator = dataclasses.replace(generator, extra=critic.params)
        of_critic = dataclasses.replace(critic, extra=generator.params)
        generator, _ = with_the_other("generator")(of_generator, batch)
        critic, _ = with_the_other("critic")(of_critic, batch)
        return after, generator, critic

    for number in range(3):
        both, *apart = step(both, *alone.values(), batches[number])
        alone = {n: dataclasses.replace(s, extra=()) for n, s in zip(alone, apart, strict=True)}
    moved = named_leaves(jax.tree.map(lambda a, b: abs(a - b).max(), both.params, params))
    assert moved.pop("critic/layers/1/bias") == 0  # it is the same for both points of a pair
    assert min(moved.values()) > 1e-5
    for name, state in alone.items():
        assert_leaves_close(both.params[name], state.params, 1e-5)
