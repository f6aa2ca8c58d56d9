"""Marks on values that a loss takes from a batch, for the check of a run's first batch."""

import re
from typing import Literal, TypeAlias

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Integer, Shaped

MARK = re.compile(r"integers below (\d+), for an array of shape \(([\d, ]*)\)")
DOMAIN = re.compile(r"values that are (probabilities|weights of classes|distributions)")
Domain: TypeAlias = Literal["probabilities", "weights of classes", "distributions"]


def in_range(
    labels: Integer[Array, "*b"], array: Shaped[Array, "..."], dim: int
) -> Integer[Array, "*b"]:
    """Return `labels`, marked as integers that choose among the entries of a dim of `array`.

    `train.first_batch.index_uses` finds the mark. It adds no operation to the compiled program.
    """
    shape = jnp.shape(array)
    return checkpoint_name(labels, f"integers below {shape[dim]}, for an array of shape {shape}")


def in_domain(values: Shaped[Array, "*s"], domain: Domain) -> Shaped[Array, "*s"]:
    """Return `values`, marked as those for which a loss is defined.

    Probabilities are in 0 .. 1, weights of classes at least 0, and distributions add up to 1 over
    the last dim as well. `train.first_batch.domains` looks them up. No operation is added.
    """
    return checkpoint_name(values, f"values that are {domain}")
