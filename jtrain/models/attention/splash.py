"""Attention by the splash kernel, on a TPU: the scores are never written out.

The kernel is a public part of `jax.experimental`. The compiler cannot split it over devices: under
a mesh the placement runs it on each device's rows and heads
(`jtrain.parallel.attention.sequence_parallel`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as kernels
from jaxtyping import Array, Float, Int

from jtrain.errors import ConfigError

LANES = 128  # of a TPU: the least block
BLOCK = 512  # positions at once, at most


def splash(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g k"],
    *,
    window: int | None,
    soft_cap: float | None,
    scale: float,
    segments: Int[Array, "b s"] | None,
    interpret: bool = False,
) -> Float[Array, "b t h k"]:
    """Return `jtrain.models.attention.attention`; sums are float32 whatever the inputs.

    `interpret` runs the kernel anywhere, in plain operations: for tests.

    Raises:
        ConfigError: if the positions are no multiple of 128.
    """
    t, s = q.shape[1], k.shape[1]
    if t % LANES or s % LANES:
        raise ConfigError(
            f"splash attention takes blocks of {LANES} positions, and there are {t} queries and "
            f"{s} keys. Nearest: a context of {max(LANES, round(s / LANES) * LANES)}; or take "
            f'implementation="xla" (model.attention=xla).'
        )
    before = (None if window is None else window - 1, 0)
    mask = kernels.LocalMask((t, s), before, s - t) if window else kernels.CausalMask((t, s), s - t)
    kernel = kernels.make_splash_mha(
        kernels.MultiHeadMask([mask] * q.shape[2]),
        block_sizes=_blocks(_block(t), _block(s)),
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


def check_tpu(platform: str) -> None:
    """Raise ConfigError unless the program is for a TPU."""
    if platform != "tpu":
        raise ConfigError(
            f"splash attention is a kernel for TPUs, and this program is for {platform!r}. "
            f'Take implementation="xla" (model.attention=xla); to compile for a TPU of another '
            f'machine, platform="tpu".'
        )


def _block(length):
    return next(n for n in (BLOCK, BLOCK // 2, LANES) if length % n == 0)


def _blocks(t, s):
    return kernels.BlockSizes(
        block_q=t,
        block_kv=s,
        block_kv_compute=s,
        block_q_dkv=t,
        block_kv_dkv=s,
        block_kv_dkv_compute=s,
        block_q_dq=t,
        block_kv_dq=s,
    )
