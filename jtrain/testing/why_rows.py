"""Diagnosis of a loss that does not add up over rows, by one experiment after the other."""

from collections.abc import Sequence

import numpy as np

from jtrain.core.interpret import equations_in
from jtrain.core.loss import named_means
from jtrain.core.mean import Mean
from jtrain.core.types import Batch
from jtrain.testing.causes import UNSPLIT, Cause, cause
from jtrain.testing.compare import compare_results, distance, flatten
from jtrain.testing.flow import RowCoupling
from jtrain.testing.rounding import explain_overflow
from jtrain.testing.row_sums import RowSums, add_parts
from jtrain.testing.splits import (
    SumSplit,
    hide_other_rows,
    make_ragged,
    split_alternating,
    split_halves,
    take_rows,
)
from jtrain.testing.trials import DRAWS_OF_PARAMS, GRADIENT, TURNS, MeanFlow, Trials, with_contents

FIT = 1e-6  # relative tolerance of an explanation: far above rounding
LEAST = 3  # draws of the parameters at which two halves must differ, or be nonzero
AFTER = 1000  # offset that gives rows other numbers


def explain_split(split: SumSplit, trials: Trials) -> Cause:
    """Return why the parts of a split do not add up to its whole.

    Each experiment removes one dependence: random draws, integer overflow, the contents of other
    rows, their order, hidden rows, the number of rows.
    """
    if trials.draws_by_key and trials.frozen_trials:
        failing = [frozen for frozen in trials.frozen_trials if not frozen.holds(split)]
        if not failing:
            return _explain_draws(trials)
        trials = failing[0]
    if trials.double and trials.facts("whole") and trials.without_overflow.holds(split):
        return explain_overflow(split, trials)
    (_, parts), (_, whole) = (add_parts(trials.rows, x) for x in (split.parts, [split.whole]))
    if found := _explain_coefficients(parts, whole[0]):
        return found
    if split.kind in {"mask", "empty"} and (found := _explain_coupled_terms(trials)):
        return found
    for name, mean in named_means(whole[0].returned).items():
        of_parts = [named_means(part.returned)[name] for part in parts]
        if not adds_up(of_parts, mean, trials.close):
            return _explain_mean(name, split, trials)
    if split.kind == "empty" and not np.isfinite(flatten(parts[0].gradient)).all():
        return cause("empty slice", name=GRADIENT)
    return cause("gradient")


def explain_dropped(name: str, parts: Sequence[Batch], trials: Trials) -> Cause | None:
    """Return a cause if a mean leaves out some rows of a part that count; else None."""
    for part in parts:
        rows = np.arange(len(part["mask"]))
        dropped = [i for i in rows if not trials.depends_on_rows(name, part, rows == i)]
        if dropped and len(dropped) < len(rows):
            return cause(
                "rows dropped", name=name, part=len(rows), row=dropped[0], rows=trials.case.rows
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
    """Return a cause if a coefficient is computed from the rows."""
    for index, coefficient in enumerate(whole.returned.terms.coefficients):
        of_parts = [float(part.returned.terms.coefficients[index]) for part in parts]
        if any(abs(c - float(coefficient)) > FIT * abs(coefficient) for c in of_parts):
            values = ", ".join(f"{c:.6g}" for c in of_parts)
            whole_value = float(coefficient)
            return cause("coefficient of rows", index=index, whole=whole_value, parts=values)
    return None


def _explain_coupled_terms(trials: Trials) -> Cause | None:
    """Return the cause for the first term with undeclared coupling, which fails mask checks too."""
    if trials.case.couples != "nothing":
        return None
    names = [name for name in trials.means_of(trials.batch) if name.startswith("term")]
    meeting = next((name for name in names if trials.rows_interact(name)), None)
    if meeting is None:
        return None
    return _explain_mean_of_means(meeting, trials) or _explain_coupling(meeting, trials)


def _explain_mean(name: str, split: SumSplit, trials: Trials) -> Cause:
    """Return why a mean does not add up."""
    if trials.case.couples == "nothing" and trials.rows_interact(name):
        return _explain_mean_of_means(name, trials) or _explain_coupling(name, trials)
    if split.kind == "mask":
        return _explain_hidden(name, split.parts[0], trials)
    if split.kind == "empty" and (found := _explain_empty(name, trials)):
        return found
    order = np.random.default_rng(0).permutation(trials.case.rows)
    if trials.changes(name, trials.batch, take_rows(trials.batch, order)):
        return cause("position", name=name)
    return _explain_counts(name, trials)


# Hidden rows.


def _explain_hidden(name: str, padded: Batch, trials: Trials) -> Cause:
    """Return why a mean of a padded batch differs from that of its real rows alone."""
    if _is_inverted(name, padded, trials):
        return cause("inverted mask", name=name)
    if not trials.depends_on_rows(name, padded, ~padded["mask"]):
        return cause("padded size", name=name)
    if trials.rows_interact(name, padded, ~padded["mask"]):
        return cause("hidden rows in a statistic", name=name)
    return cause("hidden rows", name=name)


def _explain_empty(name: str, trials: Trials) -> Cause | None:
    """Return why a slice without unmasked rows changes a mean; None if no reason is found."""
    half, empty = (
        hide_other_rows(trials.batch, np.arange(rows)) for rows in (trials.case.rows // 2, 0)
    )
    if _is_inverted(name, half, trials):
        return cause("inverted mask", name=name)
    mean = trials.means_of(empty)[name]
    if not (np.isfinite(mean.total).all() and np.isfinite(mean.weight).all()):
        return cause("empty slice", name=name)
    if trials.depends_on_rows(name, empty, ~empty["mask"]):
        return cause("hidden rows", name=name)
    return None


def _is_inverted(name: str, padded: Batch, trials: Trials) -> bool:
    """Return whether hidden rows are counted and the others are not."""
    real = padded["mask"]
    return not trials.depends_on_rows(name, padded, real) and trials.depends_on_rows(
        name, padded, ~real
    )


# The number of rows.


def _explain_counts(name: str, trials: Trials) -> Cause:
    """Return why a mean differs from that of its parts although rows do not interact."""
    if _mixes_row_numbers(name, trials):
        return cause("row numbers", name=name)
    if not trials.case.mask_error:
        if found := _explain_constant(name, trials):
            return found
        short = np.arange(trials.case.rows // 2)
        hidden, alone = hide_other_rows(trials.batch, short), take_rows(trials.batch, short)
        if trials.changes(name, hidden, alone):
            return cause("padded size", name=name)
    if _is_sum(name, trials):
        scalar = "a plain scalar must be the mean over"
        contract = scalar if trials.case.mask_error else "a Mean is divided by"
        return cause("sum as a mean", name=name, contract=contract)
    if found := _explain_mean_of_means(name, trials):
        return found
    flow = trials.flows.get(name, MeanFlow())
    facts = {**flow.weight.facts, **flow.total.facts}.items()
    if any(x.contents for kind, x in facts if kind not in ("whole", "narrow")):
        return _explain_coupling(name, trials)  # in the trace, though in no experiment
    return cause("number of rows", name=name)


def _mixes_row_numbers(name: str, trials: Trials) -> bool:
    """Return whether the numbers of some rows change what other rows add."""
    batch, half = trials.batch, np.arange(trials.case.rows) < trials.case.rows // 2
    changes = half & False, half, ~half, half | True
    found = [{**batch, "row": batch["row"] + 7 * change.astype(np.int32)} for change in changes]
    return any(
        np.max(np.abs(x[0] - x[1] - x[2] + x[3])) > trials.close * np.max(np.abs(x))
        for x in trials.values(name, found)  # n d
    )


def _explain_constant(name: str, trials: Trials) -> Cause | None:
    """Return a cause if a mean of no rows is not 0, for any number of hidden rows."""
    counts = [hide_other_rows(trials.batch, np.arange(n)) for n in (0, 1, trials.case.rows)]
    empty, *nonempty = (trials.means_of(rows)[name] for rows in counts)
    if trials.changes(name, counts[0], take_rows(counts[0], np.arange(trials.case.rows // 2))):
        return None
    if np.any(np.asarray(empty.weight) != 0) and np.array_equal(
        nonempty[0].weight, nonempty[1].weight
    ):
        return None  # a constant weight counts nothing
    which = "total" if np.any(np.asarray(empty.total) != 0) else "weight"
    constant = float(np.ravel(empty.total if which == "total" else empty.weight)[0])
    found = cause("constant in each slice", name=name, which=which, constant=constant)
    return found if constant else None


def _explain_mean_of_means(name: str, trials: Trials) -> Cause | None:
    """Return a cause if a mean is the mean of each slice's own mean; None otherwise.

    The value for all rows then lies between those of two slices, and divides their interval in the
    same ratio for any parameters: the ratio of the divisors, which no parameter enters.
    """
    failing = [values for values in _halves(name, trials) if not _halves_add_up(values)]
    if failing and all(np.ptp(totals, 1).max() == 0 for totals, _ in failing):
        # No parameter enters: a ratio that is constant in them says nothing.
        failing = [x for x in _halves(name, trials, contents=True) if not _halves_add_up(x)]
    if not failing or not all(_has_constant_ratio(values) for values in failing):
        return None
    *each, whole = (f"{weight:.6g}" for weight in failing[0][1][:, 0])
    return cause("mean of means", name=name, weights=", ".join(each), whole=whole)


def _is_sum(name: str, trials: Trials) -> bool:
    """Return whether a sum is returned as if it were a mean."""
    for values in _halves(name, trials):
        first, second, both = _means(values)
        off, size = np.abs(first + second - both), np.abs(first) + np.abs(second) + np.abs(both)
        if not np.isfinite(off).all() or np.any(off > FIT * size) or np.sum(size > 0) < LEAST:
            return False
    return True


def _halves(
    name: str, trials: Trials, *, contents: bool = False
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return totals and weights of two halves and of all rows, for two ways to split them.

    If masks may hide rows, one half has fewer rows that count. `contents`: rows of other contents,
    too, one draw after the other.
    """
    batch = trials.batch if trials.case.mask_error else make_ragged(trials.batch)
    draw, rows = np.random.default_rng(0), np.arange(len(batch["mask"]))
    drawn = [with_contents(batch, draw.choice(rows, len(rows)), rows >= 0) for _ in range(TURNS)]
    found = []
    for make in (split_halves, split_alternating):
        splits = map(make, drawn if contents else [batch])
        draws = 1 if contents else DRAWS_OF_PARAMS
        values = [trials.values(name, [*split.parts, split.whole], draws) for split in splits]
        totals, weights = (np.concatenate(x, 1) for x in zip(*values, strict=True))
        found.append((totals, weights))
    return found


def _means(values: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return values[0] / values[1]


def _halves_add_up(values: tuple[np.ndarray, np.ndarray]) -> bool:
    """Return whether the whole is the weighted mean of the halves."""
    totals, weights = (np.stack([x[0] + x[1], x[2]]) for x in values)
    actual, expected = _means((totals, weights))
    return bool(np.all(np.abs(actual - expected) <= FIT * (np.abs(actual) + np.abs(expected))))


def _has_constant_ratio(values: tuple[np.ndarray, np.ndarray]) -> bool:
    first, second, both = _means(values)
    known = np.isfinite(first) & np.isfinite(second) & np.isfinite(both)
    known &= np.abs(first - second) > FIT * (np.abs(first) + np.abs(second))
    if known.sum() < LEAST:
        return False
    between, above = (first - second)[known], (both - second)[known]
    ratio = float(between @ above / (between @ between))
    off = np.max(np.abs(above - ratio * between))
    return FIT < ratio < 1 - FIT and bool(off <= FIT * np.max(np.abs(between)))


# Other rows.


def _explain_coupling(name: str, trials: Trials) -> Cause:
    """Return the operation by which rows interact, from the trace, once they are known to."""
    flow = trials.flows.get(name, MeanFlow())
    facts = {**flow.weight.facts, **flow.total.facts}
    facts = {kind: coupling for kind, coupling in facts.items() if coupling.contents}

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
    if "meets" in flow.weight.facts and "paired" not in facts and trials.weights_interact(name):
        return cause("weights of the batch", name=name, at=at)
    return cause("batch statistic", name=name, at=at)


def _at(where: RowCoupling | None) -> str:
    return f" ({where.description})" if where else ""


# Random draws.


def _explain_draws(trials: Trials) -> Cause:
    """Return what the draws of a row depend on besides the row's own key."""
    vmapped = [
        str(equation.invars[0].aval.dtype)
        for equation in equations_in(trials.case.trace.program)
        if equation.primitive.name == "random_bits" and equation.invars[0].aval.shape
    ]
    if other := [dtype for dtype in vmapped if "rbg" in dtype]:
        return cause("vmap of another generator", generator=other[0])
    batch = trials.batch if trials.case.mask_error else make_ragged(trials.batch)
    first = add_parts(trials.rows, [batch])[0]
    names = [*named_means(trials.rows(batch).returned), GRADIENT]
    if any(trials.rows_interact(name) for name in names):
        facts = [flow.total.facts for flow in trials.flows.values()]
        kinds = ("mixed", "moved", "paired", "meets")
        where = next((x[kind] for kind in kinds for x in facts if kind in x), None)
        return cause("rows mixed by a draw", at=_at(where))
    if not _renumbering_changes(trials, batch, batch["row"] >= 0):
        order = np.random.default_rng(0).permutation(len(batch["row"]))
        moved = add_parts(trials.rows, [take_rows(batch, order)])[0]
        same = compare_results(moved, first).largest <= trials.close
        return cause("key of the number of rows" if same else "key of the position")
    follows = _follows_first_row(trials, batch)
    return cause("one draw for the batch" if follows else "key of other rows")


def _follows_first_row(trials: Trials, batch: Batch) -> bool:
    """Return whether a row draws by the first row's key and at most its own, and by no other.

    Rows with draws of their own are tried alone: two that are not next to the first row, so that
    the key of a neighbour is another fault.
    """
    places = np.arange(len(batch["row"]))
    if not _renumbering_changes(trials, batch, places > 0):
        return True
    if len(places) < 5 or trials.case.mask_error:
        return False
    return all(
        _renumbering_changes(trials, alone, places == 0)
        and not _renumbering_changes(trials, alone, (places > 0) & (places != place))
        for place in (2, len(places) - 2)
        for alone in [hide_other_rows(trials.batch, places[place])]
    )


def _renumbering_changes(trials: Trials, batch: Batch, chosen: np.ndarray) -> bool:
    """Return whether other numbers for the chosen rows change the sums of the batch."""
    row = np.where(chosen, batch["row"] + AFTER, batch["row"]).astype(np.int32)
    first, other = (add_parts(trials.rows, [x])[0] for x in (batch, {**batch, "row": row}))
    return compare_results(other, first).largest > trials.close
