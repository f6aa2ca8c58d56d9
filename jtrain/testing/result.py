"""The result of a step, and the distances between two results."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jtrain.testing.compare import NOTHING, Distance, distance, named_arrays, relative_difference


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


class Cause(NamedTuple):
    """A cause with its explanation; `fault` is False if the cause is reported as no error."""

    name: str
    why: str
    fault: bool = True
