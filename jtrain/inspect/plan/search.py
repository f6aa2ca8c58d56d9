"""Search for the fastest step that fits: candidates pruned by shapes, then compiled."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jtrain.core.pytree import named_leaves
from jtrain.errors import UserError
from jtrain.inspect.plan.collectives import Collective
from jtrain.inspect.plan.plan import Plan, make_plan
from jtrain.inspect.plan.roofline import chip_speeds, cpu_speeds
from jtrain.inspect.plan.schedule import Speeds
from jtrain.inspect.plan.topology import Topology
from jtrain.io.formatting import align_columns, format_bytes, format_seconds
from jtrain.parallel import Auto, Axes, MemoryNeeds
from jtrain.parallel.chips import find_chip
from jtrain.parallel.rules import AXES
from jtrain.parallel.strategies.auto import MemoryEstimate, estimate
from jtrain.train.auto_layout import trace_memory_needs
from jtrain.train.experiment import RunConfig
from jtrain.train.program import set_up
from jtrain.train.summary import bound_step_flops

COMPILES = 12
# From the least memory to the least computation.
REMAT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("full", ()),
    ("names", ("qkv", "attention")),
    ("names", ("qkv", "attention", "hidden")),
    ("dots_with_no_batch_dims", ()),
    ("dots", ()),
    ("none", ()),
)
MICROBATCHES = (1, 2, 4)


class Candidate(NamedTuple):
    """Values of a config that a search changes."""

    parallel: Any
    microbatches: int
    remat: str = ""  # empty: the model has no such field
    saved: tuple[str, ...] = ()

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the config with these values.

        Raises:
            UserError: if they conflict.
        """
        values: dict[str, Any] = {"parallel": self.parallel, "microbatches": self.microbatches}
        if self.remat:
            model: Any = getattr(config, "model", None)
            values["model"] = dataclasses.replace(model, remat=self.remat, saved=self.saved)
        return dataclasses.replace(config, **values)

    def describe(self) -> str:
        """Return the values as they are typed after `jtrain run CONFIG`."""
        words = [describe_layout(self.parallel), f"microbatches={self.microbatches}"]
        if self.remat:
            words.append(f"model.remat={self.remat}")
        if self.saved:
            words.append(f"model.saved=[{','.join(self.saved)}]")
        return " ".join(words)


def describe_layout(parallel: Any) -> str:
    """Return a layout as one setting: `parallel={kind: sharded, fsdp: 4, tensor: 4}`."""
    plain, words = type(parallel)(), [f"kind: {parallel.kind}"]
    for field in dataclasses.fields(parallel):
        value = getattr(parallel, field.name)
        if value != getattr(plain, field.name):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            text = f"[{', '.join(value)}]" if isinstance(value, tuple) else text
            words.append(f"{field.name}: {text}")
    return f"'parallel={{{', '.join(words)}}}'"


def current(config: RunConfig) -> Candidate:
    """Return the candidate that changes nothing."""
    model: Any = getattr(config, "model", None)
    saved = tuple(getattr(model, "saved", ()))
    return Candidate(config.parallel, config.microbatches, getattr(model, "remat", ""), saved)


def candidates(config: RunConfig, topology: Topology, costs: "Costs") -> Iterator[Candidate]:
    """Yield the candidates whose rows divide into the devices and microbatches."""
    model: Any = getattr(config, "model", None)
    remats = REMAT if hasattr(model, "remat") and hasattr(model, "saved") else (("", ()),)
    timeout = getattr(config.parallel, "start_timeout", None)
    for turns in sorted({config.microbatches, *MICROBATCHES}):
        if config.batch % turns:
            continue
        here = current(config)._replace(microbatches=turns)
        for layout in Auto().layouts(topology.devices, costs.needs(here)):
            if layout.offload and topology.devices[0].platform == "gpu":
                continue  # the description of an absent GPU has no memory of a host
            if timeout is not None:
                layout = dataclasses.replace(layout, start_timeout=timeout)
            for remat, saved in remats:
                yield Candidate(layout, turns, remat, saved)


@dataclasses.dataclass(eq=False)
class Costs:
    """Analytic costs of the candidates of a config, from shapes alone."""

    config: RunConfig
    topology: Topology

    def memory(self, candidate: Candidate) -> int:
        """Return the estimated bytes on a device."""
        return self._estimate(candidate).total

    def seconds(self, candidate: Candidate) -> float:
        """Return the estimated time of a step; only for an order of candidates."""
        layout, needs = self._axes(candidate), self.needs(candidate)
        sizes = {axis: getattr(layout, axis) for axis in AXES}
        speeds = self._speeds(sizes)
        rate = lambda axis: _axis_rate(speeds, sizes, axis)
        rows, inside = sizes["data"] * sizes["fsdp"] * sizes["expert"], layout.tensor
        turns = candidate.microbatches
        params = sum(x.size for x in named_leaves(needs.state.params).values())
        weights = 2 * params // (inside * sizes["expert"] * sizes["stage"])
        gathers = 3 * turns if layout.zero == 3 else 1 + (turns if layout.zero == 2 else 1)
        split = layout.fsdp * layout.data * layout.slice
        gathered = (
            gathers * weights * (split - 1) / split / rate("fsdp" if layout.fsdp > 1 else "data")
        )
        # Under full recomputation only the inputs of blocks are saved, once for each block.
        inputs = self.needs(candidate._replace(remat="full" if candidate.remat else "", saved=()))
        local = turns * inputs.saved / (rows * layout.context * layout.slice)
        again = 4 if candidate.remat == "full" else 0
        tensor = (8 + again) * local * (inside - 1) / inside**2 / rate("tensor")
        context = 8 * local * (layout.context - 1) / layout.context / rate("context")
        expert = 8 * local * (layout.expert - 1) / layout.expert / rate("expert")
        flops = self._flops(candidate.remat, candidate.saved)
        compute = flops / len(self.topology.devices) / speeds.flops
        size = self._estimate(candidate)
        memory = (3 * size.state + 4 * turns * size.saved + 3 * turns * weights) / speeds.memory
        offloaded = 2 * 4 * params // math.prod(sizes.values())  # two moments, there and back
        host = 2 * offloaded / speeds.host if layout.offload else 0.0
        return max(compute, gathered) + tensor + context + expert + memory + host

    def needs(self, candidate: Candidate) -> MemoryNeeds:
        """Return the memory needs of a step with the candidate's microbatches and remat."""
        needs = self._traced(candidate.remat, candidate.saved)
        share = needs.microbatches / candidate.microbatches
        return needs._replace(
            rows=int(needs.rows * share),
            microbatches=candidate.microbatches,
            saved=int(needs.saved * share),
            passing=int(needs.passing * share),
        )

    @functools.cache  # noqa: B019 - an instance lives as long as its search
    def _estimate(self, candidate: Candidate) -> MemoryEstimate:
        return estimate(self._axes(candidate), self.needs(candidate))

    @functools.cache  # noqa: B019
    def _traced(self, remat: str, saved: tuple[str, ...]) -> MemoryNeeds:
        one = Candidate(self.config.parallel, self.config.microbatches, remat, saved)
        return trace_memory_needs(one.apply(self.config), Axes(), self.topology.devices[:1])

    @functools.cache  # noqa: B019
    def _flops(self, remat: str, saved: tuple[str, ...]) -> float:
        one = Candidate(Axes(fsdp=1), self.config.microbatches, remat, saved).apply(self.config)
        bound = bound_step_flops(set_up(one, among=self.topology.devices[:1]))
        return bound.flops.hardware or 0.0

    @functools.cache  # noqa: B019
    def _axes(self, candidate: Candidate) -> Axes:
        layout = candidate.parallel
        if isinstance(layout, Axes) and all(getattr(layout, axis) for axis in AXES):
            return layout
        strategy = layout.build(self.topology.devices)
        leaves = getattr(strategy, "leaves", None)
        zero, size = (leaves.zero, leaves.min_size) if leaves else (0, 0)
        sizes: dict[str, Any] = {"fsdp": 1, **strategy.axes}
        return Axes(**sizes, zero=zero, min_size=size, offload=getattr(layout, "offload", ()))

    def _speeds(self, sizes: Mapping[str, int]) -> Speeds:
        devices = self.topology.devices[: math.prod(sizes.values())]
        chip = find_chip(devices)
        if chip is None or not chip.memory:
            return cpu_speeds(len(devices))
        return chip_speeds(chip, sizes, devices)


def _axis_rate(speeds: Speeds, sizes: Mapping[str, int], axis: str) -> float:
    """Return the bytes a second over an axis of a layout, and over slices with its rows."""
    together = ("slice", axis) if axis in ("fsdp", "data") else (axis,)
    axes = tuple(each for each in together if sizes[each] > 1)
    return speeds.link(Collective("all-gather", axes, 0)) if axes else speeds.memory


class SearchRow(NamedTuple):
    """A candidate that was compiled."""

    candidate: Candidate
    plan: Plan

    @property
    def seconds(self) -> float:
        """Estimated seconds of a step."""
        return self.plan.estimate.seconds if self.plan.estimate else float("inf")

    def beats(self, other: "SearchRow") -> bool:
        """Return whether this row is smaller or faster, and neither larger nor slower."""
        ours, theirs = (self.plan.peak, self.seconds), (other.plan.peak, other.seconds)
        return ours != theirs and ours[0] <= theirs[0] and ours[1] <= theirs[1]


@dataclasses.dataclass
class SearchResult:
    """Candidates that were compiled, and how many were not."""

    rows: list[SearchRow]  # the config as it is first
    considered: int = 0
    too_large: int = 0
    """Candidates that need too much memory by their shapes."""
    unsuited: dict[str, int] = dataclasses.field(default_factory=dict)
    """Reasons for candidates that the model does not allow, and their number."""
    stopped: bool = False
    """Interrupted before the end."""

    def refuse(self, error: UserError) -> None:
        """Count a candidate that the model does not allow."""
        why = str(error).partition(". ")[0]
        self.unsuited[why] = self.unsuited.get(why, 0) + 1

    @property
    def ranked(self) -> list[SearchRow]:
        """Rows that fit, fastest first, then those that do not."""
        return sorted(self.rows, key=lambda row: (not row.plan.fits, row.seconds, row.plan.peak))

    @property
    def best(self) -> SearchRow | None:
        """The fastest that fits; None without one."""
        return next((row for row in self.ranked if row.plan.fits), None)

    def is_pareto(self, row: SearchRow) -> bool:
        """Return whether a row fits, and no other beats it in both memory and time."""
        fit = [other for other in self.rows if other.plan.fits]
        return row.plan.fits and not any(other.beats(row) for other in fit)

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        rows = [
            {
                "settings": row.candidate.describe(),
                "default": row is self.rows[0],
                "fits": row.plan.fits,
                "peak": row.plan.peak,
                "limit": row.plan.memory["limit"],
                "seconds": row.seconds,
                "mfu": row.plan.mfu,
                "pareto": self.is_pareto(row),
            }
            for row in self.ranked
        ]
        names = ("considered", "too_large", "unsuited", "stopped")
        counts = {name: getattr(self, name) for name in names}
        return {"rows": rows, "best": self.best and self.best.candidate.describe(), **counts}


def search(
    config: RunConfig,
    topology: Topology,
    *,
    compiles: int = COMPILES,
    report: Callable[[str], None] = lambda line: None,
) -> SearchResult:
    """Compile the config and the candidates that promise to be fastest; keep all on Ctrl-C.

    Args:
        compiles: programs to compile at most, the config's own included.

    Raises:
        UserError: if the config is invalid.
    """
    costs, result = Costs(config, topology), SearchResult([])

    def try_candidate(candidate: Candidate) -> None:
        plan = make_plan(candidate.apply(config), topology)
        row = SearchRow(candidate, plan)
        result.rows.append(row)
        report(
            f"{len(result.rows)} of {compiles}: {candidate.describe()}: {format_bytes(plan.peak)}, "
            f"{'fits' if plan.fits else 'does not fit'}, {format_seconds(row.seconds)}"
            f"{' (cached)' if plan.cached else ''}"
        )

    try:
        try_candidate(current(config))
        report("counting memory and operations of the candidates by their shapes")
        found = _with_costs(config, topology, costs, result)
        report(f"{result.considered} candidates; compiling {compiles} at most")
        error = result.rows[0].plan.peak / max(costs.memory(current(config)), 1)
        fits = lambda memory: not topology.limit or error * memory <= topology.limit
        promising = [candidate for _, memory, candidate in found if fits(memory)]
        result.too_large = len(found) - len(promising)
        for candidate in promising:
            if len(result.rows) >= compiles:
                break
            try:
                try_candidate(candidate)
            except UserError as refused:
                result.refuse(refused)
    except KeyboardInterrupt:
        result.stopped = True
    return result


def _with_costs(
    config: RunConfig, topology: Topology, costs: Costs, result: SearchResult
) -> list[tuple[float, int, Candidate]]:
    """Return analytic time and memory of each candidate, fastest first; of equal ones the first."""
    found: dict[tuple[float, int], Candidate] = {}
    for candidate in candidates(config, topology, costs):
        result.considered += 1
        try:
            candidate.apply(config)
            key = round(costs.seconds(candidate), 6), costs.memory(candidate)
            found.setdefault(key, candidate)
        except UserError as error:
            result.refuse(error)
    return [(*key, found[key]) for key in sorted(found)]


def format_search(result: SearchResult) -> str:
    """Return the ranked table, and what was left out."""
    rows = [("", "a step", "of default", "MFU", "memory", "settings")]
    for row in result.ranked:
        rows.append(
            (
                "*" if result.is_pareto(row) else "",
                format_seconds(row.seconds),
                f"{row.seconds / result.rows[0].seconds:.0%}",
                f"{row.plan.mfu:.0%}" if row.plan.mfu else "",
                format_bytes(row.plan.peak) + ("" if row.plan.fits else ", too large"),
                row.candidate.describe() + (" (the config)" if row is result.rows[0] else ""),
            )
        )
    lines = align_columns(rows, right=(1, 2, 3, 4))
    lines.append("* no other is both smaller and faster; times are estimates, not measurements")
    left = result.considered - len(result.rows) - result.too_large - sum(result.unsuited.values())
    lines.append(
        f"{result.considered} candidates: {len(result.rows)} compiled; by their shapes "
        f"{result.too_large} are too large and {max(left, 0)} slower; "
        f"{sum(result.unsuited.values())} are unsuited"
    )
    lines += [f"  unsuited, {count}: {why}" for why, count in result.unsuited.items()]
    if result.stopped:
        lines.append("stopped; the same command resumes from the cache")
    return "\n".join(lines)
