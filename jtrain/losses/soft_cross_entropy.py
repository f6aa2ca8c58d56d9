"""Cross entropy with soft labels: a probability for each class."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.shapes import check_mask


def soft_cross_entropy(
    logits: Float[Array, "b c"], chances: Float[Array, "b n"], mask: Bool[Array, "b"]
) -> tuple[Mean, Metrics]:
    """Return minus the sum of chance x log softmax(logits), in nats a row where `mask` is true.

    The metric `accuracy` is the share of rows whose likeliest class has the greatest chance.
    `chances` need not add up to 1 and have no gradient.

    Raises:
        LossError: if the numbers of chances and logits differ.
    """
    refuse_other_width(logits, chances, "chances")
    check_mask(mask, logits.shape[:1])
    rows = mask[:, None]
    wide = jnp.where(rows, at_least_f32(logits), 0)  # masked rows may be NaN
    target = jax.lax.stop_gradient(jnp.where(rows, at_least_f32(chances), 0))
    values = -_products(target, jax.nn.log_softmax(wide, -1)).sum(-1)
    hits = (wide.argmax(-1) == target.argmax(-1)).astype(jnp.float32)
    return Mean.of(values, mask), {"accuracy": Mean.of(hits, mask)}


def refuse_other_width(
    logits: Float[Array, "b c"], others: Float[Array, "b n"], called: str
) -> None:
    """Raise LossError unless `others` has the number of classes of `logits`."""
    if logits.shape != others.shape:
        raise LossError(
            f"the logits have {logits.shape[-1]} classes and the {called} {others.shape[-1]}. Give "
            f"{called} of shape {logits.shape}, one a class; integer labels are for cross_entropy."
        )


def _products(chances, log_chances):
    """Multiply; a class of chance 0 gives 0, even for a logit of minus infinity."""
    return jnp.where(chances == 0, 0, chances * jnp.where(chances == 0, 0, log_chances))
