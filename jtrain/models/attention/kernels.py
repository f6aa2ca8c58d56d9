"""Attention by fused kernels, which never write the scores out.

cuDNN's run on an NVIDIA GPU, splash on a TPU. The compiler cannot split a kernel over devices:
under a mesh the placement runs it on each device's rows and heads
(`jtrain.parallel.attention.sequence_parallel`).
"""

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.errors import ConfigError
from jtrain.parallel.devices import Device, compute_capability

OLDEST, HOPPER = (8, 0), (9, 0)  # compute capabilities
DETERMINISTIC = r"xla_gpu_(deterministic_ops|exclude_nondeterministic_ops)(=(?i:true|1))?(\s|$)"


def cudnn(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g k"],
    *,
    window: int | None,
    soft_cap: float | None,
    scale: float,
    segments: Int[Array, "b t"] | None,
    platform: str | None = None,
) -> Float[Array, "b t h k"]:
    """Return `jtrain.models.attention`, in float16 or bfloat16, summed in float32.

    With `segments` the mask is an array b t t, whose memory is that of the scores of one head.

    Raises:
        ConfigError: if there is no NVIDIA GPU, it is older than Ampere, cuDNN is not installed or
            has no kernel for the arguments, or XLA is asked for deterministic operations.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html.
    """
    capability = check_gpu(jax.devices()[0], platform)
    check_kernel_exists(q, k, soft_cap=soft_cap, segments=segments, capability=capability)
    check_order_is_free(os.environ.get("XLA_FLAGS", ""))
    same = None if segments is None else segments[:, :, None] == segments[:, None]
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


def check_gpu(device: Device, platform: str | None = None) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for that of another machine.

    Args:
        device: the first of this machine.
        platform: of the compiled program, if it is not that of this machine.

    Raises:
        ConfigError: if the program is for no GPU, or for one that cuDNN has no attention for.
    """
    if device.platform == "cpu" and platform in {"gpu", "cuda"}:
        return None
    capability = compute_capability(device)
    if capability is None:
        raise ConfigError(
            f"attention by cuDNN needs an NVIDIA GPU, and the first device is {device!r}. "
            f"Install JAX for GPUs (pip install 'jtrain[cuda13]') if the machine has one, or take "
            f'implementation="xla" (model.attention=xla).'
        )
    if capability < OLDEST:
        raise ConfigError(
            f"attention by cuDNN needs an NVIDIA GPU of compute capability 8.0 or newer (Ampere), "
            f"and the first device is {device.device_kind} of {capability[0]}.{capability[1]}. "
            f'Take implementation="xla" (model.attention=xla).'
        )
    return capability


def check_kernel_exists(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s g k"],
    *,
    soft_cap: float | None,
    segments: Int[Array, "b s"] | None,
    capability: tuple[int, int] | None = None,
) -> None:
    """Raise ConfigError for arguments that cuDNN has no kernel for; None is a GPU not at hand."""
    (_, t, _, size), s = q.shape, k.shape[1]
    largest = 256 if capability is None or capability >= HOPPER else 128
    half = {jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)}
    wrong = None
    if {q.dtype, k.dtype} - half:
        wrong = (
            f"float16 or bfloat16, and q is {q.dtype}: compute in bfloat16 (precision.kind=bf16)"
        )
    elif size % 8 or size > largest:
        wrong = (
            f"a head size that is a multiple of 8 up to 128 (256 from Hopper on), and it is {size}"
        )
    elif soft_cap is not None:
        wrong = f"scores without a cap, and soft_cap is {soft_cap}"
    elif t != s:
        wrong = f"as many queries as keys, and there are {t} and {s}"
    elif segments is not None and t % 2:
        wrong = f"an even number of positions where there are segments, and there are {t}"
    if wrong:
        raise ConfigError(
            f'attention by cuDNN needs {wrong}; or take implementation="xla" (model.attention=xla).'
        )


def check_order_is_free(flags: str) -> None:
    """Raise ConfigError if `flags` of XLA ask for deterministic operations.

    XLA compiles such a program, and its first step on a GPU ends in an IndexError (an H200, jaxlib
    0.11.2, cuDNN 9.19).
    """
    if re.search(DETERMINISTIC, flags):
        raise ConfigError(
            "attention by cuDNN does not run with XLA's deterministic operations, which "
            "xla.preset=deterministic and XLA_FLAGS ask for. Take attention by XLA "
            '(model.attention=xla, implementation="xla"), or leave the operations free '
            "(xla.preset=none)."
        )


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
    """Return `jtrain.models.attention`; sums are float32 whatever the inputs.

    `interpret` runs the kernel anywhere, in plain operations: for tests.

    Raises:
        ConfigError: if the positions are no multiple of 128.
    """
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
