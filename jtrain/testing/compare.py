"""Relative distances between trees, with the leaf that differs most."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.pytree import named_leaves


class Distance(NamedTuple):
    """A relative distance, and the leaf that contributes most to it."""

    by: float
    leaf: str = ""


NOTHING = Distance(0.0)


def distance(actual: Any, expected: Any) -> Distance:
    """Return the 2-norm of the difference over that of `expected`, over all leaves, in float64.

    The distance is infinite if a structure, a shape or an integer differs, or if one tree is not
    finite.
    """
    actual_leaves, expected_leaves = named_arrays(actual), named_arrays(expected)
    if {n: x.shape for n, x in actual_leaves.items()} != {
        n: x.shape for n, x in expected_leaves.items()
    }:
        return Distance(float("inf"), _first_difference(actual_leaves, expected_leaves))
    squares = {}
    for name, exact in expected_leaves.items():
        leaf = actual_leaves[name]
        if exact.dtype.kind in "iub":
            if not np.array_equal(leaf, exact):
                return Distance(float("inf"), name)
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            squares[name] = float(np.sum(np.square(leaf - exact)))
    size = sum(float(np.sum(np.square(x))) for x in expected_leaves.values() if x.dtype.kind == "f")
    total, worst = sum(squares.values()), max(squares, key=lambda n: _rank(squares[n]), default="")
    if not np.isfinite(total) or not np.isfinite(size):
        return (
            NOTHING if _same_bits(actual_leaves, expected_leaves) else Distance(float("inf"), worst)
        )
    if total == 0:
        return NOTHING
    return Distance((total / size) ** 0.5 if size else float("inf"), worst)


def relative_difference(actual: float, expected: float) -> float:
    """Return the relative difference of two numbers; 0 if both are NaN."""
    return distance(np.float64(actual), np.float64(expected)).by


def named_arrays(tree: Any) -> dict[str, np.ndarray]:
    """Return the leaves by name as numpy arrays: floats in float64, keys as their data."""
    if isinstance(tree, Mapping) and not tree:
        return {}
    return {name: _host(leaf) for name, leaf in named_leaves(tree).items()}


def flatten(tree: Any) -> np.ndarray:
    """Return all floats of a tree as one float64 vector."""
    parts = [x.ravel() for x in named_arrays(tree).values() if x.dtype.kind == "f"]
    return np.concatenate(parts) if parts else np.zeros(0)


def fit_multiple(actual: Any, expected: Any) -> tuple[float, float]:
    """Return the least-squares factor from `expected` to `actual`, and the relative residual."""
    a, b = flatten(actual), flatten(expected)
    if a.shape != b.shape or not np.isfinite(a).all() or not (b @ b) > 0:
        return float("nan"), float("inf")
    factor = float(a @ b / (b @ b))
    scale = max(float(np.linalg.norm(a)), abs(factor) * float(np.linalg.norm(b)), 1e-300)
    return factor, float(np.linalg.norm(a - factor * b)) / scale


def _host(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    if array.dtype.kind == "c":
        array = np.stack([np.real(array), np.imag(array)])
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def _rank(square: float) -> float:
    return square if np.isfinite(square) else float("inf")


def _same_bits(
    actual_leaves: Mapping[str, np.ndarray], expected_leaves: Mapping[str, np.ndarray]
) -> bool:
    return all(
        np.array_equal(actual_leaves[n], x, equal_nan=x.dtype.kind == "f")
        for n, x in expected_leaves.items()
    )


def _first_difference(
    actual_leaves: Mapping[str, np.ndarray], expected_leaves: Mapping[str, np.ndarray]
) -> str:
    shape = lambda tree, name: tree[name].shape if name in tree else None
    return next(
        n
        for n in {**expected_leaves, **actual_leaves}
        if shape(actual_leaves, n) != shape(expected_leaves, n)
    )
