"""Embeddings of texts from the vectors of their positions."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.pytree import at_least_f32
from jtrain.errors import DataError


def mean_pool(
    hidden: Float[Array, "b t d"], visible: Bool[Array, "b t"], *, normalise: bool = True
) -> Float[Array, "b d"]:
    """Return the mean of the vectors at visible positions, of length 1, in at least float32.

    Args:
        hidden: the output of an encoder.
        visible: which positions are text and not padding, at least one a row.
        normalise: divide by the length, so that a product of two embeddings is their cosine.

    Source: Reimers and Gurevych 2019, https://arxiv.org/abs/1908.10084.
    """
    wide = at_least_f32(hidden)
    weight = visible[..., None].astype(wide.dtype)
    mean = (wide * weight).sum(1) / jnp.maximum(weight.sum(1), 1)
    if not normalise:
        return mean
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
    if len(texts) < skip + count + 1:
        others = len(texts) - 1
        raise DataError(
            f"{count} hard negatives after {skip} that are left out were asked for, and beside an "
            f"anchor's own text there are {others}. Set count={max(others - skip, 0)} or less, or "
            f"give more texts."
        )
    found = []
    for start in range(0, len(anchors), block):
        cosines = anchors[start : start + block] @ texts.T
        mine = own[start : start + block]
        cosines[np.arange(len(mine)), mine] = -np.inf
        order = np.argsort(-cosines, axis=1, kind="stable")
        found.append(order[:, skip : skip + count])
    return np.concatenate(found)
