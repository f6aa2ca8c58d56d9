"""Comparisons of a loss by itself: purity, range, finite values, sums for every split."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.core.interpret import equations_in
from jtrain.core.loss import named_means
from jtrain.core.types import Batch
from jtrain.testing.case import LossCase, explain_fixed_rows, is_raised_by_loss
from jtrain.testing.causes import Cause, cause
from jtrain.testing.compare import NOTHING, Distances, compare_results, distance, flatten
from jtrain.testing.float64 import unless_opaque
from jtrain.testing.purity import compare_eager, explain_impurity
from jtrain.testing.report import Comparison, is_far, judge
from jtrain.testing.rounding import ROUNDED, explain_few_bits, explain_nonfinite, explain_rounding
from jtrain.testing.row_sums import CompiledRowSums, RowSums, add_parts, add_sums
from jtrain.testing.splits import (
    SumSplit,
    iter_splits,
    make_ragged,
    repeat_rows,
    split_halves,
    take_rows,
)
from jtrain.testing.trials import FROZEN, NUMBERS_OF_A_ROW, Trials, perturb_params, scale_rows
from jtrain.testing.why_rows import adds_up, explain_dropped, explain_split
from jtrain.train.check_batch.labels import (
    OutOfRangeValue,
    find_out_of_range,
    is_counted,
    swap_value,
)
from jtrain.train.check_batch.uses import find_uses

NOISE_OF_PARAMS = (0.0, 1.0, 3.0)  # in their standard deviations, one for each other batch
MANY = 1021  # rows: beyond the exact counts of 16-bit floats, and odd
DRAWN = (
    "Random draws were not compared where a mask hides rows: they change with the size of the "
    "array, which `couples` forbids to split."
)


def compare_loss(
    case: LossCase,
    log: Callable[[str], None] = lambda line: None,
    not_compared: list[str] | None = None,
) -> Iterator[Comparison]:
    """Yield all comparisons of a loss, without a step.

    They end at the first failure of purity or finite values, which would fail all the others.

    Args:
        log: called with the name of each comparison when it starts.
        not_compared: a list for sentences about comparisons that are not made.
    """
    checks = _LossChecks(case, [] if not_compared is None else not_compared)
    first = {
        "called twice": checks.called_twice,
        "eager": checks.eager,
        "indexes": checks.indexes,
        "finite": checks.finite,
        "half of the rows": checks.on_half,
    }
    for name, check in first.items():
        log(name)
        row = check()
        if row:
            yield row
        if row and row.verdict == "FAILS":
            return
    rest = {split.name: lambda split=split: checks.split(split) for split in checks.splits()}
    rest = {"many rows": checks.many_rows, **rest, "3 rows and the others": checks.uneven}
    rest |= {"other numbers": checks.other_numbers}
    failed = False
    for name, check in rest.items():
        log(name)
        if row := check():
            failed |= row.verdict == "FAILS"
            yield row
    if not failed:
        checks.note_branches()


class _LossChecks:
    def __init__(self, case: LossCase, not_compared: list[str]):
        self.case, self.not_compared = case, not_compared
        self.single, self.double = (_trials(case, double=double) for double in (False, True))

    def called_twice(self) -> Comparison:
        """Compare two traces and check for side effects."""
        return Comparison.explained("called twice", explain_impurity(self.case), None)

    def eager(self) -> Comparison:
        """Compare the loss without `jit` with the compiled loss."""
        each = (self.single.rows, self.double.rows)
        return compare_eager(*(dataclasses.replace(rows, frozen=None, draws=True) for rows in each))

    def finite(self) -> Comparison | None:
        """Return a failure if an output is not finite; None if all are."""
        if self._is_finite(self.case.batch):
            return None
        return Comparison.explained("finite", self._explain_nonfinite(self.case.batch), None)

    def on_half(self) -> Comparison | None:
        """Return a failure if the loss must take another number of rows and does not; else None."""
        if not self.case.half_error:
            return None
        if self.case.couples != "nothing":
            self.not_compared.append(
                f"Masks were not compared: the loss takes {self.case.rows} rows and no fewer "
                f"({self.case.half_error})"
            )
            return None
        rows = self.case.rows
        found = explain_fixed_rows(rows, rows // 2, self.case.half_error)
        return Comparison.explained("half of the rows", found, None)

    def splits(self) -> Iterator[SumSplit]:
        """Return the splits that must not change the result."""
        case, coupled = self.case, self.case.couples != "nothing"
        allow_masks = not case.mask_error and not case.half_error
        return iter_splits(case.batch, allow_masks=allow_masks, coupled=coupled)

    def split(self, split: SumSplit) -> Comparison:
        """Compare the sum over the parts of a split with its whole."""
        single = _split_distances(split, self.single)
        double = unless_opaque(lambda: _split_distances(split, self.double))
        trials = self.single if double is None else self.double
        if not np.isfinite(single.largest) and (infinite := self._nonfinite_part(split)):
            found = self._explain_nonfinite(infinite)
            return Comparison.explained(split.name, found, single, double)
        if is_far(single, double) and self._only_draws_differ(split, trials):
            return Comparison(split.name, "ok", _split_distances(split, trials.frozen_trials[0]))
        explain = lambda: explain_split(split, trials)
        return judge(split.name, single, double, explain, lambda: self._explain_rounding(single))

    def many_rows(self) -> Comparison | None:
        """Return a failure if a sum in few bits is wrong for many rows; else None."""
        batch = repeat_rows(self.case.batch, MANY)
        for kind, narrow, make_wide in (
            ("whole", self.double, lambda: self.double.without_overflow),
            ("narrow", self.single, lambda: self.double),
        ):
            if row := self._compare_counts(kind, batch, narrow, make_wide):
                return row
        return None

    def uneven(self) -> Comparison | None:
        """Return a failure if two parts of different size do not add up; else None."""
        case, rows = self.case, np.arange(self.case.rows)
        if case.couples != "nothing" or case.half_error or case.rows < 6:
            return None
        parts = tuple(take_rows(case.batch, some) for some in np.split(rows, [3]))
        split = SumSplit("3 rows and the others", "split", parts, case.batch)

        def failing(trials: Trials) -> str:
            *each, whole = (named_means(trials.rows.forward(x)) for x in (*parts, case.batch))
            fails = lambda name: not adds_up([x[name] for x in each], whole[name], trials.close)
            return next(filter(fails, whole), "")

        try:
            name = failing(self.single)
        except Exception as error:  # rows come in pairs, say
            if not is_raised_by_loss(error):
                raise
            return None
        if not name or self.single.draws_by_key:  # drawn for an array of another size
            return None
        exact = unless_opaque(lambda: failing(self.double))
        if exact == "":  # rounding, which the halves show
            return None
        trials = self.single if exact is None else self.double
        found = explain_dropped(name, parts, trials) or explain_split(split, trials)
        return Comparison.explained(split.name, found, None)

    def _compare_counts(
        self, kind: str, batch: Batch, narrow: Trials, make_wide: Callable[[], Trials]
    ) -> Comparison | None:
        """Return a failure if a mean that is summed in few bits differs from one in more bits."""
        facts = self.single.facts(kind)
        if not facts:
            return None
        exact = unless_opaque(lambda: named_means(make_wide().rows.forward(batch)))
        if exact is None:
            return None
        rounded = named_means(narrow.rows.forward(batch))
        for name, where in facts.items():
            one, other = rounded[name], exact[name]
            pairs = (one.total, other.total), (one.weight, other.weight)
            off = max(distance(np.asarray(a), np.asarray(b)).by for a, b in pairs)
            if off > ROUNDED:
                distances = Distances(off, NOTHING, NOTHING, NOTHING)
                found = explain_few_bits(kind, name, where)
                return Comparison.explained(f"{MANY:,} rows", found, distances)
        return None

    def indexes(self) -> Comparison | None:
        """Return a failure if an integer of the batch indexes out of range; else None."""
        found = find_counted_index(self.case, self.single)
        return found and Comparison.explained("indexes", found.cause, found.distances)

    def other_numbers(self) -> Comparison | None:
        """Compare two halves with their whole for other contents, parameters, keys and orders.

        One batch may hide a fault: a ratio that is the same in both halves, a coin that mixes rows
        for some keys. The result is None if rows are coupled by declaration or none is finite.
        """
        if self.case.couples != "nothing":
            return None
        worst: Distances | None = None
        for seed, size in enumerate(NOISE_OF_PARAMS):
            split, single, double = self._at_other_numbers(seed, size)
            off = _split_distances(split, single)
            if not np.isfinite(off.largest):
                continue
            exact = unless_opaque(functools.partial(_split_distances, split, double))
            if off.largest > single.close and (exact is None or exact.largest > double.close):
                found = explain_split(split, single if exact is None else double)
                return Comparison.explained("other numbers", found, off, exact)
            worst = off if worst is None or off.largest > worst.largest else worst
        return None if worst is None else Comparison("other numbers", "ok", worst)

    def _at_other_numbers(self, seed: int, size: float) -> tuple[SumSplit, Trials, Trials]:
        """Return two halves of rows with other contents, and experiments at other numbers."""
        case, draw = self.case, np.random.default_rng(seed)
        order, params = draw.permutation(case.rows), case.params
        batch = {n: x if n in NUMBERS_OF_A_ROW else x[order] for n, x in case.batch.items()}
        names = {equation.primitive.name for equation in equations_in(case.trace.program)}
        if "while" not in names:  # a loop with a condition may not end for other numbers
            params = perturb_params(params, seed, size)
            scale, side = 10 ** draw.uniform(-1, 1, case.rows), draw.choice([-1.0, 1.0], case.rows)
            batch = scale_rows(batch, scale, side)
        key = jax.random.key(100 + seed)
        single, double = (each.at(params, batch, key) for each in (self.single, self.double))
        return split_halves(batch if case.mask_error else make_ragged(batch)), single, double

    def note_branches(self) -> None:
        """Add a sentence on branches that the numbers of this batch may never take."""
        for name, where in self.single.facts("branch").items():
            if where.contents and self.case.couples == "nothing":
                self.not_compared.append(
                    f"Only the branches that this batch takes were compared: {name} branches on a "
                    f"sum over the rows of a slice ({where.description}), and parts of another "
                    f"batch may take another branch than the whole. Decide for each row."
                )
                return

    def _nonfinite_part(self, split: SumSplit) -> Batch | None:
        """Return the first part, or the whole, that has unmasked rows and no finite result."""
        some = [batch for batch in (*split.parts, split.whole) if batch["mask"].any()]
        return next((batch for batch in some if not self._is_finite(batch)), None)

    def _is_finite(self, batch: Batch) -> bool:
        """Return whether means and gradient of a batch are finite in float32."""
        sums = self.single.rows(batch)
        numbers = [
            x for mean in named_means(sums.returned).values() for x in (mean.total, mean.weight)
        ]
        return all(np.isfinite(x).all() for x in (*numbers, flatten(sums.gradient)))

    def _explain_nonfinite(self, batch: Batch) -> Cause:
        return explain_nonfinite(self.single.rows, batch) or cause("not finite (compiled)")

    def _explain_rounding(self, single: Distances) -> Cause | None:
        """Return the cause if rounding does not explain a difference that vanishes in float64."""
        for name, where in self.single.facts("narrow").items():
            return explain_few_bits("narrow", name, where)
        return explain_rounding(self.case, single)

    def _only_draws_differ(self, split: SumSplit, trials: Trials) -> bool:
        """Return whether only random draws differ, of a batch that is never split."""
        if self.case.couples == "nothing" or not trials.draws_by_key or not trials.frozen_trials:
            return False
        if not all(frozen.holds(split) for frozen in trials.frozen_trials):
            return False
        if DRAWN not in self.not_compared:
            self.not_compared.append(DRAWN)
        return True


def _trials(case: LossCase, *, double: bool) -> Trials:
    """Return experiments on the loss, with its draws fixed if the case asks for it.

    If a kernel hides the draws, the loss gets no key instead.
    """
    rows = CompiledRowSums(case, double=double, frozen=None if case.draws else FROZEN[0])
    if not case.draws and unless_opaque(lambda: rows.weights(case.batch)) is None:
        rows = CompiledRowSums(case, double=double, draws=False)
    return Trials(rows)


def _split_distances(split: SumSplit, trials: Trials) -> Distances:
    actual, expected = (add_parts(trials.rows, parts)[0] for parts in (split.parts, [split.whole]))
    return compare_results(actual, expected)


class OutOfRange(NamedTuple):
    """An out-of-range integer: its effect on the result, and the cause."""

    distances: Distances
    """Distances from the loss with an integer in range instead."""
    cause: Cause


def find_counted_index(case: LossCase, trials: Trials) -> OutOfRange | None:
    """Return the first out-of-range index that changes the loss; None if there is none.

    The search is that of a run's first batch (`train.check_batch`), over the batch of the case
    and those of `case.more_batches()`.
    """
    uses = find_uses(case.trace.program, case.batch, case.trace.leaves_of_batch())
    if not uses.found:
        return None
    for batch in _chunks(case):
        for found in find_out_of_range(uses, batch):
            original, corrected = swap_value(batch, found)
            before, others = trials.rows(original), [trials.rows(other) for other in corrected]
            if any(is_counted(_numbers(before), _numbers(other)) for other in others):
                off = compare_results(add_sums([before], case), add_sums([others[0]], case))
                return OutOfRange(off, _cause(found))
    return None


def _chunks(case: LossCase) -> Iterator[Mapping[str, Any]]:
    """Yield all rows to check, as many at a time as were traced."""
    yield case.batch
    for batch in case.more_batches():
        rows = len(batch["mask"])
        for first in range(0, rows, case.rows):
            indices = np.minimum(np.arange(first, first + case.rows), rows - 1)
            part = {name: np.asarray(array)[indices] for name, array in batch.items()}
            # A loss without masks is checked on full batches only.
            yield part | {"mask": np.ones(case.rows, bool)} if case.mask_error else part


def _numbers(sums: RowSums) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the totals and the weights of the loss and its metrics."""
    found = named_means(sums.returned).values()
    return [np.asarray(m.total) for m in found], [np.asarray(m.weight) for m in found]


def _cause(found: OutOfRangeValue) -> Cause:
    shift = f", `{found.leaf} - 1` where they count from 1" if found.value == found.entries else ""
    return cause(
        "index out of range",
        leaf=found.leaf,
        value=found.value,
        row=found.row,
        entries=found.entries,
        last=found.entries - 1,
        shape=found.shape,
        shift=shift,
    )
