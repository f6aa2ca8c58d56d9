"""The largest batch whose step fits in the memory of a device, by a few compilations."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jtrain.errors import ConfigError
from jtrain.inspect.plan.format import format_bytes
from jtrain.inspect.plan.plan import Plan, make_plan
from jtrain.inspect.plan.topology import Topology
from jtrain.train.experiment import RunConfig
from jtrain.train.setup import set_up

COMPILES = 12


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits, and the plans that were made to find it."""

    batch: int
    """0: not even the smallest fits."""
    step: int
    """Batches are multiples of this: devices that split the rows, times microbatches, times groups
    of a pipeline's own microbatches."""
    plans: dict[int, Plan]
    """Plans by batch."""

    @property
    def proved(self) -> bool:
        """Whether the next larger batch was compiled and does not fit."""
        above = self.plans.get(self.batch + self.step)
        return above is not None and not above.fits

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        peaks = {str(batch): plan.peak for batch, plan in sorted(self.plans.items())}
        return {"batch": self.batch, "multiple": self.step, "proved": self.proved, "peaks": peaks}


def find_largest_batch(
    config: RunConfig,
    topology: Topology,
    *,
    compiles: int = COMPILES,
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
    setup = set_up(config, among=topology.devices)
    step, plans = setup.strategy.shares * setup.config.microbatches, {}
    if setup.strategy.schedule:  # its microbatches enter in groups of as many as there are stages
        step *= setup.strategy.schedule.groups

    def fits(count: int) -> bool:
        batch = count * step
        if batch not in plans:
            plans[batch] = make_plan(dataclasses.replace(config, batch=batch), topology)
            words = "fits" if plans[batch].fits else "does not fit"
            report(f"batch={batch}: {format_bytes(plans[batch].peak)}, {words}")
        return plans[batch].fits

    low, high = 0, 0  # `low` fits, `high` does not; 0: not known
    count = max(config.batch // step, 1)
    while len(plans) < compiles and not (high and high == low + 1):
        if fits(count):
            low = max(low, count)
        else:
            high = count if not high else min(high, count)
        count = _next(
            low, high, {batch // step: plan.peak for batch, plan in plans.items()}, topology
        )
        if not count:
            break
    return LargestBatch(low * step, step, dict(sorted(plans.items())))


def _next(low: int, high: int, peaks: dict[int, int], topology: Topology) -> int:
    """Return the next count to try: where the line through two peaks meets the limit."""
    if high == 1 or (high and high == low + 1):
        return 0
    if len(peaks) < 2:
        return 2 * low if low else max(high // 2, 1)
    (x0, y0), *_, (x1, y1) = sorted(peaks.items())
    slope = max((y1 - y0) / (x1 - x0), 1.0)
    guess = int(x0 + (topology.limit - y0) / slope)
    if low and guess in peaks:  # the line's answer is known: the neighbour decides
        guess = low + 1
    return max(low + 1, min(guess, high - 1 if high else 4 * low, guess if high else 4 * low))


def format_largest_batch(found: LargestBatch) -> str:
    """Return the answer, and the peaks of the batches that were compiled."""
    lines = [
        f"batch={batch:<8} {format_bytes(plan.peak):>10}  {'fits' if plan.fits else 'does not fit'}"
        for batch, plan in sorted(found.plans.items())
    ]
    if not found.batch:
        lines.append(f"no batch fits, not even {found.step}")
        return "\n".join(lines)
    above = found.batch + found.step
    proof = f"{above} does not" if found.proved else f"{above} was not compiled"
    lines.append(f"the largest batch that fits is {found.batch}; {proof}")
    return "\n".join(lines)
