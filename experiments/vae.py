"""A variational autoencoder of handwritten digits, whose bound is in nats of the real pixels."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from jaxtyping import Array, Float
from pydantic import Field

import jtrain as jt
from jtrain.data import INKS, Digits, InOrder, Shuffled
from jtrain.losses import elbo, latents
from jtrain.models import MLP
from jtrain.types import Batch, Extra, Key, Metrics, Params, Placement

SHADES = " .:-=+*#%@"  # from white to ink


def surprise(logits: Float[Array, "b p"], inked: Float[Array, "b p"]) -> Float[Array, "b"]:
    """Return -log p of each row: a pixel counts the inked ones of 16, each with one probability."""
    ways = gammaln(INKS + 1.0) - gammaln(inked + 1) - gammaln(INKS - inked + 1)
    paid = inked * jax.nn.softplus(-logits) + (INKS - inked) * jax.nn.softplus(logits)
    return jnp.sum(paid - ways, 1)


def drawn(images: Float[np.ndarray, "n 8 8"]) -> str:
    """Return images side by side as text, two characters a pixel."""
    places = np.minimum((images * len(SHADES)).astype(int), len(SHADES) - 1)
    text = lambda row: "".join(2 * SHADES[place] for place in row)
    return "\n".join("  ".join(map(text, line)).rstrip() for line in places.swapaxes(0, 1))


@jt.configclass
class Autoencoder:
    """An encoder to a mean and a variance of each latent, and a decoder to chances of ink."""

    widths: tuple[int, ...] = (256,)
    """Numbers in each hidden layer of either."""
    latents: int = Field(default=8, gt=0)
    """Numbers that a digit becomes."""


@jt.configclass
class Config(jt.RunConfig):
    """Digits that were never written."""

    data: Digits = Digits()
    """The digits."""
    model: Autoencoder = Autoencoder()
    """The networks."""

    def build(self, place: Placement) -> jt.Experiment:
        """Build a loss whose row draws its latents by its own key, fixed in evaluation."""
        data, size = self.data.build(), self.model.latents
        encoder = MLP(inputs=64, widths=self.model.widths, classes=2 * size).build(place)
        decoder = MLP(inputs=size, widths=self.model.widths, classes=64).build(place)

        def init(key: Key) -> tuple[Params, Extra]:
            one, other = jax.random.split(key)
            return {"encoder": encoder.init(one)[0], "decoder": decoder.init(other)[0]}, ()

        def decoded(params: Params, z: Float[Array, "b z"]) -> Float[Array, "b 64"]:
            return decoder.apply(params["decoder"], {}, z, train=True)[0].astype(jnp.float32)

        def loss(params: Params, batch: Batch, rng: Key | None) -> tuple[jt.Terms, Metrics]:
            keys = jt.row_keys(jax.random.key(0) if rng is None else rng, batch)
            known = encoder.apply(params["encoder"], {}, batch["image"], train=True)[0]
            mean, log_variance = jnp.split(known.astype(jnp.float32), 2, 1)
            logits = decoded(params, latents(keys, mean, log_variance))
            inked = INKS * batch["image"].reshape(-1, 64)
            return elbo(surprise(logits, inked), mean, log_variance, batch["mask"])

        def sample(params: Params, extra: Extra, key: Key) -> str:
            chances = jax.nn.sigmoid(decoded(params, jax.random.normal(key, (24, size))))
            images = np.asarray(chances).reshape(3, 8, 8, 8)
            return "\n\n".join(drawn(row) for row in images)

        def predict(params: Params, extra: Extra, batch: Batch) -> dict[str, Array]:
            known = encoder.apply(params["encoder"], {}, batch["image"])[0]
            mean = known[:, :size].astype(jnp.float32)
            image = jax.nn.sigmoid(decoded(params, mean)).reshape(-1, 8, 8)
            return {"latents": mean, "image": image}

        return jt.Experiment(
            init=init,
            loss=loss,
            train=Shuffled(data.train, size=self.batch, seed=self.seed),
            valid=InOrder(data.validation, size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer,
            predict=predict,
            sample=sample,
        )
