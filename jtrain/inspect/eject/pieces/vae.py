"""A variational autoencoder, whose bound is in nats of the real pixels."""

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln

from jtrain.inspect.eject.pieces.layers import row_keys
from jtrain.inspect.eject.pieces.mlp import init_mlp, mlp
from jtrain.inspect.eject.pieces.sums import sum_rows

WIDTHS: tuple[int, ...] = (256,)
LATENTS: int = 8
PIXELS = 64
INKS = 16  # a pixel counts the inked ones of a block of 4 x 4


def init_model(key):
    """Return the parameters, and what else the model carries."""
    one, other = jax.random.split(key)
    encoder = init_mlp(one, (PIXELS, *WIDTHS, 2 * LATENTS))
    return {"encoder": encoder, "decoder": init_mlp(other, (LATENTS, *WIDTHS, PIXELS))}, {}


def encode(params, image):
    """Return the mean and the log of the variance of each row's latents."""
    known = mlp(params["encoder"], image, None)
    return jnp.split(known.astype(jnp.float32), 2, 1)


def decode(params, z):
    """Return the logits of ink in each pixel."""
    return mlp(params["decoder"], z, None).astype(jnp.float32)


def loss(params, extra, batch, key):
    """Return the terms (coefficient, sum, weight) of the loss, and what the model carries on.

    The evidence lower bound: reconstruction and divergence from the unit normal (Kingma and Welling
    2014). A row draws its latents by its own key.
    """
    mean, log_variance = encode(params, batch["image"])
    draw = lambda key: jax.random.normal(key, mean.shape[1:], mean.dtype)
    z = mean + jnp.exp(log_variance / 2) * jax.vmap(draw)(row_keys(key, batch))
    nats = surprise(decode(params, z), INKS * batch["image"].reshape(-1, PIXELS))
    rows = batch["mask"][:, None]
    mean, log_variance = (jnp.where(rows, x, 0) for x in (mean, log_variance))
    kl = (jnp.square(mean) + jnp.expm1(log_variance) - log_variance).sum(-1) / 2
    terms = [(1.0, *sum_rows(nats, batch["mask"])), (1.0, *sum_rows(kl, batch["mask"]))]
    return terms, extra


def surprise(logits, inked):
    """Return -log p of each row: a pixel counts the inked ones of 16, each with one probability."""
    ways = gammaln(INKS + 1.0) - gammaln(inked + 1) - gammaln(INKS - inked + 1)
    paid = inked * jax.nn.softplus(-logits) + (INKS - inked) * jax.nn.softplus(logits)
    return jnp.sum(paid - ways, 1)
