"""What is wrong where loss and gradient are right and the state that comes of them is not."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from jtrain.testing.cause import Cause
from jtrain.testing.compare import distance, multiple, numbers
from jtrain.testing.failed_step import MATCH, FailedSplit
from jtrain.testing.result import distances, part_of
from jtrain.testing.row_sums import CompiledRowSums, added

# (the name of a part of the state, the tree of before, got or wanted) -> its numbers, in a row
Part: TypeAlias = Callable[[str, dict[str, np.ndarray]], np.ndarray]


def cause_of_state(case: FailedSplit) -> Cause | None:
    """Why the state differs; None where it does not, or where loss and gradient do already."""
    before = distances(case.got, case.want)
    if max(before.loss, before.gradient.by) > case.tolerance:
        return None
    got, want = numbers(case.got.state), numbers(case.want.state)
    off = [n for n in want if n not in got or distance(got[n], want[n]).by > case.tolerance]
    if not off:
        return None
    parameters = tuple(case.want.leaves())

    def part(where: str, tree: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([tree[f"{where}/{p}" if p else where].ravel() for p in parameters])

    wrong = {part_of(name, parameters) for name in off}
    if "params" in wrong:
        return _of_params(case, part)
    whole = {w for w in wrong if all((f"{w}/{p}" if p else w) in want for p in parameters)}
    found = _of_average(case, part, sorted(whole)) or _of_extra(case, off)
    return found or Cause(
        "state", f"loss and gradient are right, and {off[0]} of the next state is not."
    )


def _of_params(case: FailedSplit, part: Part) -> Cause:
    """The parameters themselves are off."""
    got, want, old = (numbers(tree) for tree in (case.got.state, case.want.state, case.start))
    times, left = multiple(part("params", got) - part("params", want), part("params", old))
    if left < 10 * MATCH:
        return Cause(
            "decay per part",
            f"the gradient is right, and the parameters come out {times:.3g} times their old "
            f"selves further off: weight decay acts again for each {case.noun}. Let the optimizer "
            f"decay, once a step.",
        )
    return Cause(
        "update", "the gradient is right and the parameters after the step are not: the update."
    )


def _of_average(case: FailedSplit, part: Part, parts: list[str]) -> Cause | None:
    """Something of the shape of the parameters lags behind them."""
    got, want, old = (numbers(tree) for tree in (case.got.state, case.want.state, case.start))
    moved = part("params", want) - part("params", old)
    for where in parts:
        times, left = multiple(part(where, got) - part(where, want), moved)
        if left < 100 * MATCH:
            return Cause(
                "stale average",
                f"{where} is behind by {-times:.3g} of the step that the parameters took: it "
                f"averages those of before the update. Average what comes out of the step.",
            )
    return None


def _of_extra(case: FailedSplit, off: list[str]) -> Cause | None:
    """Running statistics are those of one part."""
    extra = sorted(name for name in off if name.startswith("extra"))
    if not extra or case.count == 1:
        return None
    rows, got = CompiledRowSums(case.of), numbers(case.got.state)
    for place, word in ((-1, "last"), (0, "first")):
        alone = numbers(added([rows(case.parts[place])], case.of).state)
        if all(distance(got[name], alone[name]).by <= MATCH for name in extra):
            return Cause(
                "statistics of one part",
                f"{extra[0]} is what the {word} {case.noun} alone gives: running statistics of "
                f"the others are lost. Sum them as Means.",
            )
    return None
