"""The report of a check: verdicts with float64 as judge, a table, and a sentence for each fault."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jtrain.io.formatting import align_columns
from jtrain.testing.causes import Cause
from jtrain.testing.compare import Distances

Verdict = Literal["ok", "rounding", "named", "FAILS"]
HEAD = ("check", "loss", "gradient", "state", "metrics", "float64", "worst", "")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison and its verdict.

    `rounding`: the difference exceeds float32's tolerance and vanishes in float64. `named`: the
    result depends on the layout, for a known reason that is not a fault.
    """

    check: str
    verdict: Verdict
    distances: Distances | None  # in float32; None if nothing was measured
    double: Distances | None = None  # in float64
    why: str = ""
    cause: str = ""  # the name of the fault: `mean of means`

    @staticmethod
    def explained(
        check: str, why: Cause | None, single: Distances | None, double: Distances | None = None
    ) -> "Comparison":
        """Return a comparison that a cause explains; `ok` without one."""
        if why is None:
            return Comparison(check, "ok", single, double)
        verdict = "FAILS" if why.fault else "named"
        return Comparison(check, verdict, single, double, why.why, why.name)

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return {
            "check": self.check,
            "verdict": self.verdict,
            "float32": _plain(self.distances) if self.distances else None,
            "float64": _plain(self.double) if self.double else None,
            "worst": self.distances.worst.leaf if self.distances else "",
            "cause": self.cause,
            "why": self.why,
        }


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The comparisons of a check, with a verdict on all of them."""

    what: str  # description of what was checked
    rows: tuple[Comparison, ...]
    not_compared: tuple[str, ...] = ()  # what was not compared, and why

    @property
    def ok(self) -> bool:
        """True if nothing fails and nothing depends on the layout."""
        return all(row.verdict in {"ok", "rounding"} for row in self.rows)

    @property
    def causes(self) -> list[str]:
        """Names of the faults and layout dependences, each once, in order."""
        return list(dict.fromkeys(row.cause for row in self.rows if row.cause))

    def describe(self) -> str:
        """Return the report as text: the table, the faults, and what was not compared."""
        paragraphs = [
            [self.what],
            align_columns([HEAD, *map(_cells, self.rows)], right=()),
            self._explanations(),
            self.not_compared,
            [self._verdict()],
        ]
        return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return {
            "ok": self.ok,
            "what": self.what,
            "checks": [row.plain() for row in self.rows],
            "left": list(self.not_compared),
        }

    def _explanations(self) -> list[str]:
        checks: dict[str, list[str]] = {}
        for row in self.rows:
            if row.why:
                checks.setdefault(row.why, []).append(row.check)
        return [f"{', '.join(names)}: {why}" for why, names in checks.items()]

    def _verdict(self) -> str:
        wrong = sum(row.verdict == "FAILS" for row in self.rows)
        if wrong:
            return f"{wrong} of {len(self.rows)} comparisons FAIL."
        named = [row for row in self.rows if row.verdict == "named"]
        if named:
            return self._layout_verdict(named)
        return f"one result: all {len(self.rows)} comparisons hold."

    def _layout_verdict(self, named: Sequence[Comparison]) -> str:
        """Return the last line of a report in which only random draws depend on the layout."""
        measured = [(max(row.distances[:2]).by, row.check) for row in named if row.distances]
        size, largest = max(measured)
        return (
            f"NOT one result: random draws depend on the layout in {len(named)} of "
            f"{len(self.rows)} comparisons, and move loss or gradient by up to "
            f"{100 * size:.2g} % ({largest}). Draw by jt.row_keys(rng, batch), or compare "
            f"the rest by --without-draws (draws=False)."
        )


def _cells(row: Comparison) -> tuple[str, ...]:
    if row.distances is None:
        return (row.check, *[""] * (len(HEAD) - 2), row.verdict)
    figures = [*(each.by for each in row.distances), row.double.largest if row.double else None]
    return (row.check, *map(_figure, figures), row.distances.worst.leaf, row.verdict)


def _figure(x: float | None) -> str:
    if x is None:
        return ""
    return "0" if x == 0 else f"{x:.0e}" if math.isfinite(x) else "inf"


def _plain(distances: Distances) -> dict[str, float | None]:
    by_name = distances._asdict().items()
    return {name: each.by if math.isfinite(each.by) else None for name, each in by_name}


# Relative tolerances. Adding some thousand numbers in another order moves the last of float32's
# 24 bits (6e-8) a few times, and the last of float64's 53 (1e-16) as often; a fault moves both
# results alike, so any float64 tolerance between 1e-12 and 1e-6 separates fault from rounding.
SINGLE, DOUBLE = 1e-6, 1e-12


def judge(
    check: str,
    single: Distances,
    double: Distances | None,
    explain: Callable[[], Cause],
    explain_rounding: Callable[[], Cause | None],
) -> Comparison:
    """Return the comparison with its verdict.

    Args:
        single: the distances in float32.
        double: the distances in float64, if known.
        explain: returns the cause; called if the comparison fails.
        explain_rounding: returns a cause if rounding cannot explain the difference; called if only
            float32 differs.
    """
    if is_far(single, double):
        return Comparison.explained(check, explain(), single, double)
    if single.largest <= SINGLE:
        return Comparison(check, "ok", single, double)
    if found := explain_rounding():
        return Comparison.explained(check, found, single, double)
    return Comparison(check, "rounding", single, double)


def is_far(single: Distances, double: Distances | None) -> bool:
    """Return whether two results differ by more than rounding, judged in float64 if known.

    Rounding is 5e8 times smaller in float64, also where large numbers cancel.
    """
    if double is None:
        return single.largest > SINGLE
    return double.largest > max(DOUBLE, 1e-7 * min(1.0, single.largest))
