"""Diagnosis of a loss that does not add up over rows, by one experiment after the other."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jtrain.core.loss import named_means
from jtrain.core.mean import Mean
from jtrain.core.types import Batch
from jtrain.testing.causes import UNSPLIT, Cause, cause
from jtrain.testing.compare import compare_results, distance, flatten
from jtrain.testing.flow import Facts, MeanFlow, RowCoupling, facts_of, trace_mean_flows
from jtrain.testing.splits import (
    SumSplit,
    hide_other_rows,
    make_ragged,
    split_alternating,
    split_halves,
    take_rows,
    with_contents,
)
from jtrain.testing.sums import DRAWS_OF_PARAMS, GRADIENT, TURNS, RowSums, Sums

FIT = 1e-6  # relative tolerance of an explanation: far above rounding
LEAST = 3  # draws of the parameters at which two halves must differ, or be nonzero
AFTER = 1000  # offset that gives rows other numbers


def explain_split(split: SumSplit, sums: Sums) -> Cause:
    """Return why the parts of a split do not add up to its whole.

    Each experiment removes one dependence: random draws, the contents of other rows, their order,
    hidden rows, the number of rows.
    """
    if sums.draws_by_key and sums.with_frozen_draws:
        failing = [frozen for frozen in sums.with_frozen_draws if not frozen.holds(split)]
        if not failing:
            return _explain_draws(sums)
        sums = failing[0]
    parts, whole = sums.parts(split.parts), sums(split.whole)
    if found := _explain_coefficients(parts, whole):
        return found
    if split.kind in {"mask", "empty"} and (found := _explain_coupled_terms(sums)):
        return found
    for name, mean in named_means(whole.returned).items():
        of_parts = [named_means(part.returned)[name] for part in parts]
        if not adds_up(of_parts, mean, sums.close):
            return _explain_mean(name, split, sums)
    if split.kind == "empty" and not np.isfinite(flatten(parts[0].gradient)).all():
        return cause("empty slice", name=GRADIENT)
    return cause("custom derivative")


def explain_dropped(name: str, parts: Sequence[Batch], sums: Sums) -> Cause | None:
    """Return a cause if a mean leaves out some rows of a part and none of them of the batch.

    A maximum does not depend on most rows, of a part or of the batch.
    """
    whole = sums.batch
    for part in parts:
        rows = np.arange(len(part["mask"]))
        dropped = [i for i in rows if not sums.depends_on_rows(name, part, rows == i)]
        used = (sums.depends_on_rows(name, whole, whole["row"] == part["row"][i]) for i in dropped)
        if dropped and len(dropped) < len(rows) and all(used):
            return cause(
                "rows dropped", name=name, part=len(rows), row=dropped[0], rows=sums.case.rows
            )
    return None


def adds_up(parts: Sequence[Mean], whole: Mean, tolerance: float) -> bool:
    """Return whether the sums of parts give the mean of all: both sums equal, or their ratio."""
    total = sum(np.asarray(part.total, np.float64) for part in parts)
    weight = sum(np.asarray(part.weight, np.float64) for part in parts)
    off = lambda actual, expected: distance(np.asarray(actual), np.asarray(expected, np.float64)).by
    if off(weight, whole.weight) <= tolerance:
        return off(total, whole.total) <= tolerance
    if np.any(weight == 0) or np.any(np.asarray(whole.weight) == 0):
        return False
    return off(total * whole.weight, np.asarray(whole.total, np.float64) * weight) <= tolerance


def _explain_coefficients(parts: Sequence[RowSums], whole: RowSums) -> Cause | None:
    of_parts = zip(*(part.returned.terms.coefficients for part in parts), strict=True)
    pairs = zip(whole.returned.terms.coefficients, of_parts, strict=True)
    for index, (coefficient, others) in enumerate(pairs):
        if any(abs(c - coefficient) > FIT * abs(coefficient) for c in others):
            values = ", ".join(f"{float(c):.6g}" for c in others)
            return cause("coefficient of rows", index=index, whole=float(coefficient), parts=values)
    return None


def _explain_coupled_terms(sums: Sums) -> Cause | None:
    """Return the cause for the first term with undeclared coupling, which fails mask checks too."""
    if sums.case.rows_interact != "never":
        return None
    for name in sums.means_of(sums.batch):
        if name.startswith("term") and sums.rows_interact(name):
            return _explain_mean_of_means(name, sums) or _explain_coupling(name, sums)
    return None


def _explain_mean(name: str, split: SumSplit, sums: Sums) -> Cause:
    if sums.case.rows_interact == "never" and sums.rows_interact(name):
        return _explain_mean_of_means(name, sums) or _explain_coupling(name, sums)
    if split.kind == "mask":
        return _explain_hidden(name, split.parts[0], sums)
    if split.kind == "empty" and (found := _explain_empty(name, sums)):
        return found
    order = np.random.default_rng(0).permutation(sums.case.rows)
    if sums.changes(name, sums.batch, take_rows(sums.batch, order)):
        return cause("position", name=name)
    return _explain_counts(name, sums)


# Hidden rows.


def _explain_hidden(name: str, padded: Batch, sums: Sums) -> Cause:
    if _is_inverted(name, padded, sums):
        return cause("inverted mask", name=name)
    if not sums.depends_on_rows(name, padded, ~padded["mask"]):
        return cause("padded size", name=name)
    if sums.rows_interact(name, padded, ~padded["mask"]):
        return cause("hidden rows in a statistic", name=name)
    return cause("hidden rows", name=name)


def _explain_empty(name: str, sums: Sums) -> Cause | None:
    half, empty = (
        hide_other_rows(sums.batch, np.arange(rows)) for rows in (sums.case.rows // 2, 0)
    )
    if _is_inverted(name, half, sums):
        return cause("inverted mask", name=name)
    mean = sums.means_of(empty)[name]
    if not (np.isfinite(mean.total).all() and np.isfinite(mean.weight).all()):
        return cause("empty slice", name=name)
    if sums.depends_on_rows(name, empty, ~empty["mask"]):
        return cause("hidden rows", name=name)
    return None


def _is_inverted(name: str, padded: Batch, sums: Sums) -> bool:
    real = padded["mask"]
    return not sums.depends_on_rows(name, padded, real) and sums.depends_on_rows(
        name, padded, ~real
    )


# The number of rows.


def _explain_counts(name: str, sums: Sums) -> Cause:
    if not sums.case.mask_error:
        if found := _explain_constant(name, sums):
            return found
        short = np.arange(sums.case.rows // 2)
        hidden, alone = hide_other_rows(sums.batch, short), take_rows(sums.batch, short)
        if sums.changes(name, hidden, alone):
            return cause("padded size", name=name)
    if all(halves.are_sums for halves in _halves(name, sums)):
        scalar = "a plain scalar must be the mean over"
        contract = scalar if sums.case.mask_error else "a Mean is divided by"
        return cause("sum as a mean", name=name, contract=contract)
    if found := _explain_mean_of_means(name, sums):
        return found
    if _facts_of_contents(name, sums).keys() - {"whole", "narrow"}:
        return _explain_coupling(name, sums)  # in the trace, though in no experiment
    return cause("number of rows", name=name)


def _explain_constant(name: str, sums: Sums) -> Cause | None:
    """Return a cause if a mean of no rows is not 0, for any number of hidden rows."""
    counts = [hide_other_rows(sums.batch, np.arange(n)) for n in (0, 1, sums.case.rows)]
    empty, *nonempty = (sums.means_of(rows)[name] for rows in counts)
    if sums.changes(name, counts[0], take_rows(counts[0], np.arange(sums.case.rows // 2))):
        return None
    if np.any(np.asarray(empty.weight) != 0) and np.array_equal(
        nonempty[0].weight, nonempty[1].weight
    ):
        return None  # a constant weight counts nothing
    which = "total" if np.any(np.asarray(empty.total) != 0) else "weight"
    constant = float(np.ravel(empty.total if which == "total" else empty.weight)[0])
    found = cause("constant in each slice", name=name, which=which, constant=constant)
    return found if constant else None


def _explain_mean_of_means(name: str, sums: Sums) -> Cause | None:
    """Return a cause if a mean is the mean of each slice's own mean; None otherwise.

    The value for all rows then lies between those of two slices, and divides their interval in the
    same ratio for any parameters: the ratio of the divisors, which no parameter enters.
    """
    failing = [halves for halves in _halves(name, sums) if not halves.add_up]
    if failing and all(halves.constant for halves in failing):
        # No parameter enters: a ratio that is constant in them says nothing.
        failing = [x for x in _halves(name, sums, contents=True) if not x.add_up]
    if not failing or not all(halves.ratio_is_constant for halves in failing):
        return None
    *each, whole = (f"{weight:.6g}" for weight in failing[0].weights)
    return cause("mean of means", name=name, weights=", ".join(each), whole=whole)


class _Halves(NamedTuple):
    """Values of a mean for two halves and all rows, at `d` parameters: d each."""

    first: np.ndarray
    second: np.ndarray
    both: np.ndarray
    mean: np.ndarray  # of the halves by their weights
    weights: np.ndarray  # 3
    constant: bool  # whether no parameter enters

    @property
    def add_up(self) -> bool:
        size = np.abs(self.both) + np.abs(self.mean)
        return bool(np.all(np.abs(self.both - self.mean) <= FIT * size))

    @property
    def are_sums(self) -> bool:
        size = np.abs(self.first) + np.abs(self.second) + np.abs(self.both)
        off = np.abs(self.first + self.second - self.both)
        finite = np.isfinite(off).all()
        return bool(finite and np.all(off <= FIT * size) and np.sum(size > 0) >= LEAST)

    @property
    def ratio_is_constant(self) -> bool:
        """True if the whole divides the interval between the halves in one ratio."""
        first, second, both = self[:3]
        known = np.isfinite(first) & np.isfinite(second) & np.isfinite(both)
        known &= np.abs(first - second) > FIT * (np.abs(first) + np.abs(second))
        if known.sum() < LEAST:
            return False
        between, above = (first - second)[known], (both - second)[known]
        ratio = float(between @ above / (between @ between))
        off = np.max(np.abs(above - ratio * between))
        return FIT < ratio < 1 - FIT and bool(off <= FIT * np.max(np.abs(between)))


def _halves(name: str, sums: Sums, *, contents: bool = False) -> list[_Halves]:
    """Return the values of two halves and of all rows, for two ways to split them.

    If masks may hide rows, one half has fewer rows that count. `contents`: rows of other contents,
    too, one draw after the other.
    """
    batch = sums.batch if sums.case.mask_error else make_ragged(sums.batch)
    draw, rows = np.random.default_rng(0), np.arange(len(batch["mask"]))
    drawn = [with_contents(batch, draw.choice(rows, len(rows)), rows >= 0) for _ in range(TURNS)]
    found = []
    for make in (split_halves, split_alternating):
        splits = map(make, drawn if contents else [batch])
        draws = 1 if contents else DRAWS_OF_PARAMS
        values = [sums.values(name, [*split.parts, split.whole], draws) for split in splits]
        totals, weights = (np.concatenate(x, 1) for x in zip(*values, strict=True))
        with np.errstate(divide="ignore", invalid="ignore"):
            first, second, both = totals / weights
            mean = totals[:2].sum(0) / weights[:2].sum(0)
        constant = bool(np.ptp(totals, 1).max() == 0)
        found.append(_Halves(first, second, both, mean, weights[:, 0], constant))
    return found


# Other rows.


def _explain_coupling(name: str, sums: Sums) -> Cause:
    facts = _facts_of_contents(name, sums)

    def first(*kinds: str) -> RowCoupling | None:
        return next((facts[kind] for kind in kinds if kind in facts), None)

    rows_meet = bool({"meets", "paired"} & facts.keys())
    if mixed := facts.get("mixed"):
        return cause("rows mixed by a draw", at=_at(mixed))
    if ranked := facts.get("ranked"):
        return cause("rows are ranked", name=name, at=_at(ranked))
    if name.startswith("the metric"):
        advice = (
            "Return each sum as a metric of its own (hits, guesses; squares) and divide when you "
            "read the metrics: a Mean adds up, its root or ratio does not."
        )
        at = _at(first("function", "meets", "paired"))
        return cause("function of a sum", name=name, at=at, advice=advice)
    if facts.get("branch") and not rows_meet and "function" not in facts:
        return cause("branch on the batch", name=name, at=_at(facts["branch"]))
    if facts.get("function") and not rows_meet:
        advice = f"Take the function of each row's value, {UNSPLIT}."
        return cause("function of a sum", name=name, at=_at(facts["function"]), advice=advice)
    at = _at(first("paired", "meets", "moved"))
    return cause("batch statistic", name=name, at=at)


def _facts_of_contents(name: str, sums: Sums) -> Facts:
    flow = trace_mean_flows(sums.case).get(name, MeanFlow())
    facts = {**flow.weight.facts, **flow.total.facts}
    return {kind: coupling for kind, coupling in facts.items() if coupling.contents}


def _at(where: RowCoupling | None) -> str:
    return f" ({where.description})" if where else ""


# Random draws.


def _explain_draws(sums: Sums) -> Cause:
    batch = sums.batch if sums.case.mask_error else make_ragged(sums.batch)
    if any(sums.rows_interact(name) for name in sums.means_of(batch)):
        kinds = [facts_of(sums.case, x) for x in ("mixed", "moved", "paired", "meets")]
        where = next((fact for found in kinds for fact in found.values()), None)
        return cause("rows mixed by a draw", at=_at(where))
    by_rows = _renumbering_changes(sums, batch, batch["row"] >= 0)
    follows = by_rows and _follows_first_row(sums, batch)
    return cause("one draw for the batch" if follows else "key of the batch")


def _follows_first_row(sums: Sums, batch: Batch) -> bool:
    """Return whether a row draws by the first row's key and at most its own, and by no other.

    Rows with draws of their own are tried alone: two that are not next to the first row, so that
    the key of a neighbour is another fault.
    """
    places = np.arange(len(batch["row"]))
    if not _renumbering_changes(sums, batch, places > 0):
        return True
    if len(places) < 5 or sums.case.mask_error:
        return False
    return all(
        _renumbering_changes(sums, alone, places == 0)
        and not _renumbering_changes(sums, alone, (places > 0) & (places != place))
        for place in (2, len(places) - 2)
        for alone in [hide_other_rows(sums.batch, places[place])]
    )


def _renumbering_changes(sums: Sums, batch: Batch, chosen: np.ndarray) -> bool:
    row = np.where(chosen, batch["row"] + AFTER, batch["row"]).astype(np.int32)
    other = {**batch, "row": row}
    return compare_results(sums.add([other]), sums.add([batch])).largest > sums.close
