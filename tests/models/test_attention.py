"""Attention by every implementation that runs here, against the same formula in float64."""

import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.models.attention.attention import attention, attention_where, visible
from jtrain.models.attention.cudnn import check_gpu, check_kernel_exists
from jtrain.models.attention.splash import check_tpu, splash

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
    {"window": 1},
    {"window": 3, "groups": 2},
    {"soft_cap": 1.5, "groups": 1},
    {"scale": 0.7, "segments": SEGMENTS},
    {"window": 4, "soft_cap": 2.0, "scale": 0.3, "segments": SEGMENTS, "groups": 2},
    {"t": 1},
    {"t": 3, "window": 2, "groups": 2, "segments": SEGMENTS},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_xla_gives_the_formula(options):
    options = dict(options)
    sizes = {name: options.pop(name) for name in ("t", "groups") if name in options}
    qkv = draw(**sizes)
    got = jax.jit(lambda *qkv: attention(*qkv, **options))(*qkv)
    assert_close(got, in_numpy(*qkv, **options), 2e-6)


def test_half_precision_has_a_softmax_in_full():
    half = draw(dtype=jnp.bfloat16)
    got = attention(*half)
    assert got.dtype == jnp.bfloat16
    # Of bfloat16 are the products' inputs and outputs: 2^-8 each. A softmax in it is 10 x as far.
    assert_close(np.asarray(got, np.float32), in_numpy(*half), 0.01)
    program = jax.jit(attention).lower(*half).as_text()
    (exponential,) = re.findall(r"stablehlo.exponential.*", program)
    assert exponential.endswith("xf32>")


def test_the_gradient_is_the_slope():
    qkv, options = draw(groups=2), {"window": 5, "soft_cap": 3.0, "segments": SEGMENTS}
    way = [np.float64(x[:, ::-1]) for x in qkv]
    grads = jax.jit(jax.grad(lambda *x: jnp.square(attention(*x, **options)).sum(), (0, 1, 2)))
    along = np.concatenate([(g * w).ravel() for g, w in zip(grads(*qkv), way, strict=True)])
    exact = lambda by: np.square(
        in_numpy(*[np.float64(x) + by * w for x, w in zip(qkv, way, strict=True)], **options)
    ).sum()
    slope = (exact(1e-5) - exact(-1e-5)) / 2e-5
    assert_close(along.sum(), slope, 1e-5, terms=np.abs(along).sum())


def test_a_window_as_long_as_the_sequence_hides_nothing():
    qkv = draw()
    np.testing.assert_array_equal(attention(*qkv, window=T), attention(*qkv))
    np.testing.assert_array_equal(
        visible(4, 4, 2), np.tri(4, dtype=bool) & ~np.tri(4, k=-2, dtype=bool)
    )


def test_a_mask_of_ones_own_gives_what_segments_give():
    qkv = draw()
    alike = SEGMENTS[:, :, None] == SEGMENTS[:, None]
    seen = visible(T, T)[None] & alike
    np.testing.assert_array_equal(
        attention_where(*qkv, seen, scale=K**-0.5), attention(*qkv, segments=SEGMENTS)
    )


def test_nobody_gets_cudnn_unasked():
    wanted = attention(*draw())
    np.testing.assert_array_equal(attention(*draw(), implementation=None), wanted)
    program = jax.jit(lambda *x: attention(*x, implementation=None)).lower(*draw()).as_text()
    assert "cudnn" not in program.lower()


SPLASH = {"window": 100, "segments": True}


def by_both(window=None, soft_cap=None, segments=False, t=256, s=256, groups=H):
    """Return the inputs, and the kernel and XLA as functions of them."""
    ids = jnp.asarray(np.arange(s)[None] // np.array([[70], [150]]), jnp.int32)
    options = {"window": window, "soft_cap": soft_cap, "segments": ids if segments else None}
    by_kernel = lambda *x: splash(*x, scale=0.2, interpret=True, **options)
    by_xla = lambda *x: attention(*x, scale=0.2, **options)
    return draw(t, s, groups=groups, size=16), by_kernel, by_xla


def loosely(fn, *args):
    """`fn(*args)` where jax promotes as it does for its own kernels."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return fn(*args)


def test_splash_interpreted_gives_what_xla_does():
    qkv, by_kernel, by_xla = by_both(**SPLASH)
    got = loosely(jax.jit(by_kernel), *qkv)
    assert_close(got, by_xla(*qkv), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, SPLASH, {"soft_cap": 2.0, "groups": 2}, {"window": 3, "t": 128, "s": 256}],
    ids=lambda o: "-".join(o) or "plain",
)
def test_splash_interpreted_has_the_gradient_that_xla_has(options):
    qkv, by_kernel, by_xla = by_both(**options)
    up = jnp.cos(qkv[0])
    slopes = lambda fn: jax.vjp(fn, *qkv)[1](up)
    for ours, theirs in zip(loosely(slopes, by_kernel), slopes(by_xla), strict=True):
        assert_close(ours, theirs, 1e-4)
    assert_close(loosely(by_kernel, *qkv), by_xla(*qkv), 1e-5)


@pytest.mark.parametrize(
    ("sizes", "options", "said", "follow"),
    [
        ({"groups": 3}, {}, "4 heads cannot share 3 groups.*Nearest: 2 groups", {"groups": 2}),
        ({"t": 12}, {}, "12 queries cannot be the last of 10 positions", {"t": 10}),
        ({}, {"window": 0}, r"window of 0 .* least is window=1", {"window": 1}),
        ({}, {"soft_cap": 0.0}, r"soft cap of 0.0.*soft_cap=None", {"soft_cap": None}),
        (
            {},
            {"implementation": "flash"},
            r"no implementation 'flash' of attention.*xla, cudnn, splash",
            {"implementation": "xla"},
        ),
        (
            {},
            {"implementation": "splash"},
            r'TPUs, and this program is for \'cpu\'.*implementation="xla" \(model.attention=xla\)',
            {"implementation": "xla"},
        ),
        (
            {},
            {"implementation": "splash", "platform": "tpu"},
            r"blocks of 128 positions, and there are 10.*Nearest: a context of 128",
            {"implementation": "xla"},
        ),
        (
            {},
            {"implementation": "cudnn"},
            r'needs an NVIDIA GPU, and the first device is .*implementation="xla" \(model.att',
            {"implementation": "xla"},
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_is_refused_with_advice_that_works(sizes, options, said, follow):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        jax.eval_shape(lambda *x: attention(*x, **options), *draw(**sizes))
    sizes = {n: follow.get(n, size) for n, size in sizes.items()}
    options = {n: follow.get(n, o) for n, o in options.items() if n != "platform"}
    jax.eval_shape(lambda *x: attention(*x, **options), *draw(**sizes))


def test_what_cudnn_has_no_kernel_for_is_refused():
    plain = {"soft_cap": None, "segments": None}
    half = draw(dtype=jnp.bfloat16)
    check_kernel_exists(*half[:2], **plain)
    for (q, k, _), options, said in [
        (draw(), plain, "q is float32: compute in bfloat16"),
        (draw(size=12, dtype=jnp.bfloat16), plain, "multiple of 8 up to 128.*it is 12"),
        (half, plain | {"soft_cap": 3.0}, "without a cap, and soft_cap is 3.0"),
        (draw(t=2, dtype=jnp.bfloat16), plain, "as many queries as keys, and there are 2 and 10"),
        (
            draw(t=9, s=9, dtype=jnp.bfloat16),
            plain | {"segments": SEGMENTS[:, :9]},
            "an even number of positions",
        ),
    ]:
        with pytest.raises(
            ValueError, match=f'{said}.*or take implementation="xla" \\(model.attention=xla\\)'
        ):
            check_kernel_exists(q, k, **options)


def gpu(kind, capability):
    return types.SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


def test_heads_of_256_need_a_hopper():
    wide, plain = draw(size=256, dtype=jnp.bfloat16)[:2], {"soft_cap": None, "segments": None}
    for capability in (None, (9, 0), (10, 0)):
        check_kernel_exists(*wide, **plain, capability=capability)
    with pytest.raises(ValueError, match=r"up to 128 \(256 from Hopper on\).*it is 256"):
        check_kernel_exists(*wide, **plain, capability=(8, 0))


def test_cudnn_is_for_nvidia_gpus_from_ampere_on():
    assert check_gpu(gpu("NVIDIA H100 80GB HBM3", "9.0")) == (9, 0)
    assert check_gpu(gpu("NVIDIA A100-SXM4-80GB", "8.0"), "gpu") == (8, 0)
    assert check_gpu(jax.devices()[0], "gpu") is None  # compiled here for a GPU elsewhere
    for device, platform, said in [
        (gpu("Tesla V100-SXM2-16GB", "7.0"), None, r"8.0 or newer.*Tesla V100-SXM2-16GB of 7.0"),
        (gpu("Tesla T4", "7.5"), "gpu", r"8.0 or newer.*Tesla T4 of 7.5"),
        (gpu("AMD Instinct MI300X", "gfx942"), None, "needs an NVIDIA GPU"),
        (jax.devices()[0], "cpu", "needs an NVIDIA GPU"),
    ]:
        with pytest.raises(
            ValueError, match=f'{said}.*ake implementation="xla" \\(model.attention=xla\\)'
        ):
            check_gpu(device, platform)


def test_splash_is_for_tpus():
    check_tpu("tpu")
    with pytest.raises(ValueError, match=r'for \'gpu\'.*platform="tpu"'):
        check_tpu("gpu")
