"""Attention by fused kernels, which never write the scores out.

cuDNN's run on an NVIDIA GPU, splash on a TPU, tokamax's on both. The compiler cannot split a kernel
over devices: under a mesh the placement runs it on each device's rows and heads
(`jtrain.parallel.attention.sequence_parallel`).
"""

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.errors import ConfigError
from jtrain.models.attention import KV, Queries, Segments, same_segment, visible
from jtrain.parallel.devices import Device, compute_capability

AMPERE: tuple[int, int] = (8, 0)  # compute capabilities
HOPPER: tuple[int, int] = (9, 0)
DETERMINISTIC = r"xla_gpu_(deterministic_ops|exclude_nondeterministic_ops)(=(?i:true|1))?(\s|$)"


def cudnn(
    q: Queries,
    k: KV,
    v: KV,
    *,
    window: int | None,
    soft_cap: float | None,
    scale: float,
    segments: Segments,
    platform: str | None = None,
) -> Float[Array, "b t h k"]:
    """Return `jtrain.models.attention`, in float16 or bfloat16, summed in float32.

    With `segments` the mask is an array b t t, whose memory is that of the scores of one head.

    Raises:
        ConfigError: if there is no NVIDIA GPU, it is older than Ampere, cuDNN is not installed or
            has no kernel for the arguments, or XLA is asked for deterministic operations.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html.
    """
    check_cudnn(q, k, soft_cap=soft_cap, segments=segments, platform=platform)
    same = None if segments is None else same_segment(segments, q.shape[1])
    try:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=None if same is None else same[:, None],
            is_causal=True,
            scale=scale,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
    except RuntimeError as error:
        if "cudnn" not in str(error).lower():
            raise
        raise ConfigError(
            f"attention by cuDNN needs its library, also to compile for a GPU of another machine, "
            f"and JAX says: {str(error).splitlines()[0]} "
            f"Install it (pip install 'jtrain[cuda13]'), "
            f'or take implementation="xla" (model.attention=xla).'
        ) from error


def check_cudnn(
    q: Queries, k: KV, *, soft_cap: float | None, segments: Segments, platform: str | None = None
) -> None:
    """Raise ConfigError unless cuDNN has a kernel for the arguments, the GPU and XLA's flags.

    Args:
        platform: of the compiled program, if it is not that of this machine.
    """
    device: Device = jax.devices()[0]
    elsewhere = device.platform == "cpu" and platform in {"gpu", "cuda"}
    capability = HOPPER if elsewhere else compute_capability(device) or (0, 0)
    (_, t, _, size), s = q.shape, k.shape[1]
    largest = 256 if capability >= HOPPER else 128
    half = {jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)}
    deterministic = re.search(DETERMINISTIC, os.environ.get("XLA_FLAGS", ""))
    need = ""
    if capability == (0, 0):
        need = (
            f"an NVIDIA GPU, and the first device is {device!r}; install JAX for GPUs (pip install "
            f"'jtrain[cuda13]') if the machine has one"
        )
    elif capability < AMPERE:
        need = (
            f"an NVIDIA GPU of compute capability 8.0 or newer (Ampere), and the first device is "
            f"{device.device_kind} of {capability[0]}.{capability[1]}"
        )
    elif {q.dtype, k.dtype} - half:
        need = f"float16 or bfloat16, and q is {q.dtype}: compute in bfloat16 (precision.kind=bf16)"
    elif size % 8 or size > largest:
        need = f"a head size that is a multiple of 8 up to {largest}, and it is {size}"
    elif soft_cap is not None:
        need = f"scores without a cap, and soft_cap is {soft_cap}"
    elif t != s:
        need = f"as many queries as keys, and there are {t} and {s}"
    elif segments is not None and t % 2:
        need = f"an even number of positions where there are segments, and there are {t}"
    elif deterministic:
        # XLA compiles such a program, and its first step on a GPU ends in an IndexError (an H200,
        # jaxlib 0.11.2, cuDNN 9.19).
        need = (
            "operations that need not be deterministic, and xla.preset=deterministic or XLA_FLAGS "
            "asks for deterministic ones; leave them free (xla.preset=none)"
        )
    if need:
        raise ConfigError(
            f'attention by cuDNN needs {need}; or take implementation="xla" (model.attention=xla).'
        )


def tokamax(
    q: Queries,
    k: KV,
    v: KV,
    *,
    window: int | None,
    soft_cap: float | None,
    scale: float,
    segments: Segments,
    platform: str | None = None,
) -> Float[Array, "b t h k"]:
    """Return `jtrain.models.attention` by the kernel that tokamax chooses for the platform.

    Raises:
        ConfigError: if tokamax is not installed.

    Source: https://github.com/openxla/tokamax.
    """
    del platform
    try:
        from absl import flags
        from tokamax import dot_product_attention  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            "attention by tokamax needs its package (pip install tokamax); or take "
            'implementation="xla" (model.attention=xla).'
        ) from None
    if not flags.FLAGS.is_parsed():  # else tokamax parses the words of the command line
        flags.FLAGS.mark_as_parsed()
    t, s = q.shape[1], k.shape[1]
    mask = None if t == s else visible(t, s, window)[None, None]  # else it aligns the first ones
    if segments is not None:
        same = same_segment(segments, t)[:, None]
        mask = same if mask is None else mask & same
    return dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        is_causal=t == s,
        scale=scale,
        local_window_size=None if window is None or t != s else (window - 1, 0),
        logits_soft_cap=soft_cap,
    )


LANES = 128  # of a TPU: the least block
BLOCK = 512  # positions at once, at most


def splash(
    q: Queries,
    k: KV,
    v: KV,
    *,
    window: int | None,
    soft_cap: float | None,
    scale: float,
    segments: Segments,
    platform: str | None = None,
    interpret: bool = False,
) -> Float[Array, "b t h k"]:
    """Return `jtrain.models.attention`; sums are float32 whatever the inputs.

    `interpret` runs the kernel anywhere, in plain operations: for tests.

    Raises:
        ConfigError: if the program is not for a TPU, or the positions are not a multiple of 128.
    """
    platform = platform or jax.default_backend()
    if platform != "tpu" and not interpret:
        raise ConfigError(
            f"splash attention is a kernel for TPUs, and this program is for {platform!r}. "
            f'Take implementation="xla" (model.attention=xla); to compile for a TPU of another '
            f'machine, platform="tpu".'
        )
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels  # 0.4 s

    t, s = q.shape[1], k.shape[1]
    if t % LANES or s % LANES:
        raise ConfigError(
            f"splash attention takes blocks of {LANES} positions, and there are {t} queries and "
            f"{s} keys. Nearest: a context of {max(LANES, round(s / LANES) * LANES)}; or take "
            f'implementation="xla" (model.attention=xla).'
        )
    before = (None if window is None else window - 1, 0)
    mask = kernels.LocalMask((t, s), before, s - t) if window else kernels.CausalMask((t, s), s - t)
    queries: Any = {f"block_q{end}": _block(t) for end in ("", "_dkv", "_dq")}
    ends = ("", "_compute", "_dkv", "_dkv_compute", "_dq")
    keys: Any = {f"block_kv{end}": _block(s) for end in ends}
    kernel = kernels.make_splash_mha(
        kernels.MultiHeadMask([mask] * q.shape[2]),
        block_sizes=kernels.BlockSizes(**queries, **keys),
        attn_logits_soft_cap=soft_cap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    q, k, v = (jnp.moveaxis(x, 2, 1) for x in (q * jnp.asarray(scale, q.dtype), k, v))  # b h t k
    if segments is None:
        out: Any = jax.vmap(lambda *row: kernel(*row))(q, k, v)
    else:
        ids = kernels.SegmentIds(segments[:, s - t :], segments)
        out = jax.vmap(lambda *row: kernel(*row[:3], segment_ids=row[3]))(q, k, v, ids)
    return jnp.moveaxis(out, 1, 2)


def _block(length):
    return next(n for n in (BLOCK, BLOCK // 2, LANES) if length % n == 0)
