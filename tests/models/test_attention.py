"""Attention by every implementation that runs here, against the same formula in float64.

Parts of attention, combined, are compared with attention at once.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.models.attention import attention, blockwise
from jtrain.models.attention.blockwise import Causal
from jtrain.models.attention.kernels import splash, tokamax
from jtrain.parallel.attention.protocol import BlockPositions

pytestmark = pytest.mark.usefixtures("strict_dtypes")
B, T, H, K = 2, 10, 4, 8
SEGMENTS = jnp.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, 3], [5] * 4 + [0] * 6], jnp.int32)


def draw(t=T, s=T, groups=H, size=K, dtype=np.float32):
    normal = np.random.default_rng(0).standard_normal
    shapes = (B, t, H, size), (B, s, groups, size), (B, s, groups, size)
    return [jnp.asarray(2 * normal(shape), dtype) for shape in shapes]


def in_numpy(q, k, v, window=None, soft_cap=None, scale=None, segments=None):
    """Compute one query at a time, over the positions that it sees."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (b, t, h, size), (s, groups) = q.shape, k.shape[1:3]
    out = np.zeros_like(q)
    for row, i, head in itertools.product(range(b), range(t), range(h)):
        now, group = s - t + i, head // (h // groups)
        sees = list(range(0 if window is None else max(0, now - window + 1), now + 1))
        if segments is not None:
            sees = [j for j in sees if segments[row, j] == segments[row, now]]
        scores = k[row, sees, group] @ q[row, i, head] * (size**-0.5 if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        chances = np.exp(scores - scores.max())
        out[row, i, head] = chances / chances.sum() @ v[row, sees, group]
    return out


OPTIONS = [
    {},
    {"window": 3, "groups": 2},
    {"soft_cap": 1.5, "groups": 1},
    {"window": 4, "soft_cap": 2.0, "scale": 0.3, "segments": SEGMENTS, "groups": 2},
    {"t": 3, "window": 2, "groups": 2, "segments": SEGMENTS},
]


@pytest.mark.thorough
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_xla_gives_the_formula(options):
    options = dict(options)
    sizes = {name: options.pop(name) for name in ("t", "groups") if name in options}
    qkv = draw(**sizes)
    got = jax.jit(lambda *qkv: attention(*qkv, **options))(*qkv)
    assert_close(got, in_numpy(*qkv, **options), 2e-6)


@pytest.mark.thorough
def test_half_precision_has_a_softmax_in_full():
    half = draw(dtype=jnp.bfloat16)
    got = attention(*half)
    assert got.dtype == jnp.bfloat16
    # Of bfloat16 are the products' inputs and outputs: 2^-8 each. A softmax in it is 10 x as far.
    assert_close(np.asarray(got, np.float32), in_numpy(*half), 0.01)
    program = jax.jit(attention).lower(*half).as_text()
    (exponential,) = re.findall(r"stablehlo.exponential.*", program)
    assert exponential.endswith("xf32>")


def by_both(kernel, window=None, soft_cap=None, segments=False, t=256, s=256, groups=H):
    """Return the inputs, and a kernel and XLA as functions of them."""
    ids = jnp.asarray(np.arange(s)[None] // np.array([[70], [150]]), jnp.int32)
    options = {"window": window, "soft_cap": soft_cap, "segments": ids if segments else None}
    by_kernel = lambda *x: kernel(*x, scale=0.2, **options)
    by_xla = lambda *x: attention(*x, scale=0.2, **options)
    return draw(t, s, groups=groups, size=16), by_kernel, by_xla


def loosely(fn, *args):
    """`fn(*args)` where jax promotes as it does for its own kernels."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return fn(*args)


KERNELS = {"splash": functools.partial(splash, interpret=True), "tokamax": tokamax}


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 100, "segments": True},
        pytest.param({"soft_cap": 2.0, "groups": 2}, marks=pytest.mark.slow),
        pytest.param({"window": 3, "t": 128, "s": 256}, marks=pytest.mark.slow),
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_a_kernel_gives_what_xla_does(options, kernel):
    """Splash is interpreted; tokamax has the kernel of a CPU."""
    if kernel == "tokamax":
        pytest.importorskip("tokamax")
    qkv, by_kernel, by_xla = by_both(KERNELS[kernel], **options)
    up = jnp.cos(qkv[0])

    def both(fn):
        out, back = jax.vjp(fn, *qkv)
        return out, *back(up)

    for ours, theirs, within in zip(
        loosely(both, by_kernel), both(by_xla), (1e-5, 1e-4, 1e-4, 1e-4), strict=True
    ):
        assert_close(ours, theirs, within)


CUT = 8  # the keys before it and those from it on are a part each
IDS = jnp.asarray([[0] * 5 + [1] * 7, [3] * 9 + [4] * 3], jnp.int32)
PART_OPTIONS = [{}, {"window": 5}, {"soft_cap": 2.0, "scale": 0.5}, {"window": 9, "segments": IDS}]


def draw_parts() -> list[jax.Array]:
    return [*draw(12, 12, groups=2), draw(12)[0]]


def parts_of(window=None, soft_cap=None, scale=None, segments=None):
    """Attention, and the keys and positions of each block."""
    parts = []
    for keys in (slice(0, CUT), slice(CUT, 12)):
        ids = None if segments is None else (segments, segments[:, keys])
        parts.append((keys, BlockPositions(jnp.int32(-keys.start), ids)))
    return Causal(window, soft_cap, scale), parts


@pytest.fixture(
    name="block",
    params=[pytest.param(512, marks=pytest.mark.thorough), 3],
    ids=["at once", "by threes"],
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
@pytest.mark.parametrize("options", PART_OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_two_parts_and_their_gradients_are_the_whole(options, block):
    *qkv, cotangent = draw_parts()
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
def test_keys_that_no_one_sees_weigh_nothing_and_get_nothing(block):
    q, k, v, cotangent = draw_parts()
    attend, stand = (Causal(), BlockPositions(jnp.int32(-12), None))  # keys after all queries
    mean, log_sum = attend.part(q, k, v, stand)
    assert jnp.isfinite(mean).all()
    assert (log_sum < -1e29).all()
    of_others = jnp.zeros(log_sum.shape)
    grads = attend.part_gradient(q, k, v, stand, of_others, of_others, cotangent)
    assert not any(grad.any() for grad in grads)
