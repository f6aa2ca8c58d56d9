"""Checks of the arguments of a loss: their shapes at once, their values in a run's first batch."""

import re
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Integer, Shaped

from jtrain.errors import LossError


def check_same_shape(
    outputs: Any, targets: Any, mask: Any, names: tuple[str, str] = ("outputs", "targets")
) -> None:
    """Raise unless two arrays have one shape, and `mask` one value a row."""
    shape, other = jnp.shape(outputs), jnp.shape(targets)
    if shape != other:
        one, two = names
        narrow = f"{one}[..., 0]" if len(shape) > len(other) else f"{one}[..., None]"
        raise LossError(
            f"{one} and {two} are compared element by element, and have the shapes {shape} and "
            f"{other}. Give both one shape: {narrow}, or {two}.reshape({one}.shape)."
        )
    check_mask(mask, shape[:1])


def check_labels_shape(logits: Any, labels: Any, mask: Any) -> None:
    """Raise unless each vector of logits has a label and a value of `mask`."""
    shape, other = jnp.shape(logits), jnp.shape(labels)
    if shape[:-1] != other:
        squeezed = other == (*shape[:-1], 1)
        advice = "labels[..., 0]" if squeezed else f"labels of shape {shape[:-1]}"
        soft = "; chances, one a class, are for soft_cross_entropy" if shape == other else ""
        raise LossError(
            f"logits of shape {shape} take a label for each vector of {shape[-1]}, and the labels "
            f"have the shape {other}. Give {advice}{soft}."
        )
    if jnp.issubdtype(jnp.result_type(labels), jnp.inexact):
        raise LossError(
            f"labels are whole numbers that count classes from 0, and these are "
            f"{jnp.result_type(labels)}, of which a cast would drop the fraction. Give "
            f"labels.astype(jnp.int32)."
        )
    check_mask(mask, shape[:-1])


def check_mask(mask: Any, shape: tuple[int, ...]) -> None:
    """Raise unless a mask has a value for each row."""
    if jnp.shape(mask) != shape:
        raise LossError(
            f"the mask has the shape {jnp.shape(mask)}, and the masked values {shape}. Give a "
            f'mask of shape {shape}: batch["mask"] has one value a row.'
        )


def spread_weights(weights: Any, shape: tuple[int, ...]) -> Any:
    """Return weights of rows, or of some leading dims, for each number of `shape`; None of None.

    Raises:
        LossError: with both shapes.
    """
    if weights is None:
        return None
    found = jnp.shape(weights)
    if found != shape[: len(found)] or not found:
        raise LossError(
            f"the weights have the shape {found}, and the weighted values {shape}. Give one weight "
            f"a row, of shape {shape[:1]}, such as weight.reshape(-1)."
        )
    return jnp.broadcast_to(jnp.expand_dims(weights, range(len(found), len(shape))), shape)


MARK = re.compile(r"integers below (\d+), for an array of shape \(([\d, ]*)\)")
DOMAIN = re.compile(r"values that are (probabilities|weights of classes|distributions)")
Domain: TypeAlias = Literal["probabilities", "weights of classes", "distributions"]


def in_range(
    labels: Integer[Array, "*b"], array: Shaped[Array, "..."], dim: int
) -> Integer[Array, "*b"]:
    """Return `labels`, marked as integers that choose among the entries of a dim of `array`.

    `train.check_batch.uses` finds the mark. It adds no operation to the compiled program.
    """
    shape = jnp.shape(array)
    return checkpoint_name(labels, f"integers below {shape[dim]}, for an array of shape {shape}")


def in_domain(values: Shaped[Array, "*s"], domain: Domain) -> Shaped[Array, "*s"]:
    """Return `values`, marked as those for which a loss is defined.

    Probabilities are in 0 .. 1, weights of classes at least 0, and distributions add up to 1 over
    the last dim as well. `train.check_batch.uses` looks them up. No operation is added.
    """
    return checkpoint_name(values, f"values that are {domain}")
