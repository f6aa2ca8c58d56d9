"""Studies against scripts, equations and published sizes: classifiers, generators, heat, a cart."""

import dataclasses
import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, assert_leaves_close, bitwise, distance
from image_files import write_digits, write_fashion_mnist
from layouts import strategy
from quick_study import At, PowerCutError, config_of, cut, trained

import jtrain as jt
from jtrain.core.mean import Terms
from jtrain.core.placement import Unplaced
from jtrain.core.pytree import named_leaves
from jtrain.data.known_sets import Digits
from jtrain.data.text.prepare import prepare
from jtrain.data.text.tokenizing import ByteTokens
from jtrain.errors import ConfigError
from jtrain.train.hooks.log import read_results

pytestmark = pytest.mark.thorough

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def _data(home: Path, monkeypatch: pytest.MonkeyPatch):
    write_fashion_mnist(home / "fashion-mnist", train=80, test=20)
    write_digits(home / "digits", rows=500)
    monkeypatch.setenv("JTRAIN_DATA", str(home))


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


VAE = CONFIGS / "vae.yaml"


def script():
    path = CONFIGS.parent / "benchmarks" / "peers" / "plain_vae.py"
    spec = importlib.util.spec_from_file_location("plain_vae", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bound_is_the_scripts():
    config = config_of(VAE, ["model.widths=[256]", "batch=40"])
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
        ours.append(trained(VAE, *settings, "evaluate.batch=100").results[600]["loss"])
        with jax.numpy_rank_promotion("allow"):
            theirs.append(script().bound_after(*counts, seed=seed, steps=600))
    assert_close(np.mean(ours), np.mean(theirs), 0.01)


GAN = CONFIGS / "gan.yaml"


def experiment(config: Path) -> ModuleType:
    """Return the module of the experiment of a config."""
    return sys.modules[type(config_of(config)).__module__]


def test_one_step_of_both_is_a_step_of_each_with_the_other_in_extra():
    gan = experiment(GAN)
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


HEAT = CONFIGS / "heat.yaml"
SINGLE = ("parallel={kind: single}",)


def test_the_equation_is_the_networks_by_differences():
    heat = experiment(HEAT)
    config = config_of(HEAT, ["model.widths=[8, 8]", "batch=16"])
    x = config.build(Unplaced())
    params, _ = x.init(jax.random.key(0))
    rows = x.train[3]
    _, metrics = jax.jit(x.loss)(params, rows, None)
    wide = jax.tree.map(np.float64, params)

    def at(place, time):  # the network once more, in float64
        h = np.stack([2 * place - 1, 2 * time - 1], -1)
        for layer in wide[:-1]:
            h = np.tanh(h @ layer["kernel"] + layer["bias"])
        return (h @ wide[-1]["kernel"] + wide[-1]["bias"])[:, 0]

    place, time, d = np.float64(rows["x"]), np.float64(rows["t"]), 1e-4
    by_time = (at(place, time + d) - at(place, time - d)) / (2 * d)
    bent = (at(place + d, time) - 2 * at(place, time) + at(place - d, time)) / d**2
    wanted = np.square(by_time - heat.Rod().conductivity * bent).mean()
    assert_close(metrics["equation"].value(), wanted, 1e-3)


def test_a_few_hundred_steps_bring_it_near_the_solution():
    settings = ("steps=300", "steps_per_call=100", "batch=64", "model.widths=[16, 16]")
    outcome = trained(HEAT, *SINGLE, *settings, "evaluate.batch=512")
    final = outcome.results[300]
    assert final["rows"] == 64 * 64
    assert np.sqrt(final["squared_error"]) < 0.5  # 1 for a network that gives 0


CART = CONFIGS / "policy_gradient.yaml"


def accelerations(angle: float, turn: float, force: float) -> np.ndarray:
    """Return the motion of cart and pole from Lagrange's equations (rod of length 1), float64."""
    mass, rod, half, gravity = 1.0, 0.1, 0.5, 9.8
    inertia = np.array(
        [
            [mass + rod, rod * half * np.cos(angle)],
            [rod * half * np.cos(angle), rod * half**2 * 4 / 3],
        ]
    )
    forces = [force + rod * half * turn**2 * np.sin(angle), rod * gravity * half * np.sin(angle)]
    return np.linalg.solve(inertia, forces)


def test_the_cart_moves_as_lagrange_says():
    draw = np.random.default_rng(0)
    states = draw.uniform(-1, 1, size=(50, 4)).astype(np.float32)
    pushes = draw.choice([-10.0, 10.0], 50).astype(np.float32)
    after = experiment(CART).moved(jnp.asarray(states), jnp.asarray(pushes))
    for state, push, found in zip(states, pushes, np.asarray(after), strict=True):
        gain, angular = accelerations(state[2], state[3], push)
        rates = np.array([state[1], gain, state[3], angular])
        assert_close(found, state + 0.02 * rates, 1e-5)


def test_the_pole_stays_up_for_150_actions_after_40_updates():
    settings = (*SINGLE, "steps=40", "seed=3", "steps_per_call=10", "evaluate.every=0")
    outcome = trained(CART, *settings, "checkpoint.every=0", "log.every=1")
    returns = [row["return"] for row in read_results(outcome.directory.metrics, "").values()]
    assert np.mean(returns[:3]) < 50
    assert np.mean(returns[-5:]) > 150
    assert outcome.results[40]["return"] > 150


GPT2 = CONFIGS / "gpt2.yaml"
TOY = (
    *("batch=8", "microbatches=2", "data.context=16", "data.validation=0.2", "model.context=16"),
    *("model.layers=1", "model.heads=2", "model.width=32", "model.vocab=0"),
    *("optimizer.schedule.warmup=2", "parallel={kind: single}"),
)


@pytest.fixture
def tokens(home: Path) -> None:
    (home / "text.txt").write_text("the cat sat on the mat and the rat sat on the cat. " * 40)
    prepare(home / "text.txt", home / "tokens", tokenizing=ByteTokens())


@pytest.mark.usefixtures("tokens")
def test_packed_rows_keep_their_documents_apart(tmp_path: Path):
    (tmp_path / "lines.txt").write_text("the cat sat.\nthe rat.\non the mat!\n" * 40)
    prepare(tmp_path / "lines.txt", tmp_path / "lines", tokenizing=ByteTokens(), by="line")
    packed = ("data.path=lines", "data.pack=true", "data.context=40", "model.context=40")
    x = config_of(GPT2, [*TOY, *packed]).build(Unplaced())
    params, _ = x.init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: 9 * leaf, params)  # attention that sees something
    batch = {name: jnp.asarray(array) for name, array in x.train[0].items()}
    assert batch["segments"].max() > 2
    together = batch | {"segments": jnp.ones_like(batch["segments"])}
    found, other = jax.jit(lambda p, *bs: [x.loss(p, b, None)[0] for b in bs])(
        params, batch, together
    )
    across = (jnp.diff(batch["segments"]) > 0).sum()
    assert other.weight - found.weight == across > 8, "no target is across two documents"
    assert abs(other.value() - found.value()) > 1e-3


@pytest.mark.usefixtures("tokens")
def test_experts_are_judged_besides_and_a_batch_of_them_meets():
    experts = "model.experts={kind: dropless, count: 4, uneven: 0.5, group: batch}"
    x = config_of(GPT2, [*TOY, "microbatches=1", experts]).build(Unplaced())
    params, _ = x.init(jax.random.key(0))
    terms, metrics = jax.jit(x.loss)(params, x.train[0], None)
    assert isinstance(terms, Terms)
    assert_close(terms.coefficients, (1.0, 0.5, 1e-3), 1e-6)
    assert 0.9 < metrics["balance"].value() < 2  # 4 experts, of which 2 are chosen
    assert set(metrics) == {"accuracy", "cross_entropy", "balance", "router_z"}
    assert x.rows_interact == "batch"


DEEPSEEK = (
    "model.experts={kind: dropless, count: 4, weights: sigmoid, bias_update_rate: 0.01, uneven: 0}",
    "model.multi_token_depth=2",
)
RULE = optax.sgd(0.5)


@functools.cache
def walked(layout: str, devices: int, microbatches: int):
    """Return the losses and the last state of three steps, each with a row hidden."""
    where = strategy(layout, devices)
    x = config_of(GPT2, [*TOY, *DEEPSEEK]).build(where.placement)
    params, extra = x.init(jax.random.key(0))
    state = jt.new_state(params, RULE, jax.random.key(1), extra)
    how = {"microbatches": microbatches, "psum": where.psum, "ragged": True}
    step = jt.make_step(x.loss, RULE, **how)
    names = "loss", "multi_token_1", "multi_token_2"
    hidden = lambda i: {**x.train[i], "mask": np.arange(8) != i}
    program = where.compile(step, state, where.place(hidden(0)), returns_state=True)
    state, losses = jax.device_put(state, where.shardings(state)), []
    for i in range(3):
        state, metrics = program(state, where.place(hidden(i)))
        losses.append([metrics[name].value() for name in names])
    return np.array(losses), jax.device_get(state)


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("layout", ["mirrored jit", "mirrored shard_map", "mirrored pmap"])
def test_biases_and_further_tokens_take_the_steps_of_one_device_when_mirrored(layout):
    losses, state = walked(layout, 2 if layout == "mirrored jit" else 4, 2)
    want, one = walked("single", 1, 1)
    assert_close(losses, want, 1e-6)
    assert distance(state.params, one.params) < 2e-6
    assert bitwise(state.extra, one.extra)
    assert np.abs(one.extra["expert_bias"]).max() > 0.015, "biases moved"


@pytest.mark.usefixtures("tokens")
def test_a_cut_run_ends_with_the_biases_of_an_unbroken_one_and_no_evaluation_moves_them():
    how = (*TOY, *DEEPSEEK, "steps=4", "checkpoint.every=1")
    whole = trained(GPT2, *how, "name=whole", "evaluate.every=1")
    with pytest.raises(PowerCutError):
        trained(GPT2, *how, "name=cut", "evaluate.every=0", hooks=[At(2, cut)])
    trained(GPT2, *how, "name=cut", "evaluate.every=0")
    one, other = jt.load("whole"), jt.load("cut")
    assert bitwise((one.params, one.extra), (other.params, other.extra))
    assert np.abs(one.extra["expert_bias"]).max() > 0.015
    assert {"max_violation", "multi_token_1", "multi_token_2"} <= whole.results[4].keys()


@pytest.mark.usefixtures("tokens")
def test_more_depths_than_a_row_has_tokens_are_refused_by_their_key():
    with pytest.raises(ConfigError, match=r"model.multi_token_depth=16: rows .*_depth=15 or less"):
        config_of(GPT2, [*TOY, "model.multi_token_depth=16"])
    config_of(GPT2, [*TOY, "model.multi_token_depth=15"])
