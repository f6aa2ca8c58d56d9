"""Search for the fastest step that fits: a grid of layouts, recomputation and microbatches."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jtrain.errors import UserError
from jtrain.inspect.plan.plan import Plan, make_plan
from jtrain.inspect.plan.topology import Topology
from jtrain.io.formatting import align_columns, format_bytes, format_seconds
from jtrain.parallel import Auto, Axes, MemoryNeeds
from jtrain.parallel.rules import AXES
from jtrain.parallel.strategies.auto import estimate
from jtrain.train.auto_layout import choose_layout, trace_memory_needs
from jtrain.train.experiment import RunConfig

COMPILES = 12
# From the least computation to the least memory.
REMAT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("none", ()),
    ("dots", ()),
    ("dots_with_no_batch_dims", ()),
    ("names", ("qkv", "attention", "hidden")),
    ("names", ("qkv", "attention")),
    ("full", ()),
)
MICROBATCHES = (1, 2, 4)
_TRAFFIC = (*AXES, "zero", "offload", "context_by")  # of layouts that differ


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

    def describe(self, beside: "Candidate | None" = None) -> list[str]:
        """Return the values as they are typed after `jtrain run CONFIG`.

        Args:
            beside: leave out the values that this candidate has, too.
        """
        words = {
            "parallel": describe_layout(self.parallel),
            "microbatches": f"microbatches={self.microbatches}",
            "remat": f"model.remat={self.remat}" if self.remat else "",
            "saved": f"model.saved=[{','.join(self.saved)}]" if self.saved or beside else "",
        }
        changed = [x for x in words if beside is None or getattr(self, x) != getattr(beside, x)]
        return [words[name] for name in changed if words[name]]

    @property
    def recomputation(self) -> int:
        """Place among REMAT; the last for another setting."""
        remat = (self.remat, self.saved)
        return REMAT.index(remat) if remat in REMAT else len(REMAT)


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


def with_chosen_layout(config: RunConfig, topology: Topology) -> RunConfig:
    """Return the config with the layout that `parallel.kind: auto` chooses here."""
    if not isinstance(config.parallel, Auto):
        return config
    layout, _ = choose_layout(config, topology.devices)
    return dataclasses.replace(config, parallel=layout)


class Estimates:
    """Layouts for a config, and the memory of its candidates, from shapes alone."""

    def __init__(self, config: RunConfig, topology: Topology):
        self.config, self.devices = config, topology.devices
        self._trace = functools.cache(self._trace_uncached)

    def memory(self, candidate: Candidate) -> int:
        """Return the estimated bytes on a device.

        Raises:
            UserError: if the model does not allow the candidate.
        """
        candidate.apply(self.config)
        return estimate(self._axes(candidate.parallel), self._needs(candidate)).total

    def layouts(self, microbatches: int) -> list[Any]:
        """Return the layouts into which the rows of a microbatch divide.

        The config's own is first; of the others those with the least traffic.
        """
        needs = self._needs(current(self.config)._replace(microbatches=microbatches))
        own: Any = self.config.parallel
        divides = self.config.batch % (own.build(self.devices).shares * microbatches) == 0
        found, known = [own] if divides else [], self._axes(own)
        for layout in Auto().layouts(self.devices, needs):
            # The description of an absent GPU has no memory of a host.
            absent = layout.offload and self.devices[0].platform == "gpu"
            if not absent and any(getattr(layout, x) != getattr(known, x) for x in _TRAFFIC):
                found.append(dataclasses.replace(layout, start_timeout=own.start_timeout))
        return found

    def _needs(self, candidate: Candidate) -> MemoryNeeds:
        """Return the memory needs of a step with the candidate's microbatches and remat."""
        needs = self._trace(candidate.remat, candidate.saved)
        share = needs.microbatches / candidate.microbatches
        return needs._replace(
            rows=int(needs.rows * share),
            microbatches=candidate.microbatches,
            saved=int(needs.saved * share),
            passing=int(needs.passing * share),
        )

    def _trace_uncached(self, remat: str, saved: tuple[str, ...]) -> MemoryNeeds:
        one = current(self.config)._replace(remat=remat, saved=saved)
        return trace_memory_needs(one.apply(self.config), Axes(), self.devices[:1])

    def _axes(self, layout: Any) -> Axes:
        """Return a layout of any kind by the sizes of its axes."""
        if isinstance(layout, Axes) and all(getattr(layout, axis) for axis in AXES):
            return layout
        strategy = layout.build(self.devices)
        leaves = getattr(strategy, "leaves", None)
        zero, size = (leaves.zero, leaves.min_size) if leaves else (0, 0)
        sizes: dict[str, Any] = {"fsdp": 1, **strategy.axes}
        return Axes(**sizes, zero=zero, min_size=size, offload=getattr(layout, "offload", ()))


def candidates(config: RunConfig, estimates: Estimates) -> Iterator[Candidate]:
    """Yield the grid: by layout, then the least recomputation, then the fewest microbatches."""
    model: Any = getattr(config, "model", None)
    remats = REMAT if hasattr(model, "remat") and hasattr(model, "saved") else (("", ()),)
    counts = sorted({config.microbatches, *MICROBATCHES})
    layouts = {count: estimates.layouts(count) for count in counts if config.batch % count == 0}
    for layout in dict.fromkeys(each for found in layouts.values() for each in found):
        for remat, saved in remats:
            for count in (count for count, found in layouts.items() if layout in found):
                yield Candidate(layout, count, remat, saved)


class SearchRow(NamedTuple):
    """A candidate that was compiled."""

    candidate: Candidate
    plan: Plan

    @property
    def seconds(self) -> float:
        """Estimated seconds of a step."""
        return self.plan.estimate.seconds if self.plan.estimate else float("inf")

    def settles(self, other: Candidate) -> bool:
        """Return whether it fits with no more recomputation and microbatches in one layout."""
        own = self.candidate
        fewer = own.recomputation <= other.recomputation and own.microbatches <= other.microbatches
        return self.plan.fits and own.parallel == other.parallel and fewer


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

    @property
    def ranked(self) -> list[SearchRow]:
        """Rows that fit, fastest first, then those that do not."""
        return sorted(self.rows, key=lambda row: (not row.plan.fits, row.seconds, row.plan.peak))

    @property
    def best(self) -> SearchRow | None:
        """The fastest that fits; None without one."""
        return next((row for row in self.ranked if row.plan.fits), None)

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        rows = [
            {
                "settings": _words(row.candidate),
                "default": row is self.rows[0],
                "fits": row.plan.fits,
                "peak": row.plan.peak,
                "limit": row.plan.memory["limit"],
                "seconds": row.seconds,
                "mfu": row.plan.mfu,
            }
            for row in self.ranked
        ]
        names = ("considered", "too_large", "unsuited", "stopped")
        counts = {name: getattr(self, name) for name in names}
        return {"rows": rows, "best": self.best and _words(self.best.candidate), **counts}


def _words(candidate: Candidate) -> str:
    return " ".join(candidate.describe())


def search(
    config: RunConfig,
    topology: Topology,
    *,
    compiles: int = COMPILES,
    report: Callable[[str], None] = lambda line: None,
) -> SearchResult:
    """Compile the config and the candidates that promise to be fastest; keep all on Ctrl-C.

    Of a layout, no candidate is compiled after one that fits with less recomputation and fewer
    microbatches, nor one that is too large by its shapes.

    Args:
        compiles: programs to compile at most, the config's own included.

    Raises:
        UserError: if the config is invalid.
    """
    config = with_chosen_layout(config, topology)
    estimates, result = Estimates(config, topology), SearchResult([])
    refused: dict[Any, UserError] = {}  # layouts with microbatches that the model does not allow

    def compile_candidate(candidate: Candidate) -> None:
        try:
            plan = make_plan(candidate.apply(config), topology)
        except UserError as error:
            refused[candidate[:2]] = error
            raise
        row = SearchRow(candidate, plan)
        result.rows.append(row)
        report(
            f"{len(result.rows)} of {compiles}: {_words(candidate)}: {format_bytes(plan.peak)}, "
            f"{'fits' if plan.fits else 'does not fit'}, {format_seconds(row.seconds)}"
            f"{' (cached)' if plan.cached else ''}"
        )

    try:
        compile_candidate(current(config))
        error = result.rows[0].plan.peak / max(estimates.memory(current(config)), 1)
        for candidate in candidates(config, estimates):
            result.considered += 1
            try:
                if topology.limit and error * estimates.memory(candidate) > topology.limit:
                    result.too_large += 1
                elif candidate[:2] in refused:
                    raise refused[candidate[:2]]
                elif len(result.rows) < compiles and not any(
                    row.settles(candidate) for row in result.rows
                ):
                    compile_candidate(candidate)
            except UserError as refusal:
                why = str(refusal).partition(". ")[0]
                result.unsuited[why] = result.unsuited.get(why, 0) + 1
    except KeyboardInterrupt:
        result.stopped = True
    return result


def format_search(result: SearchResult) -> str:
    """Return the ranked table, and what was left out."""
    rows = [("a step", "of default", "MFU", "memory", "settings")]
    for row in result.ranked:
        rows.append(
            (
                format_seconds(row.seconds),
                f"{row.seconds / result.rows[0].seconds:.0%}",
                f"{row.plan.mfu:.0%}" if row.plan.mfu else "",
                format_bytes(row.plan.peak) + ("" if row.plan.fits else ", too large"),
                _words(row.candidate) + (" (the config)" if row is result.rows[0] else ""),
            )
        )
    unsuited = sum(result.unsuited.values())
    lines = [
        *align_columns(rows, right=(0, 1, 2, 3)),
        "times are estimates, not measurements",
        f"{result.considered} candidates: {len(result.rows)} compiled; {result.too_large} are too "
        f"large by their shapes, {unsuited} are unsuited",
    ]
    lines += [f"  unsuited, {count}: {why}" for why, count in result.unsuited.items()]
    if result.stopped:
        lines.append("stopped; the same command resumes from the cache")
    return "\n".join(lines)
