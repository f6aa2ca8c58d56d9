"""Search for the fastest step that fits: candidates pruned by shapes, then compiled."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jtrain.errors import UserError
from jtrain.inspect.plan.candidates import Candidate, Costs, candidates, current
from jtrain.inspect.plan.format import format_bytes
from jtrain.inspect.plan.plan import Plan, make_plan
from jtrain.inspect.plan.topology import Topology
from jtrain.io.formatting import align_columns, format_seconds
from jtrain.train.experiment import RunConfig

COMPILES = 12


class Report(Protocol):
    """What takes the progress of a search."""

    def __call__(self, line: str, done: int = 0) -> None:
        """Take a line, and how many programs are compiled."""
        ...


class SearchRow(NamedTuple):
    """A candidate that was compiled."""

    candidate: Candidate
    plan: Plan
    is_default: bool = False

    @property
    def seconds(self) -> float:
        """Estimated seconds of a step."""
        return self.plan.estimate.seconds if self.plan.estimate else float("inf")

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        plan = self.plan.plain()
        memory = {name: plan["memory"][name] for name in ("peak", "limit")}
        return {
            "settings": self.candidate.describe(),
            "default": self.is_default,
            "fits": self.plan.fits,
            **memory,
            "seconds": self.seconds,
            "mfu": self.plan.mfu,
        }


@dataclasses.dataclass
class SearchResult:
    """Candidates that were compiled, and how many were not."""

    rows: list[SearchRow]
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

    @property
    def default(self) -> SearchRow | None:
        """The config as it is; None if it was not compiled."""
        return next((row for row in self.rows if row.is_default), None)

    @property
    def pareto(self) -> list[SearchRow]:
        """Rows that fit and that no other beats in both memory and time."""
        fit = [row for row in self.ranked if row.plan.fits]
        return [
            row for row in fit if not any(_beats(other, row) for other in fit if other is not row)
        ]

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return {
            "rows": [{**row.plain(), "pareto": row in self.pareto} for row in self.ranked],
            "best": self.best and self.best.candidate.describe(),
            "considered": self.considered,
            "too_large": self.too_large,
            "unsuited": self.unsuited,
            "stopped": self.stopped,
        }


def search(
    config: RunConfig,
    topology: Topology,
    *,
    compiles: int = COMPILES,
    report: Report = lambda line, done=0: None,
) -> SearchResult:
    """Compile the config and the candidates that promise to be fastest; keep all on Ctrl-C.

    Analytic costs order the candidates and leave out those that need too much memory. Programs that
    were compiled correct the memory of those that follow with the same recomputation.

    Args:
        compiles: programs to compile at most, the config's own included.
        report: called with each line of progress and the number of programs compiled.

    Raises:
        UserError: if the config is invalid.
    """
    costs, result = Costs(config, topology), SearchResult([])
    default = current(config)
    try:
        _compile(result, default, config, topology, report)
        report("counting memory and operations of the candidates by their shapes", 1)
        found = _ordered(config, topology, costs, result)
        report(f"{result.considered} candidates; compiling {compiles} at most", 1)
        for candidate in _promising(found, costs, result, topology.limit):
            if len(result.rows) >= compiles:
                break
            _compile(result, candidate, config, topology, report)
    except KeyboardInterrupt:
        result.stopped = True
    return result


def _ordered(
    config: RunConfig, topology: Topology, costs: Costs, result: SearchResult
) -> list[tuple[float, int, Candidate]]:
    """Return analytic time and memory of each candidate, fastest first."""
    found = []
    for candidate in candidates(config, topology, costs):
        result.considered += 1
        try:
            candidate.apply(config)
            found.append((costs.seconds(candidate), costs.memory(candidate), candidate))
        except UserError as error:
            _note(result, error)
    return sorted(found, key=lambda each: each[:2])


def _promising(
    found: Sequence[tuple[float, int, Candidate]], costs: Costs, result: SearchResult, limit: int
) -> Iterator[Candidate]:
    """Yield candidates that may fit, that with the shortest corrected time first.

    Compiled programs correct what follows: the memory of a candidate is its analytic memory times
    the ratio of programs with the same recomputation, its time that of programs with the same
    sizes of `tensor` and `context`.
    """
    left = {
        (round(seconds, 6), memory): candidate for seconds, memory, candidate in reversed(found)
    }
    while left:
        memories = _Ratios(result.rows, costs.memory, lambda row: row.plan.peak, _recomputation)
        times = _Ratios(result.rows, costs.seconds, lambda row: row.seconds, _inside)
        fitting = {
            key: times.of(candidate) * key[0]
            for key, candidate in left.items()
            if not limit or memories.of(candidate) * key[1] <= limit
        }
        result.too_large = len(left) - len(fitting)
        if not fitting:
            break
        yield left.pop(min(fitting, key=lambda key: (fitting[key], key)))


class _Ratios:
    """Ratios of compiled to analytic figures, by a property of the candidates."""

    def __init__(
        self,
        rows: Sequence[SearchRow],
        analytic: Callable[[Candidate], float],
        compiled: Callable[[SearchRow], float],
        group: Callable[[Candidate], Any],
    ):
        self._group, self._all = group, []
        self._groups: dict[Any, list[float]] = {}
        for row in rows:
            ratio = compiled(row) / max(analytic(row.candidate), 1e-12)
            self._groups.setdefault(group(row.candidate), []).append(ratio)
            self._all.append(ratio)
        # Where nothing was compiled yet the smallest ratio stands: it is worth a try.
        self._unknown = min(self._all, default=1.0)

    def of(self, candidate: Candidate) -> float:
        """Return the ratio of a candidate's group."""
        found = self._groups.get(self._group(candidate))
        return statistics.median(found) if found else self._unknown


def _recomputation(candidate: Candidate) -> tuple:
    return candidate.remat, candidate.saved


def _inside(candidate: Candidate) -> tuple:
    parallel = candidate.parallel
    return getattr(parallel, "tensor", 1), getattr(parallel, "context", 1)


def _compile(
    result: SearchResult,
    candidate: Candidate,
    config: RunConfig,
    topology: Topology,
    report: Report,
) -> None:
    is_default = not result.rows
    try:
        plan = make_plan(candidate.apply(config), topology)
    except UserError as error:
        if is_default:
            raise
        _note(result, error)
        return
    row = SearchRow(candidate, plan, is_default)
    result.rows.append(row)
    words = "fits" if plan.fits else "does not fit"
    report(
        f"{len(result.rows)}: {candidate.describe()}: {format_bytes(plan.peak)}, {words}, "
        f"{format_seconds(row.seconds)}{' (cached)' if plan.cached else ''}",
        len(result.rows),
    )


def _note(result: SearchResult, error: UserError) -> None:
    why = str(error).partition(". ")[0]
    result.unsuited[why] = result.unsuited.get(why, 0) + 1


def _beats(other: SearchRow, row: SearchRow) -> bool:
    pair = (other.plan.peak, other.seconds), (row.plan.peak, row.seconds)
    return pair[0] != pair[1] and all(a <= b for a, b in zip(*pair, strict=True))


def format_search(result: SearchResult) -> str:
    """Return the ranked table, and what was left out."""
    default = result.default
    rows = [("", "a step", "of default", "MFU", "memory", "settings")]
    for row in result.ranked:
        share = row.seconds / default.seconds if default else float("nan")
        rows.append(
            (
                "*" if row in result.pareto else "",
                format_seconds(row.seconds),
                f"{share:.0%}",
                f"{row.plan.mfu:.0%}" if row.plan.mfu else "",
                format_bytes(row.plan.peak) + ("" if row.plan.fits else ", too large"),
                row.candidate.describe() + (" (the config)" if row.is_default else ""),
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
