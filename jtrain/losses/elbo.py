"""The evidence lower bound of an autoencoder with Gaussian latents."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jtrain.core.mean import Mean, Terms
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.losses.shapes import check_same_shape


def elbo(
    reconstruction: Float[Array, "b"],
    mean: Float[Array, "b z"],
    log_variance: Float[Array, "b z"],
    mask: Bool[Array, "b"],
    *,
    beta: float = 1.0,
) -> tuple[Terms, Metrics]:
    """Return reconstruction + beta x KL(latents, unit normal) as a loss, in nats a row.

    `reconstruction` is -log p(row | latent). The terms are the metrics `reconstruction` and `kl`;
    with beta=1 their sum bounds -log p(row) from above.

    Raises:
        LossError: if the shapes do not match.

    Source: Kingma & Welling 2014, arXiv 1312.6114; beta: Higgins et al. 2017, "beta-VAE".
    """
    check_same_shape(mean, log_variance, mask, ("mean", "log_variance"))
    rows = mask[:, None]
    mean, log_variance = (jnp.where(rows, at_least_f32(x), 0) for x in (mean, log_variance))
    # expm1: near the prior exp(x) - 1 - x would lose all of float32's digits.
    kl = (jnp.square(mean) + jnp.expm1(log_variance) - log_variance).sum(-1) / 2
    terms = {"reconstruction": Mean.of(reconstruction, mask), "kl": Mean.of(kl, mask)}
    return terms["reconstruction"] + beta * terms["kl"], terms


def latents(
    keys: Shaped[Array, "b"] | None, mean: Float[Array, "b z"], log_variance: Float[Array, "b z"]
) -> Float[Array, "b z"]:
    """Draw a latent for each row by its own key (`jtrain.row_keys`); without keys, the mean.

    Differentiable in mean and variance.
    """
    if keys is None:
        return mean
    noise = jax.vmap(lambda key: jax.random.normal(key, mean.shape[1:], mean.dtype))(keys)
    return mean + jnp.exp(log_variance / 2) * noise
