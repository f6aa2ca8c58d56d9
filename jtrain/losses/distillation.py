"""Distillation: a student learns the probabilities of its teacher."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.shapes import check_mask
from jtrain.losses.soft_cross_entropy import refuse_other_width


def distillation(
    student: Float[Array, "b c"],
    teacher: Float[Array, "b n"],
    mask: Bool[Array, "b"],
    *,
    temperature: float = 1.0,
) -> tuple[Mean, Metrics]:
    """Return temperature^2 x KL(teacher, student) in nats a row, of softmax(logits / temperature).

    The square keeps the gradient's size as the temperature changes. The teacher's logits have no
    gradient; its parameters belong in `extra` (`jtrain.stateful`). The metric `agreement` is the
    share of rows with the same likeliest class.

    Raises:
        LossError: if the numbers of classes differ, or the temperature is not positive.

    Source: Hinton et al. 2015, arXiv 1503.02531.
    """
    refuse_other_width(student, teacher, "teacher's logits")
    check_mask(mask, student.shape[:1])
    if not temperature > 0:
        raise LossError(
            f"temperature {temperature} cannot divide the logits. Give a positive number: "
            f"temperature=1.0 changes nothing, 2 to 5 is usual."
        )
    log_chances = [
        jax.nn.log_softmax(jnp.where(mask[:, None], at_least_f32(x), 0) / temperature, -1)
        for x in (jax.lax.stop_gradient(teacher), student)
    ]
    target = jnp.exp(log_chances[0])
    difference = jnp.where(target == 0, 0, log_chances[0]) - log_chances[1]
    values = temperature**2 * jnp.where(target == 0, 0, target * difference).sum(-1)
    agree = (student.argmax(-1) == teacher.argmax(-1)).astype(jnp.float32)
    return Mean.of(values, mask), {"agreement": Mean.of(agree, mask)}
