"""How far apart two results are, and which leaf is the worst."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.pytree import named_leaves


class Distance(NamedTuple):
    """A relative distance, and the leaf that makes most of it."""

    by: float
    leaf: str = ""


NOTHING = Distance(0.0)


def distance(got: Any, want: Any) -> Distance:
    """The 2-norm of the difference over that of `want`, over all leaves together, in float64.

    Infinite where a structure, a shape or a whole number differs, or one of the two is not finite.
    """
    found, wanted = numbers(got), numbers(want)
    if {n: x.shape for n, x in found.items()} != {n: x.shape for n, x in wanted.items()}:
        return Distance(float("inf"), _first_other(found, wanted))
    squares = {}
    for name, exact in wanted.items():
        here = found[name]
        if exact.dtype.kind in "iub":
            if not np.array_equal(here, exact):
                return Distance(float("inf"), name)
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            squares[name] = float(np.sum(np.square(here - exact)))
    whole = sum(float(np.sum(np.square(x))) for x in wanted.values() if x.dtype.kind == "f")
    total, worst = sum(squares.values()), max(squares, key=lambda n: _rank(squares[n]), default="")
    if not np.isfinite(total) or not np.isfinite(whole):
        return NOTHING if _same_bits(found, wanted) else Distance(float("inf"), worst)
    if total == 0:
        return NOTHING
    return Distance((total / whole) ** 0.5 if whole else float("inf"), worst)


def near(got: float, want: float) -> float:
    """The relative difference of two numbers; 0 where both are NaN."""
    return distance(np.float64(got), np.float64(want)).by


def numbers(tree: Any) -> dict[str, np.ndarray]:
    """Each leaf by its name, on the host: floats in float64, keys as their data."""
    if isinstance(tree, Mapping) and not tree:
        return {}
    return {name: _host(leaf) for name, leaf in named_leaves(tree).items()}


def flatten(tree: Any) -> np.ndarray:
    """All floats of a tree one after the other, in float64."""
    parts = [x.ravel() for x in numbers(tree).values() if x.dtype.kind == "f"]
    return np.concatenate(parts) if parts else np.zeros(0)


def multiple(got: Any, want: Any) -> tuple[float, float]:
    """The number that `want` is best multiplied by to be `got`, and what is left, relative."""
    a, b = flatten(got), flatten(want)
    if a.shape != b.shape or not np.isfinite(a).all() or not (b @ b) > 0:
        return float("nan"), float("inf")
    times = float(a @ b / (b @ b))
    scale = max(float(np.linalg.norm(a)), abs(times) * float(np.linalg.norm(b)), 1e-300)
    return times, float(np.linalg.norm(a - times * b)) / scale


def _host(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def _rank(square: float) -> float:
    return square if np.isfinite(square) else float("inf")


def _same_bits(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> bool:
    return all(
        np.array_equal(found[n], x, equal_nan=x.dtype.kind == "f") for n, x in wanted.items()
    )


def _first_other(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> str:
    shape = lambda tree, name: tree[name].shape if name in tree else None
    return next(n for n in {**wanted, **found} if shape(found, n) != shape(wanted, n))
