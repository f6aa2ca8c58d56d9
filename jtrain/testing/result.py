"""What a batch gave, however it was split, and how far two of them are apart."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jtrain.testing.compare import NOTHING, Distance, distance, near, numbers


class StepResult(NamedTuple):
    """Loss, gradient, metrics and the state that comes next, on the host."""

    loss: float
    gradient: Any
    state: Mapping[str, Any]  # params, opt_state, extra: what there is
    metrics: Mapping[str, float]
    calls: int = 1  # of the optimizer

    def leaves(self) -> Iterable[str]:
        """The names of the parameters."""
        return numbers(self.gradient)


class Distances(NamedTuple):
    """How far a result is from another, each relative."""

    loss: float
    gradient: Distance
    state: Distance
    metric: Distance  # the worst, with its name

    @property
    def largest(self) -> float:
        """Of them all."""
        return max(self.loss, self.gradient.by, self.state.by, self.metric.by)

    @property
    def worst(self) -> str:
        """The leaf that is furthest off, of gradient or state, or the metric."""
        by = {self.gradient.by: self.gradient.leaf, self.metric.by: f"metrics/{self.metric.leaf}"}
        found = max((self.gradient, self.state, self.metric), key=lambda a: a.by)
        if found.by == 0:
            return ""
        return f"metrics/{found.leaf}" if found is self.metric and by else found.leaf


def distances(got: StepResult, want: StepResult) -> Distances:
    """Of a result from the one that it should be."""
    return Distances(
        loss=near(got.loss, want.loss),
        gradient=distance(got.gradient, want.gradient),
        state=of_states(got.state, want.state, tuple(want.leaves())),
        metric=_of_metrics(got.metrics, want.metrics),
    )


def of_states(got: Any, want: Any, parameters: Iterable[str]) -> Distance:
    """The largest distance of a part: the parameters, and each tree beside them of their shape.

    By parts, for the squares that Adam keeps are far smaller than what stands beside them.
    """
    found, wanted = numbers(got), numbers(want)
    if found.keys() != wanted.keys():
        return Distance(float("inf"), next(iter(found.keys() ^ wanted.keys())))
    parts: dict[str, list[str]] = {}
    for name in wanted:
        parts.setdefault(part_of(name, parameters), []).append(name)
    all_of = [
        distance({n: found[n] for n in names}, {n: wanted[n] for n in names})
        for names in parts.values()
    ]
    return max(all_of, key=lambda a: a.by, default=NOTHING)


def part_of(name: str, parameters: Iterable[str]) -> str:
    """`opt_state/0/mu` of `opt_state/0/mu/blocks/0/kernel`, `blocks/0/kernel` being a parameter."""
    ends = [p for p in parameters if p and name.endswith(f"/{p}")]
    return name[: -len(max(ends, key=len)) - 1] if ends else name


def _of_metrics(got: Mapping[str, float], want: Mapping[str, float]) -> Distance:
    if got.keys() != want.keys():
        return Distance(float("inf"), next(iter(got.keys() ^ want.keys())))
    # A mean of small numbers is as good as one of its size or of 1.
    off = {n: distance({"": got[n], "1": 1.0}, {"": want[n], "1": 1.0}).by for n in want}
    worst = max(off, key=lambda n: off[n], default="")
    return Distance(off[worst], worst) if worst else NOTHING
