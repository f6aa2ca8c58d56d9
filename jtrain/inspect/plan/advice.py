"""Advice for a step that does not fit, and the largest batch that does."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jtrain.errors import ConfigError, UserError
from jtrain.inspect.plan.plan import Plan, make_plan
from jtrain.inspect.plan.search import Candidate, Costs, candidates, current, describe_layout
from jtrain.inspect.plan.topology import Topology
from jtrain.io.formatting import format_bytes
from jtrain.train.experiment import RunConfig
from jtrain.train.program import set_up

SHOWN = 3  # combinations
COMPILES = 3  # pieces of advice that are compiled
SLACK = 1.1  # by which the memory of a candidate may be off


class Advice(NamedTuple):
    """Settings that lower the memory of a step."""

    settings: str
    saves: int
    """Bytes on a device, estimated from shapes and the compiled step."""
    fits: bool
    """Whether the step fits with these settings alone, by the estimate."""
    candidate: Candidate
    compiled: bool = False
    """`saves` and `fits` are the compiler's."""

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return {name: value for name, value in self._asdict().items() if name != "candidate"}


def advise(config: RunConfig, topology: Topology, plan: Plan) -> list[Advice]:
    """Return what each setting saves, and two or three together if none alone makes the step fit.

    A saving is the difference of two analytic estimates, times the ratio of the compiled step to
    its own. Of those that fit the first saves least, for it also computes and sends least more.
    """
    costs, here = Costs(config, topology), current(config)
    now = costs.memory(here)
    ratio = plan.peak / max(now, 1)

    def judge(changes: Iterable[dict[str, Any]]) -> list[Advice]:
        found: dict[str, Advice] = {}
        for change in changes:
            candidate = here._replace(**change)
            try:
                candidate.apply(config)
                saves = int((now - costs.memory(candidate)) * ratio)
            except UserError:
                continue
            if saves > 0.01 * plan.peak:
                settings = _describe(change, here)
                advice = Advice(settings, saves, _fits(plan, saves), candidate)
                found.setdefault(settings, advice)
        return sorted(found.values(), key=lambda each: (not each.fits, each.saves))

    changes = list(_changes(config, topology, costs, here))
    single = judge(changes)
    if any(each.fits for each in single):
        return single
    together = [each for each in judge(_combinations(changes)) if each.fits]
    return [*together[:SHOWN], *reversed(single)]


def check_advice(
    found: list[Advice], config: RunConfig, topology: Topology, plan: Plan
) -> list[Advice]:
    """Return the advice with those that should fit compiled, one by one, until one does fit.

    Where a step does not fit after all, the savings of the others are scaled by its error.
    """
    checked: list[Advice] = []
    for _ in range(COMPILES):
        each = next((each for each in found if each.fits), None)
        if each is None:
            break
        found = [other for other in found if other is not each]
        try:
            made = make_plan(each.candidate.apply(config), topology)
        except UserError:  # the layout does not suit the model
            continue
        saves = plan.peak - made.peak
        checked.append(each._replace(saves=saves, fits=made.fits, compiled=True))
        if made.fits:
            break
        error = min(saves / each.saves, 1.0)
        for i, other in enumerate(found):
            less = int(other.saves * error)
            found[i] = other._replace(saves=less, fits=other.fits and _fits(plan, less))
    return sorted([*checked, *found], key=lambda each: not (each.fits and each.compiled))


def _fits(plan: Plan, saves: int) -> bool:
    return (plan.peak - saves) * SLACK <= plan.memory["limit"]


def _changes(
    config: RunConfig, topology: Topology, costs: Costs, here: Candidate
) -> Iterator[dict[str, Any]]:
    """Yield changed values of a candidate, of one kind each."""
    if here.remat and here.remat != "full":
        yield {"remat": "full", "saved": ()}
    for count in (here.microbatches * factor for factor in (2, 4, 8)):
        if config.batch % (count * len(topology.devices)) == 0:
            yield {"microbatches": count}
    layouts = [
        each.parallel
        for each in candidates(config, topology, costs)
        if each.microbatches == here.microbatches
        and each.parallel.context == each.parallel.tensor == 1
    ]
    size = lambda layout: costs.memory(here._replace(parallel=layout))
    for offload in (False, True):
        if found := [layout for layout in layouts if bool(layout.offload) == offload]:
            yield {"parallel": dataclasses.replace(min(found, key=size), devices=0)}


def _combinations(changes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield two and three changes at once, of different kinds."""
    for count in (2, 3):
        for group in itertools.combinations(changes, count):
            merged = {name: value for change in group for name, value in change.items()}
            if len(merged) == sum(map(len, group)):
                yield merged


def _describe(change: dict[str, Any], here: Candidate) -> str:
    """Return changed values as they are typed after `jtrain run CONFIG`."""
    words = []
    if "remat" in change:
        words.append("model.remat=full" + (" model.saved=[]" if here.saved else ""))
    if "microbatches" in change:
        words.append(f"microbatches={change['microbatches']}")
    if "parallel" in change:
        words.append(describe_layout(change["parallel"]))
    return " ".join(words)


def format_advice(found: list[Advice], plan: Plan) -> str:
    """Return the advice as text."""
    over = plan.peak - plan.memory["limit"]
    head = f"It needs {format_bytes(over)} more than a device has. Savings, estimated by shapes:"
    if not found:
        return f"{head} none; take more devices (a larger --topology), or fewer rows (batch)."
    lines = [head]
    for each in found:
        fits = "fits" if each.fits else "not enough"
        note = f" ({fits}, compiled)" if each.compiled else "" if each.fits else f" ({fits})"
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
