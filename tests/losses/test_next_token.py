"""Targets of a language batch; cross entropy in chunks: value, gradient, memory, exchange."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close, distance
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.core.placement import Unplaced
from jtrain.errors import LossError
from jtrain.losses.balance import z_loss
from jtrain.losses.chunked_next_token import chunked_next_token
from jtrain.losses.next_token import inputs_and_targets, multi_token, next_token
from jtrain.parallel import Mirrored

TOKENS = jnp.arange(12).reshape(3, 4)


@pytest.mark.thorough
def test_targets_are_the_inputs_one_later():
    batch = {"tokens": TOKENS, "mask": jnp.ones(3, bool)}
    inputs, targets, real = inputs_and_targets(batch)
    np.testing.assert_array_equal(inputs, [[0, 1, 2], [4, 5, 6], [8, 9, 10]])
    np.testing.assert_array_equal(targets, [[1, 2, 3], [5, 6, 7], [9, 10, 11]])
    assert real.all()


def test_lengths_and_the_mask_hide_targets():
    batch = {
        "tokens": TOKENS,
        "mask": jnp.array([True, True, False]),
        "length": jnp.array([2, 3, 3], jnp.int32),
    }
    _, _, real = inputs_and_targets(batch)
    np.testing.assert_array_equal(real, [[1, 1, 0], [1, 1, 1], [0, 0, 0]])


pytestmark = pytest.mark.usefixtures("strict_dtypes")
B, T, D, V = 4, 10, 16, 37


def arrays(dtype=jnp.float32, rows=B, time=T, vocabulary=V):
    draw = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(draw.standard_normal(shape), dtype)
    length = draw.integers(0, time + 1, rows)
    return (
        normal(rows, time, D),
        normal(vocabulary, D),
        jnp.asarray(draw.integers(0, vocabulary, (rows, time)), jnp.int32),
        jnp.asarray(np.arange(time) < length[:, None]),
    )


def plain(hidden, head, targets, real, soft_cap=None, z=0.0):
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    mean, metrics = next_token(logits, targets, real)
    square = z_loss(logits, real)
    return (mean.total + z * square.total) / mean.weight, (mean, square, metrics["accuracy"])


def chunked(hidden, head, targets, real, soft_cap=None, z=0.0, chunk=3, placement=Unplaced()):
    mean, metrics = chunked_next_token(
        hidden, head, targets, real, chunk=chunk, soft_cap=soft_cap, z_loss=z, placement=placement
    )
    parts = metrics.get("cross_entropy", mean), metrics.get("z_loss"), metrics["accuracy"]
    return mean.total / mean.weight, parts


def both(args, **options):
    """Return the value, the metrics and the gradients of chunked and plain."""
    chunks = {name: options.pop(name) for name in ("chunk", "placement") if name in options}
    run = lambda f, o: jax.jit(
        jax.value_and_grad(lambda *x: f(*x, *args[2:], **o), (0, 1), has_aux=True)
    )(*args[:2])
    return run(chunked, options | chunks), run(plain, options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 3, "z": 0.02},
        {"chunk": 128, "soft_cap": 3.0},
        pytest.param({"chunk": 5, "z": 0.5, "soft_cap": 2.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gives_the_plain_value_and_gradient(options):
    ((got, parts), grads), ((want, wanted), exact) = both(arrays(), **options)
    assert_close(got, want, 1e-6)
    assert distance(grads, exact) <= 1e-6
    for part, other in zip(parts, wanted, strict=True):
        if part is not None:
            assert_close(part.value(), other.value(), 1e-6)


@pytest.mark.parametrize("few", [True, False])
def test_few_tokens_and_many_have_the_plain_gradient(few):
    """The gradient of the head is one product where the logits' gradients are the smaller."""
    args = arrays(rows=1, time=D if few else D + 1)
    text = str(jax.make_jaxpr(jax.grad(lambda *x: chunked(*x, *args[2:])[0], 1))(*args[:2]))
    assert (f"f32[1,1,{V},{D}]" in text) != few
    ((got, _), grads), ((want, _), exact) = both(args)
    assert_close(got, want, 1e-6)
    assert distance(grads, exact) <= 1e-6


# A number of 8 bits is off by up to 2^-9 of itself; the slopes are rounded, and so is the gradient.
@pytest.mark.thorough
def test_half_precision_has_logits_and_sums_in_full():
    dtype, off = jnp.bfloat16, 2**-8
    ((got, _), grads), ((want, _), exact) = both(arrays(dtype), z=0.01)
    assert_close(got, want, 1e-6)
    assert {g.dtype for g in grads} == {jnp.dtype(dtype)}
    assert distance(grads, exact) <= off


@pytest.mark.thorough
def test_logits_of_bfloat16_are_off_by_their_rounding():
    x, head, y, real = arrays(jnp.bfloat16)

    def value(logits):
        mean = lambda *x: chunked_next_token(*x, y, real, logits=logits)[0]
        return lambda *x: mean(*x).total / mean(*x).weight

    run = lambda logits: jax.jit(jax.value_and_grad(value(logits), (0, 1)))(x, head)
    (got, grads), (want, exact) = run("bfloat16"), run("float32")
    largest = float(jnp.abs(jnp.einsum("btd,vd->btv", x, head)).max())
    off = largest * 2**-9  # of a logit; the loss is off by as much at most
    assert 0 < abs(got - want) <= off
    assert distance(grads, exact) <= 2 * off + 2**-8  # a probability, and the type of the gradient
    program = lambda logits: jax.jit(value(logits)).lower(x, head).as_text()
    wide = rf"-> tensor<{B}x{T}x{V}xf32>"
    dots = [t for t in ("bfloat16", "float32") if re.search(rf"dot_general.*{wide}", program(t))]
    assert dots == ["float32"]


@pytest.mark.thorough
def test_unlikely_tokens_keep_their_gradient_in_float16():
    """Check small probabilities: float16 has one bit for 1e-7, and none for 1e-8."""
    x, head, y, _ = arrays(jnp.float16, vocabulary=3)
    head = head.at[0].set(0).at[1].set(0)
    x = x.at[..., 0].set(1)
    head = head.at[0, 0].set(17)  # exp(-17) is 4e-8
    y, real = jnp.zeros_like(y), jnp.ones_like(y, bool)
    of = lambda h: chunked_next_token(x, h, y, real)[0].total
    got = jax.jit(jax.grad(lambda h: of(h) * 1e4))(head)[1, 0]
    wide = x.astype(jnp.float32)
    of = lambda h: next_token(jnp.einsum("btd,vd->btv", wide, h), y, real)[0].total
    want = jax.jit(jax.grad(lambda h: of(h) * 1e4))(head.astype(jnp.float32))[1, 0]
    assert want > 1e-3
    assert_close(got, want, 0.02)


@pytest.mark.thorough
def test_all_logits_are_never_there_at_once():
    args = arrays(time=64, vocabulary=2000)
    bytes_of = lambda f: (
        jax.jit(jax.value_and_grad(lambda *x: f(*x, *args[2:])[0], (0, 1)))
        .lower(*args[:2])
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )
    assert bytes_of(plain) > B * 64 * 2000 * 4
    assert bytes_of(lambda *x: chunked(*x, chunk=4)) <= bytes_of(plain) / 4


@pytest.mark.thorough
def test_rows_on_devices_stay_there():
    """No hidden state is exchanged, and nothing at all in the loop."""
    args = arrays(rows=16)
    strategy = Mirrored().build()
    placement, mesh = strategy.placement, strategy.mesh
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    loss = lambda x, head, y, real: chunked(x, head, y, real, placement=placement)[0]
    program = jax.jit(
        jax.value_and_grad(loss, (0, 1)), in_shardings=(rows, whole, rows, rows)
    ).lower(*args)
    compiled = program.compile()
    moved = re.findall(r"= \S+ (all-gather|all-to-all|collective-permute)", compiled.as_text())
    assert not moved
    grads = [n for n in re.findall(r"= (.*) all-reduce", compiled.as_text()) if f"{V},{D}" in n]
    assert len(grads) == 1
    assert not exchanges_in_loops(compiled.as_text())
    here = jax.jit(jax.value_and_grad(lambda *x: plain(*x)[0], (0, 1)))
    got, want = compiled(*args), here(*args)
    assert_close(got[0], want[0], 1e-6)
    assert distance(got[1], want[1]) <= 1e-6


def exchanges_in_loops(text: str) -> list[str]:
    """Return the all-reduces in the bodies of loops."""
    bodies = set(re.findall(r"body=%?([\w.-]+)", text))
    assert bodies
    parts = re.split(r"\n(?=%|ENTRY)", text)
    named = {re.match(r"%?([\w.-]+)", p).group(1): p for p in parts if p.startswith("%")}
    return [m for b in bodies for m in re.findall(r" all-reduce(?:-start)?\(", named[b])]


def test_each_depth_of_multi_token_prediction_is_divided_by_its_own_count():
    draw = np.random.default_rng(1)
    tokens = jnp.asarray(draw.integers(0, V, (3, 7)), jnp.int32)
    batch = {
        "tokens": tokens,
        "mask": jnp.array([True, False, True]),
        "length": jnp.array([5, 6, 6], jnp.int32),
        "segments": jnp.array([[1] * 7, [1] * 7, [1, 1, 1, 2, 2, 2, 2]], jnp.int32),
    }
    _, targets, real = inputs_and_targets(batch)
    hidden = [jnp.asarray(draw.standard_normal((3, 6, V)), jnp.float32) for _ in range(2)]
    hidden = [jnp.where(batch["mask"][:, None, None], x, jnp.nan) for x in hidden]
    further = jax.jit(lambda *given: multi_token(next_token, *given, weight=0.6))
    terms, metrics = further(hidden, targets, real)

    segments, means, counts = np.asarray(batch["segments"]), [], []
    for depth, logits in enumerate(hidden, 1):
        nats = []
        for row, at in np.ndindex(3, 6):
            last = at + depth + 1  # the token that is predicted
            if not batch["mask"][row] or last > batch["length"][row]:
                continue
            if len(set(segments[row, at : last + 1])) == 1:
                z = np.asarray(logits[row, at], np.float64)
                nats.append(np.log(np.exp(z).sum()) - z[tokens[row, last]])
        means.append(np.mean(nats))
        counts.append(len(nats))
    assert counts == [7, 4]
    assert [float(mean.weight) for mean in terms.means] == counts
    assert_close(terms.value(), 0.6 * np.mean(means), 1e-6)
    assert_close([metrics[f"multi_token_{k}"].value() for k in (1, 2)], means, 1e-6)
    with pytest.raises(LossError, match=r"have none at depth 6 .*multi_token_depth=5 or less"):
        multi_token(next_token, hidden * 3, targets, real, weight=0.6)
