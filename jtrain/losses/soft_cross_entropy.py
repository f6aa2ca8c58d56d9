"""Cross entropy with soft labels: a chance for each class."""

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
    """Minus the sum of chance x log softmax(logits), in nats a row where `mask` holds.

    The metric `accuracy` is how often the likeliest class is that of the greatest chance. `chances`
    are taken as they are, a sum of 1 is not asked for, and have no gradient.

    Raises:
        LossError: if there are not as many chances as logits.
    """
    refuse_other_width(logits, chances, "chances")
    check_mask(mask, logits.shape[:1])
    seen = mask[:, None]
    wide = jnp.where(seen, at_least_f32(logits), 0)  # what a mask hides may be NaN
    wanted = jax.lax.stop_gradient(jnp.where(seen, at_least_f32(chances), 0))
    values = -_shares(wanted, jax.nn.log_softmax(wide, -1)).sum(-1)
    hits = (wide.argmax(-1) == wanted.argmax(-1)).astype(jnp.float32)
    return Mean.of(values, mask), {"accuracy": Mean.of(hits, mask)}


def refuse_other_width(
    logits: Float[Array, "b c"], others: Float[Array, "b n"], called: str
) -> None:
    """Raises LossError where `others` has another number of classes."""
    if logits.shape != others.shape:
        raise LossError(
            f"the logits have {logits.shape[-1]} classes and the {called} {others.shape[-1]}. Give "
            f"{called} of shape {logits.shape}, one a class; integer labels are for cross_entropy."
        )


def _shares(chances, log_chances):
    """Of a class of chance 0 nothing, be its logit minus infinity."""
    return jnp.where(chances == 0, 0, chances * jnp.where(chances == 0, 0, log_chances))
