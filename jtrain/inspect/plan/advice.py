"""Advice for a step that does not fit, and the largest batch that does."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jtrain.errors import ConfigError, UserError
from jtrain.inspect.plan.plan import Plan, make_plan
from jtrain.inspect.plan.search import Estimates, candidates, current, with_chosen_layout
from jtrain.inspect.plan.topology import Topology
from jtrain.io.formatting import format_bytes
from jtrain.train.experiment import RunConfig
from jtrain.train.program import set_up

SHOWN = 3  # pieces of advice
SLACK = 1.1  # by which the memory of a candidate may be off


class Advice(NamedTuple):
    """Settings that lower the memory of a step."""

    settings: str
    saves: int
    """Bytes on a device, estimated from shapes and the compiled step."""
    fits: bool
    """Whether the step should fit with these settings alone."""


def advise(config: RunConfig, topology: Topology, plan: Plan) -> list[Advice]:
    """Return settings with which the step should fit: the fewest changes first.

    Without one, those that save most. Layouts over sequences or inside products are left to a
    search. A saving is the difference of two estimates by shapes, times the ratio of the compiled
    step to its own.
    """
    config = with_chosen_layout(config, topology)
    estimates, here = Estimates(config, topology), current(config)
    now = estimates.memory(here)
    found: list[tuple[int, Advice]] = []
    for candidate in candidates(config, estimates):
        layout, changes = candidate.parallel, candidate.describe(here)
        if layout != here.parallel and layout.context * layout.tensor > 1:
            continue
        try:
            saves = int((now - estimates.memory(candidate)) * plan.peak / max(now, 1))
        except UserError:
            continue
        if changes and saves > 0.01 * plan.peak:
            fits = (plan.peak - saves) * SLACK <= plan.memory["limit"]
            found.append((len(changes), Advice(" ".join(changes), saves, fits)))
    fitting = [advice for _, advice in sorted(found, key=lambda each: each[0]) if advice.fits]
    most = sorted((advice for _, advice in found), key=lambda each: -each.saves)
    return (fitting or most)[:SHOWN]


def format_advice(found: list[Advice], plan: Plan) -> str:
    """Return the advice as text."""
    over = plan.peak - plan.memory["limit"]
    head = f"It needs {format_bytes(over)} more than a device has. Savings, estimated by shapes:"
    if not found:
        return f"{head} none; take more devices (a larger --topology), or fewer rows (batch)."
    lines = [head]
    for each in found:
        note = "" if each.fits else " (not enough)"
        lines.append(f"  {format_bytes(each.saves):>10}  {each.settings}{note}")
    if not any(each.fits for each in found):
        lines.append(
            "  None is enough: take more devices (a larger --topology), or a smaller model."
        )
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits, and the plans that were made to find it."""

    batch: int
    """0: not even the smallest fits."""
    step: int
    """Batches are multiples of this: devices that split the rows, times microbatches, times groups
    of a pipeline's own microbatches."""
    plans: dict[int, Plan]
    """Plans by batch, in its order."""

    @property
    def proved(self) -> bool:
        """Whether the next larger batch was compiled and does not fit."""
        above = self.plans.get(self.batch + self.step)
        return above is not None and not above.fits

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        peaks = {str(batch): plan.peak for batch, plan in self.plans.items()}
        return {"batch": self.batch, "multiple": self.step, "proved": self.proved, "peaks": peaks}


def find_largest_batch(
    config: RunConfig,
    topology: Topology,
    *,
    compiles: int = 12,
    report: Callable[[str], None] = lambda line: None,
) -> LargestBatch:
    """Return the largest batch that fits with the config's layout and microbatches.

    The memory grows with the rows by a straight line, nearly: two compilations give it, and the
    following ones bracket the largest batch.

    Raises:
        ConfigError: if the memory of a device is not known.
    """
    if not topology.limit:
        raise ConfigError(
            f"--largest-batch: the memory of a device of {topology.name} is not known; write "
            f"--memory GB."
        )
    program = set_up(config, among=topology.devices)
    step, plans = program.resolved.strategy.shares * program.resolved.config.microbatches, {}
    if pipeline := program.resolved.strategy.schedule:
        step *= pipeline.groups  # microbatches enter in groups of as many as there are stages
    low, high = 0, 0  # `low` steps fit, `high` do not; 0: not known
    count = max(config.batch // step, 1)
    while count and len(plans) < compiles:
        batch = count * step
        plan = plans[batch] = make_plan(dataclasses.replace(config, batch=batch), topology)
        words = "fits" if plan.fits else "does not fit"
        report(f"batch={batch}: {format_bytes(plan.peak)}, {words}")
        low, high = (count, high) if plan.fits else (low, count)
        peaks = {batch // step: plan.peak for batch, plan in plans.items()}
        count = _next_count(low, high, peaks, topology.limit)
    return LargestBatch(low * step, step, dict(sorted(plans.items())))


def _next_count(low: int, high: int, peaks: dict[int, int], limit: int) -> int:
    """Return the next count to try: where the line through two peaks meets the limit; 0: none."""
    if high and high == low + 1:
        return 0
    if len(peaks) < 2:
        return 2 * low if low else max(high // 2, 1)
    (x0, y0), *_, (x1, y1) = sorted(peaks.items())
    slope = max((y1 - y0) / (x1 - x0), 1.0)
    guess = int(x0 + (limit - y0) / slope)
    if low and guess in peaks:  # the line's answer is known: the neighbour decides
        guess = low + 1
    return max(low + 1, min(guess, high - 1 if high else 4 * low))


def format_largest_batch(found: LargestBatch) -> str:
    """Return the answer, and the peaks of the batches that were compiled."""
    lines = [
        f"batch={batch:<8} {format_bytes(plan.peak):>10}  {'fits' if plan.fits else 'does not fit'}"
        for batch, plan in found.plans.items()
    ]
    above = found.batch + found.step
    proof = f"{above} does not" if found.proved else f"{above} was not compiled"
    answer = f"the largest batch that fits is {found.batch}; {proof}"
    return "\n".join([*lines, answer if found.batch else f"no batch fits, not even {found.step}"])
