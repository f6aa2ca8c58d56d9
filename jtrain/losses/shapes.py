"""Shapes that belong together, told before NumPy's rules broadcast them to something else."""

from typing import Any

import jax.numpy as jnp

from jtrain.errors import LossError


def check_same_shape(
    outputs: Any, targets: Any, mask: Any, called: tuple[str, str] = ("outputs", "targets")
) -> None:
    """Check that two arrays have one shape, and that `mask` is one of their rows.

    Raises:
        LossError: with both shapes, and how to give one the other's.
    """
    shape, other = jnp.shape(outputs), jnp.shape(targets)
    if shape != other:
        one, two = called
        narrow = f"{one}[..., 0]" if len(shape) > len(other) else f"{one}[..., None]"
        raise LossError(
            f"{one} and {two} are taken element by element, and have the shapes {shape} and "
            f"{other}. Give both one shape: {narrow}, or {two}.reshape({one}.shape)."
        )
    check_mask(mask, shape[:1])


def check_labels_shape(logits: Any, labels: Any, mask: Any) -> None:
    """Check that there is a label, and a place of `mask`, for each vector of logits.

    Raises:
        LossError: with both shapes, and how to give labels theirs.
    """
    shape, other = jnp.shape(logits), jnp.shape(labels)
    if shape[:-1] != other:
        squeezed = other == (*shape[:-1], 1)
        advice = "labels[..., 0]" if squeezed else f"labels of shape {shape[:-1]}"
        soft = "; chances, one a class, are for soft_cross_entropy" if shape == other else ""
        raise LossError(
            f"logits of shape {shape} take a label for each vector of {shape[-1]}, and the labels "
            f"have the shape {other}. Give {advice}{soft}."
        )
    check_mask(mask, shape[:-1])


def check_mask(mask: Any, shape: tuple[int, ...]) -> None:
    """Check that a mask has a place for each value.

    Raises:
        LossError: with both shapes.
    """
    if jnp.shape(mask) != shape:
        raise LossError(
            f"the mask has the shape {jnp.shape(mask)}, and what it hides or shows {shape}. Give a "
            f'mask of shape {shape}: batch["mask"] is one of rows.'
        )
