"""Losses of each token: cross entropy of the next ones, perplexity, divergence from a teacher."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer, Shaped

from jtrain.core.mean import Mean, Terms
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Batch, Metrics
from jtrain.errors import LossError
from jtrain.losses.cross_entropy import cross_entropy_per_label
from jtrain.losses.shapes import check_labels_shape, spread_weights


def next_token(
    logits: Float[Array, "b t v"],
    targets: Integer[Array, "b t"],
    real: Bool[Array, "b t"],
    weights: Shaped[Array, "b *w"] | None = None,
) -> tuple[Mean, Metrics]:
    """Return nats a token and the accuracy, over the tokens where `real` is true.

    A token counts `weights` times, those of its row or its own (b t).

    A target outside 0 .. v-1 is an error in the first batch, and has the loss of the nearest token
    in a later one, as in `cross_entropy`.

    Raises:
        LossError: if the shapes do not match.
    """
    check_labels_shape(logits, targets, real)
    hits = (logits.argmax(-1) == targets).astype(jnp.float32)
    loss = cross_entropy_per_label(logits, targets)
    each = spread_weights(weights, real.shape)
    return Mean.of(loss, real, each), {"accuracy": Mean.of(hits, real, each)}


def inputs_and_targets(
    batch: Batch,
) -> tuple[Integer[Array, "b t"], Integer[Array, "b t"], Bool[Array, "b t"]]:
    """Return a language batch's inputs, its targets, and which targets are real.

    Inputs and targets are `tokens` (b, t+1) without the last and without the first. The first
    `length` (b,) targets of a row are real if its `mask` is true; without `length` all are. With
    `segments` (b, t+1; 0 is padding), a target is real only in the segment of its input.

    Raises:
        LossError: if the tokens are not whole numbers, or a row has no target.
    """
    tokens, mask = batch["tokens"], batch["mask"]
    if tokens.ndim != 2 or tokens.shape[1] < 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise LossError(
            f"tokens are {tokens.dtype} of shape {list(tokens.shape)}, and a language model learns "
            f"from rows of two whole numbers or more, each the target of those before it. Give "
            f"tokens of shape [rows, t + 1] as np.int32."
        )
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    length = batch.get("length", jnp.full(mask.shape, targets.shape[1], jnp.int32))
    real = jnp.arange(targets.shape[1], dtype=jnp.int32)[None] < length[:, None]
    if (segments := batch.get("segments")) is not None:
        real &= (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return inputs, targets, real & mask[:, None]


def multi_token(
    cross_entropy: Callable[..., tuple[Mean, Any]],
    hidden: Sequence[Float[Array, "b t d"]],
    targets: Integer[Array, "b t"],
    real: Bool[Array, "b t"],
    *,
    weight: float,
) -> tuple[Terms, Metrics]:
    """Return the loss of multi-token prediction, and the cross entropy of each depth as a metric.

    Depth k, from 1, predicts at position i the target i + k, from the k-th of `hidden`. The target
    counts if all of i .. i + k are real: in the row's length, and of one document. The loss is
    `weight` x the mean over depths of their cross entropies, each divided by its own count.

    Args:
        cross_entropy: of (hidden, targets, real), such as `chunked_next_token` with its head.

    Raises:
        LossError: if a row has no target at the last depth.

    Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, equations 24 and 25; Gloeckle et al.
    2024, https://arxiv.org/abs/2404.19737.
    """
    depths, time = len(hidden), targets.shape[1]
    if depths >= time:
        raise LossError(
            f"rows of {time} targets have none at depth {depths} of multi-token prediction. Set "
            f"model.multi_token_depth={time - 1} or less, or give longer rows."
        )
    metrics, counted = {}, real
    for depth, x in enumerate(hidden, 1):
        shift = lambda of, depth=depth: jnp.pad(of[:, depth:], [(0, 0), (0, depth)])
        counted &= shift(real)
        metrics[f"multi_token_{depth}"] = cross_entropy(x, shift(targets), counted)[0]
    return Terms(tuple(metrics.values()), (weight / depths,) * depths), metrics


def segments_of(batch: Batch) -> Integer[Array, "b t"] | None:
    """Return the segments of a language batch's inputs; None if its rows are not packed."""
    segments = batch.get("segments")
    return None if segments is None else segments[:, :-1]


def perplexity(mean_nats: Mean | float) -> float:
    """Return exp of the mean nats, on the host, NaN of NaN; wait for the device.

    Compute it from the mean over all tokens: the mean of the perplexities of batches is not the
    perplexity of all. So runs log and evaluate the loss, in nats.
    """
    mean = mean_nats.value() if isinstance(mean_nats, Mean) else mean_nats
    return math.inf if mean >= 709 else math.exp(mean)  # beyond, float64 has no number for it


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
    _check_divergence(student, teacher, real, temperature, top_k)
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


def _check_divergence(
    student: Array, teacher: Array, real: Array, temperature: float, top_k: int
) -> None:
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
