"""Embeddings of texts: rows in chunks, means of positions, and hard negatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.pytree import at_least_f32
from jtrain.errors import DataError, LossError
from jtrain.models.presets import nearest_divisor

_EQUAL = 1 - 1e-5  # a cosine of equal texts is 1 but for rounding: 1e-6 in float32


def mean_pool(hidden: Float[Array, "b t d"], visible: Bool[Array, "b t"]) -> Float[Array, "b d"]:
    """Return the mean of the vectors at visible positions, of length 1, in at least float32.

    A product of two such embeddings is their cosine.

    Args:
        hidden: the output of an encoder.
        visible: which positions are text and not padding, at least one a row.

    Source: Reimers and Gurevych 2019, https://arxiv.org/abs/1908.10084.
    """
    wide = at_least_f32(hidden)
    weight = visible[..., None].astype(wide.dtype)
    mean = (wide * weight).sum(1) / jnp.maximum(weight.sum(1), 1)
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


def hard_negatives(
    anchors: Float[np.ndarray, "n d"],
    texts: Float[np.ndarray, "m d"],
    own: Int[np.ndarray, "n"],
    *,
    count: int,
    skip: int = 0,
    block: int = 1024,
) -> Int[np.ndarray, "n count"]:
    """Return for each anchor the texts of the largest cosine that are not its own, on the host.

    A text whose embedding is that of the anchor or of its positive (a cosine of 1 within 1e-5) is
    the same text, and no negative.

    Args:
        anchors, texts: embeddings of length 1.
        own: index of each anchor's positive among the texts.
        count: texts to find.
        skip: most similar texts to leave out first, which may be positives that nobody marked.
        block: anchors at once.

    Raises:
        DataError: if there are too few texts.

    Source: Xiong et al. 2020 (ANCE), arXiv 2007.00808, without its updates in training.
    """
    nearest = []
    for start in range(0, len(anchors), block):
        some, positives = anchors[start : start + block], own[start : start + block]
        cosines = some @ texts.T
        equal = (cosines > _EQUAL) | (texts[positives] @ texts.T > _EQUAL)
        equal[np.arange(len(positives)), positives] = True
        _check_count(start, len(texts) - equal.sum(1), count, skip)
        order = np.argsort(np.where(equal, np.inf, -cosines), axis=1, kind="stable")
        nearest.append(order[:, skip : skip + count])
    return np.concatenate(nearest)


def _check_count(start: int, others: Int[np.ndarray, "b"], count: int, skip: int) -> None:
    row = int(others.argmin())
    most = int(others[row])
    if most >= skip + count:
        return
    settings = f"count={most - skip}" if most > skip else f"skip=0 and count={most}"
    raise DataError(
        f"{count} hard negatives after {skip} that are left out were asked for, and {most} of the "
        f"texts are another than anchor {start + row} and its positive. "
        + (f"Set {settings} or less, or give more texts." if most else "Give more texts.")
    )


def map_rows(call: Callable[[Any], Array], rows: Any, chunks: int) -> Array:
    """Return `call(rows)`, computed a chunk of rows after the other.

    The backward pass computes each chunk again, so that the memory of `call` is that of a chunk;
    the outputs of all rows then meet in the loss, whose gradient is that of the whole batch. A
    chunk has rows of every device: rows 0, c, 2 c, ... of c chunks.

    Args:
        call: a function of rows b ... that gives b ..., in which no row depends on another.
        rows: a tree of arrays b ....
        chunks: number of chunks, which divides b; 1 calls the function as it is.

    Raises:
        LossError: if the rows do not divide into the chunks.

    Source: Gao et al. 2021 (GradCache), arXiv 2101.06983.
    """
    count = len(jax.tree.leaves(rows)[0])
    if chunks < 1 or count % chunks:
        raise LossError(
            f"{count} rows do not divide into chunks={chunks}. Set "
            f"chunks={nearest_divisor(count, chunks)}, or another number of rows."
        )
    if chunks == 1:
        return call(rows)
    split = lambda x: x.reshape(count // chunks, chunks, *x.shape[1:]).swapaxes(0, 1)
    outputs = jax.lax.map(jax.checkpoint(call), jax.tree.map(split, rows))
    return outputs.swapaxes(0, 1).reshape(count, *outputs.shape[2:])
