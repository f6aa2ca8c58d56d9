"""Advice for a step that does not fit: what each setting saves, by the shapes."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jtrain.errors import UserError
from jtrain.inspect.plan.candidates import Candidate, Costs, candidates, current, describe_layout
from jtrain.inspect.plan.format import format_bytes
from jtrain.inspect.plan.plan import Plan, make_plan
from jtrain.inspect.plan.topology import Topology
from jtrain.train.experiment import RunConfig

SHOWN = 3  # combinations
COMPILES = 3
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

    def judge(knobs: Sequence[tuple[str, Candidate]]) -> list[Advice]:
        found: dict[str, Advice] = {}
        for settings, candidate in knobs:
            try:
                candidate.apply(config)
                saves = int((now - costs.memory(candidate)) * ratio)
            except UserError:
                continue
            fits = (plan.peak - saves) * SLACK <= plan.memory["limit"]
            if saves > 0.01 * plan.peak:
                found.setdefault(settings, Advice(settings, saves, fits, candidate))
        return sorted(found.values(), key=lambda each: (not each.fits, each.saves))

    knobs = list(_knobs(config, topology, costs, here))
    single = judge(knobs)
    if any(each.fits for each in single):
        return single
    together = [each for each in judge(list(_pairs(knobs, here))) if each.fits]
    return [*together[:SHOWN], *reversed(single)]


def check_advice(
    found: list[Advice], config: RunConfig, topology: Topology, plan: Plan, compiles: int = COMPILES
) -> list[Advice]:
    """Return the advice with those that should fit compiled, one by one, until one does fit.

    Where a step does not fit after all, the savings of the others are scaled by its error.
    """
    checked: list[Advice] = []
    for _ in range(compiles):
        each = next((each for each in found if each.fits), None)
        if each is None:
            break
        try:
            made = make_plan(each.candidate.apply(config), topology)
        except UserError:  # the layout does not suit the model
            found = [other for other in found if other is not each]
            continue
        saves = plan.peak - made.peak
        error = min(saves / each.saves, 1.0)
        checked.append(each._replace(saves=saves, fits=made.fits, compiled=True))
        found = [other for other in found if other is not each]
        if made.fits:
            break
        found = [_scale(other, error, plan) for other in found]
    return sorted([*checked, *found], key=lambda each: not (each.fits and each.compiled))


def _scale(advice: Advice, error: float, plan: Plan) -> Advice:
    saves = int(advice.saves * error)
    fits = advice.fits and (plan.peak - saves) * SLACK <= plan.memory["limit"]
    return advice._replace(saves=saves, fits=fits)


def _knobs(
    config: RunConfig, topology: Topology, costs: Costs, here: Candidate
) -> Iterator[tuple[str, Candidate]]:
    """Yield settings of one kind each."""
    if here.remat and here.remat != "full":
        remat = here._replace(remat="full", saved=())
        yield "model.remat=full" + (" model.saved=[]" if here.saved else ""), remat
    counts = [here.microbatches * factor for factor in (2, 4, 8)]
    counts = [count for count in counts if _divides(config, topology, count)]
    for count in counts:
        yield f"microbatches={count}", here._replace(microbatches=count)
    smallest = _smallest_layout(config, topology, costs, offload=False)
    if smallest is not None:
        yield describe_layout(smallest), here._replace(parallel=smallest)
    offloaded = _smallest_layout(config, topology, costs, offload=True)
    if offloaded is not None:
        yield describe_layout(offloaded), here._replace(parallel=offloaded)


def _pairs(
    knobs: Sequence[tuple[str, Candidate]], here: Candidate
) -> Iterator[tuple[str, Candidate]]:
    """Yield two and three settings at once, of different kinds."""
    for count in (2, 3):
        for group in itertools.combinations(knobs, count):
            changed = [
                {
                    name: value
                    for name, value in each._asdict().items()
                    if value != getattr(here, name)
                }
                for _, each in group
            ]
            names = [name for values in changed for name in values]
            if len(set(names)) == len(names):
                merged = {name: value for values in changed for name, value in values.items()}
                yield " ".join(settings for settings, _ in group), here._replace(**merged)


def _smallest_layout(
    config: RunConfig, topology: Topology, costs: Costs, *, offload: bool
) -> Any | None:
    """Return the layout with the least memory at the config's microbatches and remat."""
    here = current(config)
    found = [
        each.parallel
        for each in candidates(config, topology, costs)
        if each.microbatches == here.microbatches
        and bool(each.parallel.offload) == offload
        and each.parallel.context == each.parallel.tensor == 1
    ]
    if not found:
        return None
    smallest = min(found, key=lambda layout: costs.memory(here._replace(parallel=layout)))
    return dataclasses.replace(smallest, devices=0)


def _divides(config: RunConfig, topology: Topology, microbatches: int) -> bool:
    return config.batch % (microbatches * len(topology.devices)) == 0


def format_advice(found: list[Advice], plan: Plan) -> str:
    """Return the advice as text."""
    over = plan.peak - plan.memory["limit"]
    head = f"It needs {format_bytes(over)} more than a device has. Savings, estimated by shapes:"
    if not found:
        return f"{head} none; take more devices (a larger --topology), or fewer rows (batch)."
    lines = [f"  {format_bytes(each.saves):>10}  {each.settings}{_note(each)}" for each in found]
    if not any(each.fits for each in found):
        lines.append(
            "  None is enough: take more devices (a larger --topology), or a smaller model."
        )
    return "\n".join([head, *lines])


def _note(advice: Advice) -> str:
    fits = "fits" if advice.fits else "not enough"
    return f" ({fits}, compiled)" if advice.compiled else "" if advice.fits else " (not enough)"
