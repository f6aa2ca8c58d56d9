"""What a check found: a table, and a sentence for each thing that is wrong."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

from jtrain.testing.result import Distances

Verdict = Literal["ok", "rounding", "named", "FAILS"]
HEAD = ("check", "loss", "gradient", "state", "metrics", "float64", "worst", "")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison and its verdict.

    `rounding`: off by more than float32 should be, and right in float64. `named`: it depends on the
    layout, as it is known to.
    """

    check: str
    verdict: Verdict
    apart: Distances | None  # in float32; None where nothing was measured
    double: Distances | None = None  # in float64
    why: str = ""
    cause: str = ""  # the name of what is wrong: `mean of means`

    def plain(self) -> dict[str, Any]:
        """The same as numbers and names alone."""
        return {
            "check": self.check,
            "verdict": self.verdict,
            "float32": _plain(self.apart) if self.apart else None,
            "float64": _plain(self.double) if self.double else None,
            "worst": self.apart.worst if self.apart else "",
            "cause": self.cause,
            "why": self.why,
        }


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """All comparisons of a check."""

    what: str  # was checked
    rows: tuple[Comparison, ...]
    left: tuple[str, ...] = ()  # what was not checked, and why

    @property
    def ok(self) -> bool:
        """Whether it is one result: nothing fails, and nothing depends on the layout."""
        return all(row.verdict in {"ok", "rounding"} for row in self.rows)

    @property
    def causes(self) -> list[str]:
        """The names of what is wrong or depends on the layout, each once, in order."""
        return list(dict.fromkeys(row.cause for row in self.rows if row.cause))

    def told(self) -> str:
        """The table, and below it what is wrong and what was left out."""
        lines = [HEAD, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        paragraphs = [[self.what], table, self._said(), self.left, [self._end()]]
        return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)

    def plain(self) -> dict[str, Any]:
        """The same as numbers and names alone."""
        return {
            "ok": self.ok,
            "what": self.what,
            "checks": [row.plain() for row in self.rows],
            "left": list(self.left),
        }

    def _said(self) -> list[str]:
        """Each thing that is wrong once, after the comparisons that show it."""
        checks: dict[str, list[str]] = {}
        for row in self.rows:
            if row.why:
                checks.setdefault(row.why, []).append(row.check)
        return [f"{', '.join(names)}: {why}" for why, names in checks.items()]

    def _end(self) -> str:
        wrong = sum(row.verdict == "FAILS" for row in self.rows)
        if wrong:
            return f"{wrong} of {len(self.rows)} comparisons FAIL."
        named = [row for row in self.rows if row.verdict == "named"]
        if named:
            return self._layout(named)
        return f"one result: all {len(self.rows)} comparisons hold."

    def _layout(self, named: Sequence[Comparison]) -> str:
        """The last line where what is drawn depends on the layout, and nothing else is wrong."""
        size = {row.check: max(row.apart.loss, row.apart.gradient.by) for row in named if row.apart}
        far = max(size, key=lambda check: size[check])
        return (
            f"NOT one result: what is drawn depends on the layout in {len(named)} of "
            f"{len(self.rows)} comparisons, and moves loss or gradient by up to "
            f"{100 * size[far]:.2g} % ({far}). Draw by jt.row_keys(rng, batch), or compare the "
            f"rest by --without-draws (draws=False)."
        )


def _cells(row: Comparison) -> tuple[str, ...]:
    a = row.apart
    if a is None:
        return (row.check, *[""] * (len(HEAD) - 2), row.verdict)
    figures = [a.loss, a.gradient.by, a.state.by, a.metric.by]
    double = _figure(row.double.largest) if row.double else ""
    return (row.check, *map(_figure, figures), double, a.worst if a.largest else "", row.verdict)


def _figure(x: float) -> str:
    return "0" if x == 0 else f"{x:.0e}" if math.isfinite(x) else "inf"


def _plain(a: Distances) -> dict[str, float | None]:
    """JSON has no infinity: what cannot be compared is null."""
    found = {"loss": a.loss, "gradient": a.gradient.by, "state": a.state.by, "metrics": a.metric.by}
    return {name: x if math.isfinite(x) else None for name, x in found.items()}
