"""Attention over a mesh: a kernel gets its device's rows and heads, and nothing else changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.errors import ShardingError
from jtrain.models.attention.causal import Causal
from jtrain.models.transformer import Transformer
from jtrain.parallel import Axes

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


@pytest.mark.thorough
@pytest.mark.parametrize(
    "segments", [pytest.param(None, marks=pytest.mark.slow), SEGMENTS], ids=["whole", "packed"]
)
def test_a_kernel_is_called_for_the_rows_and_heads_of_a_device(segments):
    place = Axes(slice=2, fsdp=2, tensor=2).build().placement
    how, qkv = Kernel(window=4), draw()
    segments = None if segments is None else jnp.asarray(segments)
    attend = lambda q, k, v: place.attend(how, q, k, v, segments)
    both = jax.jit(lambda *x: (*jax.vjp(attend, *x)[1](x[0]), attend(*x)))
    got = both(*qkv)
    each = ((2, T, 2, K), (2, T, 1, K), (2, T, 1, K)) + (((2, T),) if segments is not None else ())
    assert set(how.seen) == {each}
    plain = lambda q, k, v: Causal(window=4)(q, k, v, segments)
    wanted = (*jax.vjp(plain, *qkv)[1](qkv[0]), plain(*qkv))
    for ours, theirs in zip(got, wanted, strict=True):
        assert_close(ours, theirs, 2e-6)


def test_what_is_no_kernel_is_left_to_the_compiler():
    place = Axes(fsdp=4, tensor=2).build().placement
    jaxpr = jax.make_jaxpr(lambda *x: place.attend(Causal(), *x))(*draw())
    assert "shard_map" not in str(jaxpr)
    jaxpr = jax.make_jaxpr(lambda *x: place.attend(Kernel(), *x))(*draw())
    assert "shard_map" in str(jaxpr)


def test_a_kernel_on_one_device_is_called_as_it_is():
    place = Axes(devices=1).build().placement
    jaxpr = jax.make_jaxpr(lambda *x: place.attend(Kernel(), *x))(*draw())
    assert "shard_map" not in str(jaxpr)


def test_heads_that_do_not_divide_are_refused():
    place = Axes(fsdp=2, tensor=4).build().placement
    with pytest.raises(ShardingError, match=r"2 kv_heads do not divide into parallel\.tensor=4.*"):
        jax.eval_shape(lambda *x: place.attend(Kernel(), *x), *draw())
    jax.eval_shape(lambda *x: place.attend(Kernel(), *x), *draw(g=4))


@pytest.mark.parametrize(("kv_heads", "words"), [(0, "4"), (2, "2")])
def test_heads_are_named_by_the_keys_that_a_config_may_give(kv_heads: int, words: str):
    place = Axes(tensor=8).build().placement
    fields = Transformer(vocab=8, context=4, layers=1, width=16, heads=4, kv_heads=kv_heads)
    model = fields.build(place)
    said = rf"^{words} kv_heads do not .* or a model with 8 kv_heads \(heads, where no kv_heads are"
    with pytest.raises(ShardingError, match=said):
        jax.eval_shape(
            lambda: model.apply(*model.init(jax.random.key(0)), jnp.zeros((B, 4), jnp.int32))
        )


def test_splash_is_refused_for_what_the_mesh_is_not():
    place = Axes(fsdp=8).build().placement
    with pytest.raises(ValueError, match=r'program is for .cpu.*implementation="xla"'):
        jax.eval_shape(lambda *x: place.attend(Causal(implementation="splash"), *x), *draw())
    assert jnp.isfinite(place.attend(Causal(), *draw())).all()
