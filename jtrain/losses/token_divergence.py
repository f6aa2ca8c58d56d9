"""Distillation of a language model: the divergence from a teacher at each token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.shapes import check_labels_shape


def token_divergence(
    student: Float[Array, "b t v"],
    teacher: Float[Array, "b t n"],
    real: Bool[Array, "b t"],
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
) -> tuple[Mean, Metrics]:
    """Return the Kullback-Leibler divergence in nats a token, over the tokens that are real.

    Forward, KL(teacher || student), covers all that the teacher says; reverse, KL(student ||
    teacher), prefers the student to say nothing that the teacher would not. The teacher has no
    gradient. The metric `agreement` is the share of tokens whose likeliest token is the teacher's.

    Args:
        temperature: divides the logits of both; the value is multiplied by its square, so that
            gradients keep their size.
        top_k: compare the teacher's likeliest tokens alone, both distributions scaled to add up to
            1 over them; 0: all.

    Raises:
        LossError: if a number is out of its range, or the shapes differ.

    Source: Hinton et al. 2015, arXiv 1503.02531; reverse: Gu et al. 2023 (MiniLLM), arXiv
    2306.08543, equation 1.
    """
    _check(student, teacher, real, temperature, top_k)
    places = real[..., None]
    student_logits = jnp.where(places, at_least_f32(student), 0)
    teacher_logits = jax.lax.stop_gradient(jnp.where(places, at_least_f32(teacher), 0))
    agree = (student_logits.argmax(-1) == teacher_logits.argmax(-1)).astype(jnp.float32)
    if top_k:
        teacher_logits, at = jax.lax.top_k(teacher_logits, top_k)
        student_logits = jnp.take_along_axis(student_logits, at, -1)
    logits = (student_logits, teacher_logits) if reverse else (teacher_logits, student_logits)
    log_p, log_q = (jax.nn.log_softmax(z / temperature, -1) for z in logits)
    possible = log_p > -jnp.inf  # 0 log 0 is 0, and has no gradient
    gaps = jnp.where(possible, log_p, 0) - jnp.where(possible, log_q, 0)
    values = temperature**2 * (jnp.exp(log_p) * gaps).sum(-1)
    return Mean.of(values, real), {"agreement": Mean.of(agree, real)}


def _check(student: Array, teacher: Array, real: Array, temperature: float, top_k: int) -> None:
    check_labels_shape(student, real, real)
    if student.shape != teacher.shape:
        raise LossError(
            f"student and teacher give logits of shapes {student.shape} and {teacher.shape}. "
            f"Distillation compares them token by token: both need one tokenizer and vocabulary."
        )
    if not temperature > 0:
        raise LossError(f"temperature {temperature} must be above 0: temperature=1 changes nothing")
    if not 0 <= top_k <= student.shape[-1]:
        raise LossError(
            f"top_k {top_k} is to be a number of the {student.shape[-1]} tokens; 0 takes all."
        )
