"""Sequences split over devices: by a ring or by Ulysses, attention is that of one device.

What travels on the ring, what each device computes, and a kernel's rows and heads.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close, distance

from jtrain.core.interpret import executions, operations
from jtrain.core.placement import Placement
from jtrain.core.rows import row_keys
from jtrain.errors import ShardingError
from jtrain.losses.next_token import inputs_and_targets, next_token, segments_of
from jtrain.models.attention.blockwise import Causal
from jtrain.models.transformer import Transformer
from jtrain.parallel import Axes, Single, Strategy
from jtrain.parallel.attention.ring import RingAttention, zigzag
from jtrain.train.flops import count_flops

ROWS, TIME, VOCABULARY = 8, 32, 64
# Rounding of sums in another order, in float32; gradients of these cases are off by 2.4e-7 at most.
NEAR = 1e-6


def batch(packed: bool) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, VOCABULARY, (ROWS, TIME + 1)).astype(np.int32)
    given = {"tokens": tokens, "row": np.arange(ROWS, dtype=np.int32), "mask": np.ones(ROWS, bool)}
    if packed:  # up to five segments a row and some padding
        ids = np.sort(draw.integers(0, 6, (ROWS, TIME + 1)), axis=1)[:, ::-1]
        return {**given, "segments": np.ascontiguousarray(ids, np.int32)}
    return {**given, "length": draw.integers(4, TIME + 1, ROWS).astype(np.int32)}


class Case(NamedTuple):
    """A transformer, and how it is laid out."""

    axes: dict[str, Any]
    values: Mapping[str, Any] = MappingProxyType({})
    packed: bool = False

    def __str__(self) -> str:
        said = {
            **self.axes,
            **{k: v["kind"] if isinstance(v, dict) else v for k, v in self.values.items()},
        }
        return "-".join(f"{k} {v}" for k, v in said.items()) + ("-packed" if self.packed else "")


ROTARY = {"positions": {"kind": "rotary"}}
ULYSSES = {"context_by": "ulysses"}
EXPERTS: dict[str, Any] = {"count": 4, "top_k": 2}
QUICK = [
    Case({"context": 4, "data": 2}, {**ROTARY, "kv_heads": 2, "window": 9}, packed=True),
    Case({"context": 2, "fsdp": 2, "tensor": 2}, {"dropout": 0.2}),
    Case({"context": 2, "tensor": 2, "data": 2, **ULYSSES}, {**ROTARY, "window": 9}, packed=True),
]
SLOW = [
    Case({"context": 2, "expert": 2, "data": 2}, {"experts": {**EXPERTS, "kind": "dropless"}}),
    Case({"context": 2, "fsdp": 4, "sequence": True}, {**ROTARY, "kv_heads": 1, "tied": False}),
    Case(
        {"context": 4, "tensor": 2}, {**ROTARY, "kv_heads": 2, "attention_cap": 5.0, "scan": True}
    ),
    Case({"context": 8}, {"window": 9, "global_every": 2}),
    Case({"context": 4, "fsdp": 2}, {**ROTARY, "remat": "names", "saved": ("attention",)}),
    Case(
        {"context": 2, "fsdp": 2, "tensor": 2, "zero": 1}, {**ROTARY, "qk_norm": True}, packed=True
    ),
    Case({"context": 4, "fsdp": 2, **ULYSSES}, {"attention_cap": 5.0, "dropout": 0.2}),
    Case({"context": 2, "tensor": 2, "data": 2, **ULYSSES}, {"scan": True, "remat": "full"}),
]
CASES = [
    *(pytest.param(case, id=str(case), marks=pytest.mark.thorough) for case in QUICK[:-1]),
    pytest.param(QUICK[-1], id=str(QUICK[-1])),
    *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SLOW),
]


def values_of(case: Case) -> Transformer:
    small = {"vocab": VOCABULARY, "context": TIME, "layers": 1, "heads": 4, "width": 32}
    layers = {"layers": 2} if {"scan", "global_every"} & set(case.values) else {}
    return Transformer(**{**small, **layers, **case.values})


def slope(where: Strategy, case: Case) -> tuple[Any, Any]:
    """Return the loss and its gradient, on the host."""
    values = values_of(case)
    model = values.build(where.placement)

    def loss(params, batch):
        params = laid(params)
        inputs, targets, real = inputs_and_targets(batch)
        keys = row_keys(jax.random.key(7), batch) if values.dropout else None
        options = {"segments": segments_of(batch), "rng": keys, "train": True}
        mean, _ = next_token(model.apply(params, {}, inputs, **options)[0], targets, real)
        value = mean.total / mean.weight
        logits = model.routed(params, {}, inputs, **options)[0][1]  # b l t e
        if logits is None:
            return value
        # Each position with a weight of its own.
        late = jnp.arange(TIME, dtype=jnp.float32)[None, None, :, None] / TIME
        return value + 1e-3 * jnp.mean(late * jnp.square(logits))

    init = lambda: model.init(jax.random.key(0))[0]
    like = jax.eval_shape(init)
    lies, laid = where.shardings(like, model.dims), where.gradient_sharding(like, model.dims).params
    params = jax.device_put(jax.jit(init)(), lies)
    return jax.device_get(
        jax.jit(jax.value_and_grad(loss))(params, where.place(batch(case.packed)))
    )


@functools.cache
def on_one(case: str) -> tuple[Any, Any]:
    return slope(Single().build(), next(c for c in QUICK + SLOW if str(c) == case))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_one_device(case: Case, capfd: pytest.CaptureFixture):
    axes = Axes(**{"fsdp": 1, "min_size": 0, **case.axes})
    loss, grads = slope(axes.build(), case)
    assert "rematerialization" not in capfd.readouterr().err
    wanted, exact = on_one(str(case))
    print(f"{case}: loss {abs(loss / wanted - 1):.1e}, gradient {distance(grads, exact):.1e}")
    assert abs(loss / wanted - 1) < NEAR
    assert distance(grads, exact) < NEAR


ROWS_, TIMES, HEADS, GROUPS, HEAD = 2, 64, 4, 2, 8


def place_of(**axes) -> Placement:
    return Axes(**{"fsdp": 1, **axes}).build().placement


def shapes(t: int = TIMES, h: int = HEADS, g: int = GROUPS) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((ROWS_, t, n, HEAD), jnp.float32) for n in (h, g, g)]


def gradient(place: Placement, how: Causal):
    return jax.grad(lambda *qkv: jnp.square(place.attend(how, *qkv)).sum(), (0, 1, 2))


@pytest.mark.parametrize("devices", [1, 5])
def test_every_device_has_as_many_positions_to_see(devices: int):
    order = zigzag(8 * devices, devices)
    np.testing.assert_array_equal(np.sort(order), np.arange(8 * devices))
    seen = (order + 1).reshape(devices, -1).sum(1)
    np.testing.assert_array_equal(seen, seen[0])
    plain = np.arange(1, 8 * devices + 1).reshape(devices, -1).sum(1)
    assert devices == 1 or plain.max() > 1.4 * seen[0], "as they come, the last has more to do"


def test_every_device_computes_what_is_seen_and_no_more():
    devices = 4
    place, chunk = place_of(devices=devices, context=devices), TIMES // (2 * devices)
    attend = lambda *qkv: place.attend(Causal(), *qkv)
    assert "cond" not in operations(attend, *shapes()), "one program, with no choice for a device"
    seen = [(q, k) for q, k in itertools.product(range(2 * devices), repeat=2) if k <= q]
    pair = 2 * 2 * ROWS_ * HEADS * HEAD * chunk**2  # of two chunks: scores, and what they weigh
    assert count_flops(attend, *shapes()) == len(seen) * pair
    assert len(seen) % devices == 0, "and all devices the same"


@pytest.mark.thorough
def test_backward_they_travel_again_and_their_gradients_behind_them():
    place = place_of(context=8)
    arrays = 2  # keys and values, and of both the gradient
    assert permutes(lambda *qkv: place.attend(Causal(), *qkv), *shapes()) == 7 * arrays
    assert permutes(gradient(place, Causal()), *shapes()) == 7 * arrays * (1 + 2)
    assert permutes(gradient(place, Causal(window=3)), *shapes()) == 2 * arrays * (1 + 2)


@pytest.mark.parametrize(("window", "reach"), [(None, "all"), (1, 0), (5, 1), (6, 2), (14, "all")])
def test_keys_travel_no_farther_than_a_window_reaches(window, reach):
    runs = {"all": [(1, 7)], 0: []}.get(reach, [(1, reach), (-1, reach)])
    assert RingAttention(Causal(window=window), 8, "context").runs(chunk=4) == runs


def permutes(fn, *args) -> int:
    """Count the permutes of each of 8 devices in a traced program, loops included."""
    found = executions(jax.make_jaxpr(fn)(*args))
    return sum(each.times for each in found if each.equation.primitive.name == "ppermute") // 8


REFUSED = [
    ({"context": 4}, {"t": 20},
        r"20 positions do not divide into 8: two chunks.*context=4.*16 or 24.*context of 1, 2"),
    ({"context": 4, **ULYSSES}, {},
        r"2 kv_heads do not divide into parallel\.context=4.*context of 1, 2, or.*context_by=ring"),
    ({"context": 2, "tensor": 2, **ULYSSES}, {},
        r"2 kv_heads over parallel\.tensor=2 do not.*context of 1, or parallel\.context_by=ring"),
]  # fmt: skip


@pytest.mark.parametrize(("axes", "sizes", "words"), REFUSED)
def test_what_does_not_divide_is_refused_with_what_does(axes, sizes, words):
    place = place_of(**axes, data=8 // axes["context"] // axes.get("tensor", 1))
    with pytest.raises(ShardingError, match=words):
        jax.eval_shape(lambda *qkv: place.attend(Causal(), *qkv), *shapes(**sizes))


def test_a_kernel_is_refused_on_a_ring_and_taken_by_ulysses():
    kernel = Causal(implementation="splash")
    attend = lambda place: lambda *qkv: place.attend(kernel, *qkv)
    words = r"by a ring.*splash.*model\.attention=xla.*parallel\.context_by=ulysses"
    with pytest.raises(ShardingError, match=words):
        jax.eval_shape(attend(place_of(context=2, data=4)), *shapes())
    with pytest.raises(ValueError, match="kernel for TPUs"):  # so it got as far as the kernel
        jax.eval_shape(attend(place_of(context=2, data=4, **ULYSSES)), *shapes())


B, T, H, G, K = 8, 6, 4, 2, 8
SEGMENTS = np.repeat([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]], B // 2, axis=0).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Kernel(Causal):
    """One that remembers the shapes that it was traced with."""

    seen: list = dataclasses.field(default_factory=list)

    @property
    def kernel(self) -> bool:
        return True

    def __call__(self, q, k, v, segments=None, *, platform=None):
        self.seen.append(tuple(x.shape for x in (q, k, v, segments) if x is not None))
        assert platform == "cpu", platform
        return Causal(self.window)(q, k, v, segments)


def draw(h: int = H, g: int = G):
    shapes = [(B, T, h, K), (B, T, g, K), (B, T, g, K)]
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.slow
def test_a_kernel_is_called_for_the_rows_and_heads_of_a_device():
    place = Axes(slice=2, fsdp=2, tensor=2).build().placement
    how, qkv = Kernel(window=4), draw()
    segments = jnp.asarray(SEGMENTS)
    attend = lambda q, k, v: place.attend(how, q, k, v, segments)
    both = jax.jit(lambda *x: (*jax.vjp(attend, *x)[1](x[0]), attend(*x)))
    got = both(*qkv)
    assert set(how.seen) == {((2, T, 2, K), (2, T, 1, K), (2, T, 1, K), (2, T))}
    plain = lambda q, k, v: Causal(window=4)(q, k, v, segments)
    wanted = (*jax.vjp(plain, *qkv)[1](qkv[0]), plain(*qkv))
    for ours, theirs in zip(got, wanted, strict=True):
        assert_close(ours, theirs, 2e-6)
