"""Contract of a compiled step under every strategy, beside its result."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, bitwise, distance
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from layouts import EXPLICIT, STRATEGIES, strategy
from line import height, line, points, squared, start

from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.errors import RetraceError
from jtrain.parallel import Strategy
from jtrain.parallel.strategies.mirrored import flat_psum

ADAMW = optax.adamw(0.1)
DEVICES = {name: 1 if name == "single" else 4 for name in [*STRATEGIES, *EXPLICIT]}


@pytest.fixture(params=DEVICES)
def where(request) -> Strategy:
    return strategy(request.param, DEVICES[request.param])


def compiled(where: Strategy, loss=squared, **options):
    """Return a step, its initial state and a placed batch."""
    state, batch = start(ADAMW, where, options.pop("extra", ())), where.place(points(16))
    step = make_step(where.loss(loss), ADAMW, psum=where.psum, **options)
    return where.compile(step, state, batch, returns_state=True), state, batch


def test_takes_the_state_away_and_traces_the_loss_once_in_ten_steps(where):
    traced = []

    def counted(params, batch, rng):
        traced.append(1)
        return squared(params, batch, rng)

    step, first, batch = compiled(where, counted)
    state, _ = step(first, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((first.params, first.opt_state)))
    for _ in range(9):
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
    assert len(traced) == 1
    assert int(state.step) == 10


@pytest.mark.thorough
def test_other_arrays_are_refused_by_name_and_a_padded_batch_is_taken(where):
    step, state, _ = compiled(where)
    with pytest.raises(RetraceError) as caught:
        step(state, where.place(points(8)))
    assert "batch/x: was float32[16, 3], is float32[8, 3]" in str(caught.value)
    with pytest.raises(RetraceError, match=r"batch/y: was float32\[16\], is bfloat16\[16\]"):
        step(state, where.place(points(16) | {"y": points(16)["y"].astype(jnp.bfloat16)}))
    with pytest.raises(RetraceError, match=r"batch/more: was absent, is int32\[16\]"):
        step(state, where.place(points(16) | {"more": np.arange(16, dtype=np.int32)}))
    with pytest.raises(RetraceError, match="pad a short batch under its mask"):
        step(state, where.place({name: x[:8] for name, x in points(16).items()}))
    short = points(8)
    padded = {name: np.concatenate([x, x]) for name, x in short.items() if name != "mask"}
    _, metrics = step(state, where.place(padded | {"mask": np.arange(16) < 8}))
    want = squared(line(), {name: jnp.asarray(x) for name, x in short.items()}, None)
    assert metrics["loss"].value() == pytest.approx(want.value(), rel=1e-6)


def test_arrays_that_lie_elsewhere_are_refused_by_name():
    where, apart = strategy("mirrored jit", 4), strategy("mirrored jit", 2)
    step, state, batch = compiled(where)
    with pytest.raises(RetraceError, match=r"batch/x: .*[\s\S]*strategy\.place"):
        step(state, apart.place(points(16)))
    with pytest.raises(RetraceError, match=r"state/params/offset[\s\S]*strategy\.shardings"):
        step(start(ADAMW, apart), batch)


def test_a_weakly_typed_parameter_is_no_other_array(where):
    make = lambda: new_state(line() | {"offset": jnp.array(0.25)}, ADAMW, jax.random.key(0))
    state = jax.jit(make, out_shardings=where.shardings(jax.eval_shape(make)))()
    batch = where.place(points(16))
    step = make_step(where.loss(squared), ADAMW, psum=where.psum)
    step = where.compile(step, state, batch, returns_state=True)
    for _ in range(3):
        state, _ = step(state, batch)
    assert int(state.step) == 3


def test_a_bad_batch_changes_no_bit_on_any_device(where):
    step, state, batch = compiled(where, ragged=True)
    state, _ = step(state, batch)
    before = jax.device_get((state.params, state.opt_state))
    # On one device alone: what the others sum is finite, and they have to stay as well.
    bad = points(16) | {"y": np.where(np.arange(16) == 9, np.inf, 1).astype(np.float32)}
    state, metrics = step(state, where.place(bad))
    assert bitwise(jax.device_get((state.params, state.opt_state)), before)
    for leaf in jax.tree.leaves(state.params):
        copies = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert len(set(copies)) == 1 or not leaf.is_fully_replicated
    assert metrics["skipped"].value() == 1


@pytest.mark.thorough
def test_a_plain_scalar_is_the_mean_over_the_rows(where):
    scalar = lambda params, batch, rng: jnp.square(height(params, batch) - batch["y"]).mean()
    step, state, batch = compiled(where, scalar, microbatches=2)
    mean, other, _ = compiled(where)
    for _ in range(3):
        state, got = step(state, batch)
        other, want = mean(other, batch)
        assert got["loss"].value() == pytest.approx(want["loss"].value(), rel=1e-6)
    assert distance(state.params, other.params) < 1e-6


def test_sums_every_leaf_to_the_same_bits_in_one_message_a_dtype():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    draw = np.random.default_rng(0)
    tree = {
        "w": draw.normal(size=(4, 3, 5)).astype(np.float32),
        "b": [
            draw.normal(size=(4,)).astype(np.float32),
            np.arange(8, dtype=np.int32).reshape(4, 2),
        ],
        "empty": np.zeros((4, 0), np.float32),
    }
    by = lambda psum: jax.jit(
        jax.shard_map(psum, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    )
    each = by(lambda tree: jax.lax.psum(tree, "data"))(tree)
    flat = by(lambda tree: flat_psum(tree, "data"))
    for a, b in zip(jax.tree.leaves(each), jax.tree.leaves(flat(tree)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert_close(flat(tree)["w"], tree["w"].sum(0, keepdims=True), 1e-6)
    assert str(jax.make_jaxpr(flat)(tree)).count("psum") == 2
    assert jax.tree.leaves(by(lambda tree: flat_psum(tree, "data"))({})) == []
    assert jnp.issubdtype(flat(tree)["b"][1].dtype, jnp.integer)
