"""Comparisons of a loss by itself: purity, range, finite values, sums for every split."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jtrain.core.interpret import equations_in
from jtrain.core.loss import named_means
from jtrain.core.types import Batch
from jtrain.testing.case import LossCase, is_raised_by_loss
from jtrain.testing.causes import Cause, cause
from jtrain.testing.compare import Distances, compare_results, distance, flatten
from jtrain.testing.float64 import unless_opaque
from jtrain.testing.flow import facts_of
from jtrain.testing.purity import explain_impurity
from jtrain.testing.report import SINGLE, Comparison, is_far, judge
from jtrain.testing.splits import (
    NUMBERS_OF_A_ROW,
    SumSplit,
    iter_splits,
    make_ragged,
    repeat_rows,
    split_halves,
    split_rows,
)
from jtrain.testing.sums import FROZEN, RowSums, Sums, add_sums, perturb, scale_rows
from jtrain.testing.why_numbers import explain_few_bits, explain_nonfinite, explain_rounding
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
    "array, which `rows_interact` forbids to split."
)


def compare_loss(
    case: LossCase,
    log: Callable[[str], None] = lambda line: None,
    not_compared: list[str] | None = None,
) -> Iterator[Comparison]:
    """Yield all comparisons of a loss, without a step.

    They end at the first failure of purity or finite values, which would fail all the others.

    Args:
        not_compared: a list for sentences about comparisons that are not made.
    """
    checks = _LossChecks(case, [] if not_compared is None else not_compared)
    first = {
        "called twice": checks.called_twice,
        "indexes": checks.indexes,
        "finite": checks.finite,
        "half of the rows": checks.on_half,
    }
    for name, check in first.items():
        log(name)
        row = check(name)
        if row:
            yield row
        if row and row.verdict == "FAILS":
            return
    rest: dict[str, Callable[[str], Comparison | None]] = {
        "4 times the loss": checks.four_times,
        f"{MANY:,} rows": checks.many_rows,
    }
    for split in checks.splits():
        rest[split.name] = lambda name, split=split: checks.split(split)
    rest |= {"3 rows and the others": checks.uneven, "other numbers": checks.other_numbers}
    failed = False
    for name, check in rest.items():
        log(name)
        if row := check(name):
            failed |= row.verdict == "FAILS"
            yield row
    if not failed:
        checks.note_branches()


class _LossChecks:
    """The comparisons of a loss; None where a comparison has a row only if it fails."""

    def __init__(self, case: LossCase, not_compared: list[str]):
        self.case, self.not_compared = case, not_compared
        self.coupled = case.rows_interact != "never"
        self.single, self.double = (_sums(case, double=double) for double in (False, True))

    def called_twice(self, name: str) -> Comparison:
        return Comparison.explained(name, explain_impurity(self.case), None)

    def indexes(self, name: str) -> Comparison | None:
        return find_counted_index(self.case, self.single, name)

    def finite(self, name: str) -> Comparison | None:
        if self._is_finite(self.case.batch):
            return None
        return Comparison.explained(name, explain_nonfinite(self.single, self.case.batch), None)

    def on_half(self, name: str) -> Comparison | None:
        rows, error = self.case.rows, self.case.half_error
        if error and self.coupled:
            self.not_compared.append(
                f"Masks were not compared: the loss takes {rows} rows and no fewer ({error})"
            )
        if not error or self.coupled:
            return None
        found = cause("fixed number of rows", rows=rows, fewer=rows // 2, raised=error)
        return Comparison.explained(name, found, None)

    def splits(self) -> Iterator[SumSplit]:
        allow_masks = not self.case.mask_error and not self.case.half_error
        return iter_splits(self.case.batch, allow_masks=allow_masks, coupled=self.coupled)

    def split(self, split: SumSplit) -> Comparison:
        single = self.single.compare(split)
        double = unless_opaque(lambda: self.double.compare(split))
        sums = self.single if double is None else self.double
        if not np.isfinite(single.largest):
            some = [batch for batch in (*split.parts, split.whole) if batch["mask"].any()]
            for batch in some:
                if not self._is_finite(batch):
                    found = explain_nonfinite(self.single, batch)
                    return Comparison.explained(split.name, found, single, double)
        if is_far(single, double) and self._only_draws_differ(split, sums):
            return Comparison(split.name, "ok", sums.with_frozen_draws[0].compare(split))

        def explain_close() -> Cause | None:
            found = explain_few_bits(self.case, self.single, self.double, split.whole)
            return found or explain_rounding(self.case, single)

        return judge(split.name, single, double, lambda: explain_split(split, sums), explain_close)

    def four_times(self, name: str) -> Comparison:
        """Compare the gradient of 4 times the loss, divided by 4, with that of the loss.

        A loss is divided by the weight of all rows after its own code, so its derivative must be
        proportional to the cotangent. Powers of two round nothing.
        """
        batch = self.case.batch

        def off(sums: Sums) -> Distances:
            weights = sums.weights(batch)
            one, four = (sums(batch, [w / n for w in weights]).gradient for n in (1, 4))
            return Distances(gradient=distance(jax.tree.map(lambda x: x / 4, four), one))

        single = off(self.single)
        double = unless_opaque(lambda: off(self.double)) if single.largest > SINGLE else None
        explain = lambda: cause("custom derivative (scaled)")
        return judge(name, single, double, explain, lambda: None)

    def many_rows(self, name: str) -> Comparison | None:
        batch = repeat_rows(self.case.batch, MANY)
        found = explain_few_bits(self.case, self.single, self.double, batch)
        return found and Comparison.explained(name, found, None)

    def uneven(self, name: str) -> Comparison | None:
        case = self.case
        if self.coupled or case.half_error or case.rows < 6:
            return None
        split = split_rows(name, case.batch, np.split(np.arange(case.rows), [3]))

        def failing(sums: Sums) -> str:
            *each, whole = (sums.forward(x) for x in (*split.parts, split.whole))
            fails = lambda name: not adds_up([x[name] for x in each], whole[name], sums.close)
            return next(filter(fails, whole), "")

        try:
            mean = failing(self.single)
        except Exception as error:  # rows come in pairs, say
            if not is_raised_by_loss(error):
                raise
            return None
        if not mean or self.single.draws_by_key:  # drawn for an array of another size
            return None
        exact = unless_opaque(lambda: failing(self.double))
        if exact == "":  # rounding, which the halves show
            return None
        sums = self.single if exact is None else self.double
        found = explain_dropped(mean, split.parts, sums) or explain_split(split, sums)
        return Comparison.explained(name, found, None)

    def other_numbers(self, name: str) -> Comparison | None:
        """Compare two halves with their whole for other contents, parameters, keys and orders.

        One batch may hide a fault: a ratio that is the same in both halves, a coin that mixes rows
        for some keys. The result is None if rows are coupled by declaration or none is finite.
        """
        if self.coupled:
            return None
        worst: Distances | None = None
        for seed, size in enumerate(NOISE_OF_PARAMS):
            split, single, double = self._at_other_numbers(seed, size)
            off = single.compare(split)
            if not np.isfinite(off.largest):
                continue
            exact = unless_opaque(functools.partial(double.compare, split))
            if off.largest > single.close and (exact is None or exact.largest > double.close):
                found = explain_split(split, single if exact is None else double)
                return Comparison.explained(name, found, off, exact)
            worst = off if worst is None or off.largest > worst.largest else worst
        return None if worst is None else Comparison(name, "ok", worst)

    def _at_other_numbers(self, seed: int, size: float) -> tuple[SumSplit, Sums, Sums]:
        """Return two halves of rows with other contents, and their sums at other numbers."""
        case, draw = self.case, np.random.default_rng(seed)
        order, params = draw.permutation(case.rows), case.params
        batch = {n: x if n in NUMBERS_OF_A_ROW else x[order] for n, x in case.batch.items()}
        names = {equation.primitive.name for equation in equations_in(case.trace.program)}
        if "while" not in names:  # a loop with a condition may not end for other numbers
            params = perturb(params, seed, size)
            scale, side = 10 ** draw.uniform(-1, 1, case.rows), draw.choice([-1.0, 1.0], case.rows)
            batch = scale_rows(batch, scale, side)
        at = {"params": params, "batch": batch, "key": jax.random.key(100 + seed)}
        single, double = (dataclasses.replace(x, **at) for x in (self.single, self.double))
        return split_halves(batch if case.mask_error else make_ragged(batch)), single, double

    def note_branches(self) -> None:
        """Add a sentence on branches that the numbers of this batch may never take."""
        branches = facts_of(self.case, "branch").items()
        found = [(n, where) for n, where in branches if where.contents and not self.coupled]
        for name, where in found[:1]:
            self.not_compared.append(
                f"Only the branches that this batch takes were compared: {name} branches on a "
                f"sum over the rows of a slice ({where.description}), and parts of another "
                f"batch may take another branch than the whole. Decide for each row."
            )

    def _is_finite(self, batch: Batch) -> bool:
        sums = self.single(batch)
        numbers = *_numbers(sums)[0], *_numbers(sums)[1], flatten(sums.gradient)
        return all(np.isfinite(x).all() for x in numbers)

    def _only_draws_differ(self, split: SumSplit, sums: Sums) -> bool:
        """Return whether only random draws differ, of a batch that is never split."""
        if not self.coupled or not sums.draws_by_key or not sums.with_frozen_draws:
            return False
        if not all(frozen.holds(split) for frozen in sums.with_frozen_draws):
            return False
        if DRAWN not in self.not_compared:
            self.not_compared.append(DRAWN)
        return True


def _sums(case: LossCase, *, double: bool) -> Sums:
    """Return the sums of the loss, with its draws fixed if the case asks for it.

    If a kernel hides the draws, the loss gets no key instead.
    """
    sums = Sums(case=case, double=double, frozen=None if case.draws else FROZEN[0])
    if not case.draws and unless_opaque(lambda: sums.weights(case.batch)) is None:
        return Sums(case=case, double=double, draws=False)
    return sums


def find_counted_index(case: LossCase, sums: Sums, check: str = "indexes") -> Comparison | None:
    """Return the failure of the first out-of-range index that changes the loss; None if none does.

    The search is that of a run's first batch (`train.check_batch`), over the batch of the case
    and those of `case.more_batches()`.
    """
    names = [path[0].key if argument == 2 else None for argument, path in case.trace.inputs]
    uses = find_uses(case.trace.program, case.batch, names)
    if not uses.found:
        return None
    for batch in _chunks(case):
        for found in find_out_of_range(uses, batch):
            original, corrected = swap_value(batch, found)
            before, others = sums(original), [sums(other) for other in corrected]
            if any(is_counted(_numbers(before), _numbers(other)) for other in others):
                off = compare_results(add_sums([before], case), add_sums([others[0]], case))
                return Comparison.explained(check, _out_of_range(found), off)
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
    found = named_means(sums.returned).values()
    return [np.asarray(m.total) for m in found], [np.asarray(m.weight) for m in found]


def _out_of_range(found: OutOfRangeValue) -> Cause:
    shift = f", `{found.leaf} - 1` where they count from 1" if found.value == found.entries else ""
    return cause("index out of range", **found._asdict(), last=found.entries - 1, shift=shift)
