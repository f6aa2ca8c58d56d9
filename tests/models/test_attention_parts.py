"""Parts of attention, combined, against attention at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.models.attention import attention, blockwise
from jtrain.models.attention.blockwise import Causal
from jtrain.parallel.attention.protocol import BlockPositions

pytestmark = pytest.mark.usefixtures("strict_dtypes")
B, T, H, G, K = 2, 12, 4, 2, 8
CUT = 8  # the keys before it and those from it on are a part each
IDS = jnp.asarray([[0] * 5 + [1] * 7, [3] * 9 + [4] * 3], jnp.int32)
OPTIONS = [{}, {"window": 5}, {"soft_cap": 2.0, "scale": 0.5}, {"window": 9, "segments": IDS}]


def draw(dtype=jnp.float32) -> list[jax.Array]:
    normal = np.random.default_rng(0).standard_normal
    return [jnp.asarray(normal((B, T, heads, K)), dtype) for heads in (H, G, G, H)]


def parts_of(window=None, soft_cap=None, scale=None, segments=None):
    """Attention, and the keys and positions of each block."""
    parts = []
    for keys in (slice(0, CUT), slice(CUT, T)):
        ids = None if segments is None else (segments, segments[:, keys])
        parts.append((keys, BlockPositions(jnp.int32(-keys.start), ids)))
    return Causal(window, soft_cap, scale), parts


@pytest.fixture(
    params=[pytest.param(512, marks=pytest.mark.thorough), 3],
    ids=["at once", "by threes"],
    autouse=True,
)
def _block(request, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blockwise, "BLOCK", request.param)


def combined(q, k, v, **options):
    attend, parts = parts_of(**options)
    got = [attend.part(q, k[:, keys], v[:, keys], stand) for keys, stand in parts]
    log_sum = jnp.logaddexp(got[0][1], got[1][1])
    return sum(jnp.exp(own - log_sum)[..., None] * mean for mean, own in got), log_sum


@pytest.mark.sampled(2)
@pytest.mark.thorough
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_two_parts_and_their_gradients_are_the_whole(options):
    *qkv, cotangent = draw()
    out, log_sum = combined(*qkv, **options)
    wanted, back = jax.vjp(lambda *qkv: attention(*qkv, **options), *qkv)
    assert_close(out, wanted, 2e-6)

    q, k, v = qkv
    attend, parts = parts_of(**options)
    told = log_sum, (out * cotangent).sum(-1), cotangent
    got = [attend.part_gradient(q, k[:, own], v[:, own], at, *told) for own, at in parts]
    grads = got[0][0] + got[1][0], *(jnp.concatenate(x, 1) for x in zip(*got, strict=True))
    for ours, theirs in zip((grads[0], *grads[2:]), back(cotangent), strict=True):
        assert_close(ours, theirs, 5e-6)


@pytest.mark.thorough
def test_keys_that_no_one_sees_weigh_nothing_and_get_nothing():
    q, k, v, cotangent = draw()
    attend, stand = (
        Causal(),
        BlockPositions(jnp.int32(-T), None),
    )  # keys after all queries
    mean, log_sum = attend.part(q, k, v, stand)
    assert jnp.isfinite(mean).all()
    assert (log_sum < -1e29).all()
    of_others = jnp.zeros(log_sum.shape)
    grads = attend.part_gradient(q, k, v, stand, of_others, of_others, cotangent)
    assert not any(grad.any() for grad in grads)
