"""Attention by cuDNN's fused kernels, on an NVIDIA GPU: the scores are never written out."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.errors import ConfigError


def cudnn(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g k"],
    *,
    window: int | None,
    soft_cap: float | None,
    scale: float,
    segments: Int[Array, "b t"] | None,
) -> Float[Array, "b t h k"]:
    """Return `jtrain.models.attention.attention`, in float16 or bfloat16, summed in float32.

    With `segments` the mask is an array b t t, whose memory is that of the scores of one head.

    Raises:
        ConfigError: if there is no NVIDIA GPU, or cuDNN has no kernel for the arguments.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html.
    """
    device = jax.devices()[0]
    check_nvidia(device.platform == "gpu" and "nvidia" in device.device_kind.lower(), device)
    check_kernel_exists(q, k, soft_cap=soft_cap, segments=segments)
    same = None if segments is None else segments[:, :, None] == segments[:, None]
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


def check_nvidia(nvidia: bool, device: object) -> None:
    """Raise ConfigError unless the device is an NVIDIA GPU."""
    if not nvidia:
        raise ConfigError(
            f"attention by cuDNN needs an NVIDIA GPU, and the first device is {device!r}. "
            f"Install JAX for GPUs (pip install 'jax[cuda13]') if the machine has one, or take "
            f'implementation="xla".'
        )


def check_kernel_exists(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s g k"],
    *,
    soft_cap: float | None,
    segments: Int[Array, "b s"] | None,
) -> None:
    """Raise ConfigError for arguments that cuDNN has no kernel for."""
    (_, t, _, size), s = q.shape, k.shape[1]
    half = {jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)}
    wrong = None
    if {q.dtype, k.dtype} - half:
        wrong = f"float16 or bfloat16, and q is {q.dtype}: compute in bfloat16"
    elif size % 8 or size > 256:
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
        raise ConfigError(f'attention by cuDNN needs {wrong}; or take implementation="xla".')
