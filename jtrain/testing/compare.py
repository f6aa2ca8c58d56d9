"""Results of a step, and relative distances between results, with the leaf that differs most."""

from collections.abc import Iterable, Mapping
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


class StepResult(NamedTuple):
    """Loss, gradient, next state and metrics of a step, as numpy arrays."""

    loss: float
    gradient: Any
    state: Mapping[str, Any]  # params, opt_state, extra: those that exist
    metrics: Mapping[str, float]
    calls: int = 1  # calls of the optimizer

    def leaves(self) -> Iterable[str]:
        """Return the names of the parameters."""
        return named_arrays(self.gradient)


class Distances(NamedTuple):
    """Relative distances between two results."""

    loss: float
    gradient: Distance
    state: Distance
    metric: Distance  # the largest, with the metric's name

    @property
    def largest(self) -> float:
        """Largest of the four distances."""
        return max(self.loss, self.gradient.by, self.state.by, self.metric.by)

    @property
    def worst(self) -> str:
        """Name of the leaf or metric with the largest distance; empty if all are 0."""
        by = {self.gradient.by: self.gradient.leaf, self.metric.by: f"metrics/{self.metric.leaf}"}
        found = max((self.gradient, self.state, self.metric), key=lambda a: a.by)
        if found.by == 0:
            return ""
        return f"metrics/{found.leaf}" if found is self.metric and by else found.leaf


def compare_results(actual: StepResult, expected: StepResult) -> Distances:
    """Return the distances of a result from the expected one."""
    return Distances(
        loss=relative_difference(actual.loss, expected.loss),
        gradient=distance(actual.gradient, expected.gradient),
        state=compare_states(actual.state, expected.state, tuple(expected.leaves())),
        metric=_compare_metrics(actual.metrics, expected.metrics),
    )


def compare_states(actual: Any, expected: Any, parameters: Iterable[str]) -> Distance:
    """Return the largest distance over the parameters and each state tree of their structure.

    Each tree is compared by itself, because Adam's second moments are far smaller than the
    parameters and would vanish in a common norm.
    """
    found, wanted = named_arrays(actual), named_arrays(expected)
    if found.keys() != wanted.keys():
        return Distance(float("inf"), next(iter(found.keys() ^ wanted.keys())))
    parts: dict[str, list[str]] = {}
    for name in wanted:
        parts.setdefault(state_tree_of(name, parameters), []).append(name)
    part_distances = [
        distance({n: found[n] for n in names}, {n: wanted[n] for n in names})
        for names in parts.values()
    ]
    return max(part_distances, key=lambda a: a.by, default=NOTHING)


def state_tree_of(name: str, parameters: Iterable[str]) -> str:
    """Return the name of the state tree that holds a leaf.

    `opt_state/0/mu/blocks/0/kernel` gives `opt_state/0/mu` if `blocks/0/kernel` is a parameter.
    """
    matching = [p for p in parameters if p and name.endswith(f"/{p}")]
    return name[: -len(max(matching, key=len)) - 1] if matching else name


def _compare_metrics(actual: Mapping[str, float], expected: Mapping[str, float]) -> Distance:
    if actual.keys() != expected.keys():
        return Distance(float("inf"), next(iter(actual.keys() ^ expected.keys())))
    # Relative to the metric's size, but at least to 1: small numbers are compared absolutely.
    distances_of = {
        n: distance({"": actual[n], "1": 1.0}, {"": expected[n], "1": 1.0}).by for n in expected
    }
    worst = max(distances_of, key=lambda n: distances_of[n], default="")
    return Distance(distances_of[worst], worst) if worst else NOTHING
