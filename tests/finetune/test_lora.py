"""LoRA: its steps, what stays frozen, adapter files; int8 and NF4 weights against numpy."""

import dataclasses
import functools
from pathlib import Path
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, bitwise, distance
from layouts import keep_gradient, step_under
from quick_study import run_quietly
from tiny_configs import TINY

import jtrain as jt
from jtrain.config.resolve import resolve
from jtrain.core.placement import Unplaced
from jtrain.core.pytree import named_leaves
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.errors import CheckpointError
from jtrain.finetune.adapter_file import merge, read_adapter, write_adapter
from jtrain.finetune.lora import Lora, adapted_loss, build_adapter
from jtrain.models.layers.low_rank import NF4, LowRank, Quantized, dequantize, quantize
from jtrain.parallel import FSDP, Mirrored, Single
from jtrain.train.experiment import build_experiment

CONFIG = Path(__file__).parents[2] / "configs" / "shakespeare.yaml"
LORA = "lora={rank: 3, alpha: 6, on: ['*/qkv/*', '*/down/*', tokens]}"
SMALL = [*TINY["shakespeare"], "model.heads=2", "model.width=16", "evaluate.every=0"]


def config(*settings: str):
    return resolve(CONFIG, [*SMALL, LORA, *settings]).config


@functools.cache
def started(*settings: str):
    """Return an experiment and the state of a step, with terms that are not zero."""
    x = build_experiment(config(*settings), Unplaced())
    params, extra = x.adapter.attach(x.init(jax.random.key(0)), jax.random.key(1))
    draw = np.random.default_rng(0)
    fill = lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), jnp.float32) / 8
    return x, jax.tree.map(fill, params), extra


def dense_gradient(x, params, extra, batch):
    """Return the loss, and its gradient by every weight of the model that the terms add up to."""
    plain = config().build(Unplaced())
    full = x.adapter.join(params, extra, merged=True)
    state = new_state(full, optax.chain(keep_gradient(), optax.sgd(1.0)), jax.random.key(2))
    step = jax.jit(make_step(plain.loss, optax.chain(keep_gradient(), optax.sgd(1.0))))
    state, metrics = step(state, batch)
    return metrics["loss"].value(), named_leaves(state.opt_state[0])


@pytest.mark.thorough
def test_the_terms_take_the_dense_step_restricted_to_them():
    """dA = s G B', dB = s A' G for the dense gradient G of each weight."""
    x, params, extra = started()
    batch = {name: jnp.asarray(array) for name, array in x.train[0].items()}
    optimizer = optax.chain(keep_gradient(), optax.sgd(1.0))
    state = new_state(params, optimizer, jax.random.key(2), extra)
    state, metrics = jax.jit(make_step(x.loss, optimizer))(state, batch)
    loss, dense = dense_gradient(x, params, extra, batch)
    assert_close(metrics["loss"].value(), loss, 1e-6)
    assert set(params) == {"blocks/0/qkv/kernel", "blocks/0/down/kernel", "tokens"}
    for name, term in params.items():
        g, a, b = (np.asarray(leaf, np.float64) for leaf in (dense[name], term["a"], term["b"]))
        g = g.T if x.adapter.leaves[name].transposed else g
        want = {"a": 2 * g @ b.T, "b": 2 * a.T @ g}
        got = state.opt_state[0][name]
        assert distance(got, want) <= 1e-6, name


@pytest.mark.thorough
def test_frozen_leaves_are_bitwise_as_before_after_100_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = run_quietly(config("steps=100", "parallel={kind: single}"))
    run = jt.load(outcome.directory.path)
    before = run._program.initial_state().extra["base"]
    assert bitwise(run.extra["base"], before)
    assert all(np.abs(term["b"]).max() > 0 for term in run.params.values())
    leaves = named_leaves(run._program.resolved.abstract_state.opt_state)
    assert {n.split("/mu/")[1] for n in leaves if "/mu/" in n} == set(named_leaves(run.params))
    one = {name: array[:1] for name, array in run.experiment.train[0].items()}
    logits, _ = run.model.apply(run.params, run.extra, jnp.asarray(one["tokens"][:, :-1]))
    assert logits.shape[-1] == len(before["tokens"])


@pytest.mark.thorough
def test_a_run_starts_from_the_weights_of_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ("steps=3", "parallel={kind: single}")
    plain = (*short, "lora={}", "name=plain", "seed=3")
    terms = (*short, "init_from.path=plain", "name=terms")
    run_quietly(config(*plain))
    run_quietly(config(*terms, LORA.replace("}", ", frozen: nf4}")))
    start, run = jt.load("plain"), jt.load("terms")
    assert bitwise(run.extra["base"], run.experiment.adapter.freeze(start.params))
    run.save_adapter("terms.safetensors")
    merged = merge(start.params, read_adapter("terms.safetensors"))
    for name, leaf in named_leaves(run.merged).items():
        assert_close(named_leaves(merged)[name], leaf, 1e-6)


@pytest.mark.thorough
def test_every_split_takes_the_same_step_with_dropout_by_row():
    settings = (
        "model.scan=true",
        "model.layers=2",
        "lora={rank: 2, on: ['*kernel'], dropout: 0.3}",
    )
    x, params, extra = started(*settings)
    params = jax.tree.map(lambda leaf: leaf / 6, params)  # large ones amplify rounding by layer
    batch = {name: array[:8] for name, array in x.train[0].items()}
    want = gradient_under(Single(), 1, x, params, extra, batch)
    for where in (FSDP(devices=4, min_size=0), Mirrored(devices=2, impl="shard_map")):
        assert distance(gradient_under(where, 2, x, params, extra, batch), want) <= 1e-6


def gradient_under(layout, microbatches, x, params, extra, batch):
    how = {"microbatches": microbatches, "ragged": x.train.ragged}
    return step_under(layout, x.loss, params, batch, extra=extra, dims=x.dims, **how)[1]


WIDE = (
    "model.width=64",
    "model.scan=true",
    "lora={rank: 2, on: ['*/up/*', '*/down/*', '*/qkv/*'], frozen: nf4}",
)


@pytest.mark.thorough
def test_a_step_with_shards_of_codes_is_that_of_one_device():
    x, params, extra = started(*WIDE)
    params = jax.tree.map(lambda leaf: leaf / 6, params)
    batch = {name: array[:8] for name, array in x.train[0].items()}
    want = gradient_under(Single(), 1, x, params, extra, batch)
    layout = config(*WIDE, "parallel={kind: sharded, devices: 4, fsdp: 2, tensor: 2}")
    assert distance(gradient_under(layout.parallel, 1, x, params, extra, batch), want) <= 1e-6


@pytest.mark.thorough
def test_a_model_of_plain_functions_has_its_terms_merged():
    params = {"w": jnp.eye(4), "conv": jnp.ones((2, 2, 3, 5)), "bias": jnp.zeros(4)}
    adapter = build_adapter(Lora(rank=2, on=("*",)), params, {})
    terms, extra = adapter.attach((params, ()), jax.random.key(0))
    assert {n: (t["a"].shape, t["b"].shape) for n, t in terms.items()} == {
        "conv": ((12, 2), (2, 5)),
        "w": ((4, 2), (2, 4)),
    }
    loss = lambda p, batch, rng: ((batch["x"] @ p["w"] + p["bias"][None]) ** 2).mean()
    call = adapted_loss(adapter, loss).loss
    value, _, after = call(terms, extra, {"x": jnp.ones((3, 4))}, None)
    assert value == 1
    assert after["base"] is extra["base"]


DRAW = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(DRAW.normal(size=shape), jnp.float32)
BASE = {"up": {"kernel": normal(2, 16, 24)}, "down": {"kernel": normal(24, 16)}, "bias": normal(3)}
DIMS = {"up/kernel": ("layers", "width", "hidden")}


def saved(path, *on: str, frozen="as_is", base=BASE):
    adapter = build_adapter(Lora(rank=2, alpha=3, on=on, frozen=frozen), base, DIMS)
    params, extra = adapter.attach((base, ()), jax.random.key(0))
    params = jax.tree.map(lambda leaf: normal(*leaf.shape), params)
    write_adapter(path, adapter, params, extra)
    return adapter, params, extra


@pytest.mark.thorough
@pytest.mark.parametrize("frozen", ["as_is", "nf4"])
def test_comes_back_and_merges_to_the_weights_of_the_run(tmp_path, frozen):
    path = tmp_path / "one.safetensors"
    adapter, params, extra = saved(path, "*", frozen=frozen)
    found = read_adapter(path)
    assert found.adapter == adapter
    assert bitwise(found.params, params)
    assert path.stat().st_size < 8000
    want = adapter.join(params, extra, merged=True)
    assert_close(merge(BASE, found)["up"]["kernel"], want["up"]["kernel"], 1e-6)
    assert_close(merge(BASE, found)["down"]["kernel"], want["down"]["kernel"], 1e-6)


@pytest.mark.thorough
def test_several_are_added_each_times_its_factor(tmp_path):
    one, two = (tmp_path / f"{name}.safetensors" for name in ("one", "two"))
    _, a, _ = saved(one, "*")
    _, b, _ = saved(two, "up/*")
    got = merge(BASE, read_adapter(one), (read_adapter(two), 0.5))
    term = lambda params, name: np.float64(params[name]["a"]) @ np.float64(params[name]["b"])
    want = BASE["up"]["kernel"] + 1.5 * (term(a, "up/kernel") + 0.5 * term(b, "up/kernel"))
    assert_close(got["up"]["kernel"], want, 1e-6)
    assert_close(got["down"]["kernel"], BASE["down"]["kernel"] + 1.5 * term(a, "down/kernel"), 1e-6)


def test_an_adapter_of_another_base_is_refused_with_the_leaves(tmp_path):
    saved(tmp_path / "one.safetensors", "*")
    found = read_adapter(tmp_path / "one.safetensors")
    other = {**BASE, "bias": BASE["bias"].at[0].add(1e-7)}
    with pytest.raises(CheckpointError, match=r"another base: 1 of 3 leaves with other"):
        merge(other, found)
    with pytest.raises(CheckpointError, match="only one of them has, such as bias"):
        merge({name: BASE[name] for name in ("up", "down")}, found)


DRAWN = np.random.default_rng(0)


def in_numpy(x, bits):
    """Return codes and the values they stand for, block by block and number by number."""
    flat = np.concatenate([x.ravel(), np.zeros(-x.size % 64, np.float32)])
    codes, values = [], []
    for block in flat.reshape(-1, 64):
        scale = np.abs(block).max() * (np.float32(1 / 127) if bits == "int8" else np.float32(1))
        for number in block:
            ratio = number / scale if scale else np.float32(0)
            if bits == "int8":
                code = int(np.rint(ratio))
                value = np.float32(code) * scale
            else:
                code = int(np.abs(NF4.astype(np.float64) - ratio).argmin())
                value = NF4[code] * scale
            codes.append(code)
            values.append(value)
    return codes, np.float32(values)[: x.size].reshape(x.shape)


@pytest.mark.thorough
@pytest.mark.parametrize("bits", ["int8", "nf4"])
def test_codes_and_values_are_those_of_a_loop_in_numpy(bits):
    x = DRAWN.normal(size=(5, 13)).astype(np.float32)
    x[0] = 0
    stored = jax.jit(lambda x: quantize(x, bits))(x)
    codes, values = in_numpy(x, bits)
    found = np.asarray(stored.codes)
    if bits == "nf4":
        found = np.stack([found >> 4, found & 15], -1)
    np.testing.assert_array_equal(found.ravel(), codes)
    np.testing.assert_array_equal(jax.jit(dequantize)(stored), values)


@pytest.mark.thorough
def test_a_stack_is_quantized_layer_by_layer():
    x = jnp.asarray(DRAWN.normal(size=(3, 10, 7)), jnp.float32)
    stored = quantize(x, "nf4", stack=1)
    assert stored.codes.shape == (3, 2, 32)
    for i in range(3):
        np.testing.assert_array_equal(dequantize(stored)[i], dequantize(quantize(x[i], "nf4")))


@pytest.mark.thorough
def test_blocks_of_the_last_dim_are_those_of_the_flat_array():
    """Dims stay where 64 divides the last one, and the numbers are those of any other shape."""
    x = jnp.asarray(DRAWN.normal(size=(2, 6, 128)), jnp.float32)
    stored, flat = quantize(x, "nf4", stack=1), quantize(x.reshape(-1), "nf4")
    assert stored.scales.shape == (2, 6, 2)
    assert stored.codes.shape == (2, 6, 2, 32)
    np.testing.assert_array_equal(stored.codes.ravel(), flat.codes.ravel())
    np.testing.assert_array_equal(dequantize(stored).ravel(), dequantize(flat))


def test_the_table_is_the_published_one():
    """Quantiles of a normal as bitsandbytes' create_normal_map makes them: offset 0.9677083."""
    quantile, offset = NormalDist().inv_cdf, 0.9677083
    upper = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    lower = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    table = np.sort([*upper, 0.0, *lower])
    assert_close(NF4, table / table.max(), 1e-6)
    assert list(NF4).count(0) == 1


X, KERNEL = (jnp.asarray(DRAWN.normal(size=shape), jnp.float32) for shape in ((12, 64), (64, 128)))
A, B = (jnp.asarray(DRAWN.normal(size=shape), jnp.float32) for shape in ((64, 2), (2, 128)))


@functools.cache
def stored(kind):
    """Return the kernel as it is stored."""
    if kind in ("int8", "nf4"):
        return quantize(KERNEL, kind)
    return KERNEL.astype(jnp.bfloat16) if kind == "bfloat16" else KERNEL


low_rank = lambda kind: LowRank(stored(kind), A, B, None, 0.5, 0.0, transposed=False)


def output(kind, a, x):
    """Return x W + the term, with `a` in the place of its A, through the layer's own functions."""
    low = dataclasses.replace(low_rank(kind), a=a)
    return low.product(lambda x, w: jnp.tanh(x @ w), x) + low.term(x, flat=True)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["as_is", "nf4"])
def test_the_backward_pass_makes_dense_weights_again(kind):
    pull = jax.vjp(lambda a, x: output(kind, a, x), A, X)[1]
    saved = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(pull)]
    assert ((KERNEL.shape, jnp.float32) in saved) == (kind == "as_is"), saved
    if isinstance(frozen := stored(kind), Quantized):
        assert (frozen.codes.shape, frozen.codes.dtype) in saved


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["bfloat16", "nf4"])
def test_value_and_gradient_are_those_of_dense_weights(kind):
    dense = low_rank(kind).dense()
    plain = lambda a, x: jnp.tanh(x @ dense) + 0.5 * (x @ a @ B)
    both = lambda f: jax.jit(jax.value_and_grad(lambda *args: (f(*args) ** 2).sum(), (0, 1)))(A, X)
    (value, found), (want, gradient) = both(lambda a, x: output(kind, a, x)), both(plain)
    assert_close(value, want, 1e-6)
    for one, other in zip(found, gradient, strict=True):
        assert_close(one, other, 1e-6)
