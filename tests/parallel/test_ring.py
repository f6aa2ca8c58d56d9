"""The ring: as little work as can be, the same for all, and as little on the way."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.core.jaxpr import inner_jaxprs, operations
from jtrain.core.placement import Placement
from jtrain.errors import ShardingError
from jtrain.inspect.plan.collectives import read_collectives
from jtrain.models.attention.causal import Causal
from jtrain.models.transformer import Transformer
from jtrain.parallel import Axes
from jtrain.parallel.attention.ring import RingAttention
from jtrain.parallel.attention.zigzag import zigzag
from jtrain.train.flops import count_flops

B, T, H, G, K = 2, 64, 4, 2, 8


def place_of(**axes) -> Placement:
    return Axes(**{"fsdp": 1, **axes}).build().placement


def shapes(t: int = T, h: int = H, g: int = G) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((B, t, n, K), jnp.float32) for n in (h, g, g)]


def gradient(place: Placement, how: Causal):
    return jax.grad(lambda *qkv: jnp.square(place.attend(how, *qkv)).sum(), (0, 1, 2))


@pytest.mark.parametrize("devices", [1, 2, 4, 5, 8])
def test_every_device_has_as_many_positions_to_see(devices: int):
    order = zigzag(8 * devices, devices)
    np.testing.assert_array_equal(np.sort(order), np.arange(8 * devices))
    seen = (order + 1).reshape(devices, -1).sum(1)
    np.testing.assert_array_equal(seen, seen[0])
    plain = np.arange(1, 8 * devices + 1).reshape(devices, -1).sum(1)
    assert devices == 1 or plain.max() > 1.4 * seen[0], "as they come, the last has more to do"


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_every_device_computes_what_is_seen_and_no_more(devices: int):
    place, chunk = place_of(devices=devices, context=devices), T // (2 * devices)
    attend = lambda *qkv: place.attend(Causal(), *qkv)
    assert "cond" not in operations(attend, *shapes()), "one program, with no choice for a device"
    seen = [(q, k) for q, k in itertools.product(range(2 * devices), repeat=2) if k <= q]
    pair = 2 * 2 * B * H * K * chunk**2  # of two chunks: scores, and what they weigh
    assert count_flops(attend, *shapes()) == len(seen) * pair
    assert len(seen) % devices == 0, "and all devices the same"


def test_keys_and_values_travel_to_the_other_devices_and_nothing_else_does():
    devices, here = 8, 2 * B * (T // 8) * G * K * 4  # bytes of the keys and values of a device
    place = place_of(context=devices)
    attend = jax.jit(lambda *qkv: place.attend(Causal(), *qkv))
    text = attend.lower(*shapes()).compile().as_text()
    assert text
    crossed = {each.kind: each for each in read_collectives(text, {"context": devices}).collectives}
    assert set(crossed) == {"collective-permute"}
    assert (
        sum(each.sent for each in read_collectives(text, {"context": devices}).collectives)
        == (devices - 1) * here
    )


def test_backward_they_travel_again_and_their_gradients_behind_them():
    place = place_of(context=8)
    arrays = 2  # keys and values, and of both the gradient
    assert permutes(lambda *qkv: place.attend(Causal(), *qkv), *shapes()) == 7 * arrays
    assert permutes(gradient(place, Causal()), *shapes()) == 7 * arrays * (1 + 2)
    assert permutes(gradient(place, Causal(window=3)), *shapes()) == 2 * arrays * (1 + 2)


@pytest.mark.parametrize(
    ("window", "reach"),
    [(None, "all"), (1, 0), (2, 1), (5, 1), (6, 2), (13, 3), (14, "all"), (64, "all")],
)
def test_keys_travel_no_farther_than_a_window_reaches(window, reach):
    runs = {"all": [(1, 7)], 0: []}.get(reach, [(1, reach), (-1, reach)])
    assert RingAttention(Causal(window=window), 8, "context").runs(chunk=4) == runs


def permutes(fn, *args) -> int:
    """Count the permutes of a traced program, loops included."""

    def of(jaxpr) -> int:
        found = 0
        for eqn in jaxpr.eqns:
            turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            found += eqn.primitive.name == "ppermute"
            found += turns * sum(of(part) for part in inner_jaxprs(eqn))
        return found

    return of(jax.make_jaxpr(fn)(*args).jaxpr)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("remat", "travels"), [("none", 3), ("full", 4), ("names", 3)])
def test_what_a_remat_saves_does_not_travel_again(remat, travels):
    saved = ("attention",) if remat == "names" else ()
    sizes: dict[str, Any] = {"vocab": 8, "context": 16, "layers": 1, "heads": 2, "width": 16}
    place, tokens = place_of(data=2, context=4), jnp.zeros((2, 16), jnp.int32)
    model = Transformer(**sizes, remat=remat, saved=saved).build(place)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0))[0])
    loss = lambda params: model.apply(params, {}, tokens)[0].sum()
    put_back = 2 * 2  # halves, there and back
    assert permutes(jax.grad(loss), params) == 2 * travels * 3 + put_back


ULYSSES = {"context_by": "ulysses"}
REFUSED = [
    (
        {"context": 4},
        {"t": 20},
        r"20 positions do not divide into 8: two chunks.*context=4.*16 or 24.*context of 1, 2",
    ),
    (
        {"context": 4, **ULYSSES},
        {"t": 18},
        r"18 positions do not divide into 4: one shard.*16 or 20.*context of 1, 2",
    ),
    (
        {"context": 4, **ULYSSES},
        {},
        r"2 kv_heads do not divide into parallel\.context=4.*context of 1, 2, or.*context_by=ring",
    ),
    (
        {"context": 8, **ULYSSES},
        {"g": 4},
        r"4 heads do not divide into parallel\.context=8",
    ),
    (
        {"context": 2, "tensor": 2, **ULYSSES},
        {},
        r"2 kv_heads over parallel\.tensor=2 do not.*context of 1, or parallel\.context_by=ring",
    ),
    ({"context": 2, "tensor": 4}, {}, r"2 kv_heads do not divide into parallel\.tensor=4"),
]


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


def test_what_the_refusals_advise_is_taken():
    for axes, t in (({"context": 2, "data": 4}, 20), ({"context": 4, "data": 2}, 24)):
        jax.eval_shape(lambda *qkv, p=place_of(**axes): p.attend(Causal(), *qkv), *shapes(t))
    place = place_of(context=2, data=4, **ULYSSES)
    jax.eval_shape(lambda *qkv: place.attend(Causal(), *qkv), *shapes())
    assert place.order(18) is None
