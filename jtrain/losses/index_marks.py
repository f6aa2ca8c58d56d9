"""Marks on integers that choose entries of an array, for the check of a run's first batch."""

import re

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Integer, Shaped

MARK = re.compile(r"integers below (\d+), for an array of shape \(([\d, ]*)\)")


def in_range(
    labels: Integer[Array, "*b"], array: Shaped[Array, "..."], dim: int
) -> Integer[Array, "*b"]:
    """Return `labels`, marked as integers that choose among the entries of a dim of `array`.

    `train.first_batch.index_uses` finds the mark. It adds no operation to the compiled program.
    """
    shape = jnp.shape(array)
    return checkpoint_name(labels, f"integers below {shape[dim]}, for an array of shape {shape}")
