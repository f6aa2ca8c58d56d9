"""Results of a step, and relative distances between results, with the leaf that differs most."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.pytree import named_leaves

INFINITE = float("inf")


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
    found, wanted = named_arrays(actual), named_arrays(expected)
    squares = {n: _square(found.get(n), wanted.get(n)) for n in {**wanted, **found}}
    worst = max(squares, key=lambda n: squares[n], default="")
    total = sum(squares.values())
    with np.errstate(over="ignore"):
        size = sum(float(np.sum(np.square(x))) for x in wanted.values() if x.dtype.kind == "f")
    if total == 0:
        return NOTHING
    return Distance((total / size) ** 0.5 if 0 < size < INFINITE else INFINITE, worst)


def _square(actual: np.ndarray | None, expected: np.ndarray | None) -> float:
    if actual is None or expected is None or actual.shape != expected.shape:
        return INFINITE
    floats = expected.dtype.kind == "f"
    if np.array_equal(actual, expected, equal_nan=floats):
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        square = float(np.sum(np.square(actual - expected))) if floats else INFINITE
    return square if np.isfinite(square) else INFINITE


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


def fit_multiple(actual: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return the least-squares factor from `expected` to `actual`, and the relative residual."""
    if actual.shape != expected.shape or not np.isfinite(actual).all() or not np.any(expected):
        return float("nan"), INFINITE
    factor = float(actual @ expected / (expected @ expected))
    scale = max(np.linalg.norm(actual), abs(factor) * np.linalg.norm(expected), 1e-300)
    return factor, float(np.linalg.norm(actual - factor * expected) / scale)


def _host(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    if array.dtype.kind == "c":
        array = np.stack([np.real(array), np.imag(array)])
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


class StepResult(NamedTuple):
    """Loss, gradient, next state and metrics of a step, as numpy arrays."""

    loss: float
    gradient: Any
    state: Mapping[str, Any]  # params, opt_state, extra: those that exist
    metrics: Mapping[str, float]
    calls: int = 1  # calls of the optimizer

    @property
    def finite(self) -> bool:
        """True if loss, gradient and state are finite; a metric of no row may be NaN."""
        trees = np.float64(self.loss), flatten(self.gradient), flatten(self.state)
        return all(np.isfinite(x).all() for x in trees)


class Distances(NamedTuple):
    """Relative distances between two results."""

    loss: Distance = NOTHING
    gradient: Distance = NOTHING
    state: Distance = NOTHING
    metrics: Distance = NOTHING

    @property
    def worst(self) -> Distance:
        """Largest of the four, with the name of its leaf."""
        return max(self, key=lambda each: each.by)

    @property
    def largest(self) -> float:
        """Largest of the four distances."""
        return self.worst.by


def compare_results(actual: StepResult, expected: StepResult) -> Distances:
    """Return the distances of a result from the expected one."""
    return Distances(
        loss=Distance(relative_difference(actual.loss, expected.loss), "loss"),
        gradient=distance(actual.gradient, expected.gradient),
        state=_compare_states(actual.state, expected.state, tuple(named_arrays(expected.gradient))),
        metrics=_compare_metrics(actual.metrics, expected.metrics),
    )


def _compare_states(actual: Any, expected: Any, parameters: Iterable[str]) -> Distance:
    """Return the largest distance over the parameters and each state tree of their structure.

    Each tree is compared by itself, because Adam's second moments are far smaller than the
    parameters and would vanish in a common norm.
    """
    trees: dict[str, tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = {}
    for i, leaves in enumerate((named_arrays(actual), named_arrays(expected))):
        for name, leaf in leaves.items():
            trees.setdefault(_state_tree_of(name, parameters), ({}, {}))[i][name] = leaf
    each = [distance(found, wanted) for found, wanted in trees.values()]
    return max(each, key=lambda a: a.by, default=NOTHING)


def _state_tree_of(name: str, parameters: Iterable[str]) -> str:
    """Return the name of the state tree that holds a leaf.

    `opt_state/0/mu/blocks/0/kernel` gives `opt_state/0/mu` if `blocks/0/kernel` is a parameter.
    """
    matching = [p for p in parameters if p and name.endswith(f"/{p}")]
    return name[: -len(max(matching, key=len)) - 1] if matching else name


def _compare_metrics(actual: Mapping[str, float], expected: Mapping[str, float]) -> Distance:
    # Relative to the metric's size, but at least to 1: small numbers are compared absolutely.
    beside = lambda metrics, name: {f"metrics/{name}": metrics.get(name, np.nan), "1": 1.0}
    names = {**expected, **actual}
    each = [distance(beside(actual, n), beside(expected, n)) for n in names]
    return max(each, key=lambda a: a.by, default=NOTHING)
