"""The loss by itself: a function of finite numbers, whose sums add up however rows are split."""

from collections.abc import Callable, Iterator

import numpy as np

from jtrain.core.mean import Mean
from jtrain.core.types import Batch
from jtrain.testing.case import LossCase
from jtrain.testing.cause import Cause
from jtrain.testing.compare import NOTHING, distance, flatten
from jtrain.testing.eager import eager
from jtrain.testing.fixed_rows import fixed_rows
from jtrain.testing.float64 import if_seen
from jtrain.testing.planting import planted
from jtrain.testing.purity import cause_of_impurity
from jtrain.testing.ranges import out_of_range
from jtrain.testing.report import Comparison
from jtrain.testing.result import Distances, distances
from jtrain.testing.rounding import ROUNDED, no_rounding
from jtrain.testing.row_flow import means
from jtrain.testing.row_sums import CompiledRowSums, together
from jtrain.testing.splits import SumSplit, repeated, splits
from jtrain.testing.trials import FROZEN, Trials
from jtrain.testing.verdict import is_far, judged
from jtrain.testing.why_numbers import cause_of_few_bits, cause_of_infinity
from jtrain.testing.why_rows import cause_of_split

MANY = 1021  # rows: more than 16 bits count, and no multiple of a power of 2
DRAWN = (
    "What is drawn was not compared where a mask hides rows: it changes with the size of the "
    "array, which `couples` keeps whole."
)


def of_loss(
    of: LossCase, tell: Callable[[str], None] = lambda line: None, left: list[str] | None = None
) -> Iterator[Comparison]:
    """All comparisons of a loss, without a step.

    Where it is no function of finite numbers they end: all else would fail for this.

    Args:
        tell: gets the name of each comparison as it begins.
        left: gets what is not compared, and why.
    """
    checks = _OfLoss(of, [] if left is None else left)
    first = {
        "called twice": checks.called_twice,
        "eager": checks.eager,
        "indexes": checks.indexes,
        "finite": checks.finite,
        "half of the rows": checks.on_half,
    }
    for name, check in first.items():
        tell(name)
        row = check()
        if row:
            yield row
        if row and row.verdict == "FAILS":
            return
    rest = {split.name: lambda split=split: checks.split(split) for split in checks.splits()}
    rest = {"many rows": checks.many_rows, **rest, "other numbers": checks.other_numbers}
    for name, check in rest.items():
        tell(name)
        if row := check():
            yield row


class _OfLoss:
    def __init__(self, of: LossCase, left: list[str]):
        self.of, self.left = of, left
        self.single, self.double = (_trials(of, double=double) for double in (False, True))

    def called_twice(self) -> Comparison:
        """Whether it is a function."""
        return _row("called twice", None, cause_of_impurity(self.of))

    def eager(self) -> Comparison:
        """Whether it is the same without `jit`."""
        if self.of.draws:
            return eager(self.single, self.double)
        return eager(Trials(self.of, double=False), Trials(self.of, double=True))

    def finite(self) -> Comparison | None:
        """Whether all that it gives is a number; no row where it is."""
        if self._finite(self.of.batch):
            return None
        return _row("finite", None, self._infinity(self.of.batch))

    def on_half(self) -> Comparison | None:
        """Whether it takes another number of rows; no row where it does, or need not."""
        if not self.of.halves:
            return None
        if self.of.couples != "nothing":
            self.left.append(
                f"Masks were not compared: the loss takes {self.of.rows} rows and no fewer "
                f"({self.of.halves})"
            )
            return None
        return _row(
            "half of the rows", None, fixed_rows(self.of.rows, self.of.rows // 2, self.of.halves)
        )

    def splits(self) -> Iterator[SumSplit]:
        """The splits that it must not notice."""
        of, meets = self.of, self.of.couples != "nothing"
        return splits(of.batch, hides=not of.masks and not of.halves, meets=meets)

    def split(self, split: SumSplit) -> Comparison:
        """Whether the parts of a split add up to its whole."""
        single, double = _apart(split, self.single), if_seen(lambda: _apart(split, self.double))
        trials = self.single if double is None else self.double
        if not np.isfinite(single.largest) and (infinite := self._infinite(split)):
            return _row(split.name, single, self._infinity(infinite), double)
        if is_far(single, double) and self._stays_whole(split, trials):
            return _row(split.name, _apart(split, trials.undrawn[0]), None)
        why, rounds = lambda: cause_of_split(split, trials), lambda: self._no_rounding(single)
        return judged(split.name, single, double, why, rounds)

    def many_rows(self) -> Comparison | None:
        """Whether what is summed in few bits counts many rows; no row where nothing is."""
        batch = repeated(self.of.batch, MANY)
        for kind, got, want in (
            ("whole", self.double, lambda: self.double.counted),
            ("narrow", self.single, lambda: self.double),
        ):
            if row := self._counts(kind, batch, got, want):
                return row
        return None

    def _counts(
        self, kind: str, batch: Batch, got: Trials, want: Callable[[], Trials]
    ) -> Comparison | None:
        """A row where a mean that is summed in few bits is another in more."""
        facts = self.single.facts(kind)
        exact = if_seen(lambda: means(want().rows.forward(batch))) if facts else None
        if exact is None:
            return None
        found = means(got.rows.forward(batch))
        for name, where in facts.items():
            pairs = zip(_pair(found[name]), _pair(exact[name]), strict=True)
            off = max(distance(a, b).by for a, b in pairs)
            if off > ROUNDED:
                cause = cause_of_few_bits(kind, name, where)
                return _row(f"{MANY:,} rows", Distances(off, NOTHING, NOTHING, NOTHING), cause)
        return None

    def indexes(self) -> Comparison | None:
        """Whether its whole numbers pick places that there are; no row where they do."""
        found = out_of_range(self.of, self.single)
        return found and _row("indexes", found.apart, found.cause)

    def other_numbers(self) -> Comparison | None:
        """Whether two halves add up for other numbers, too; no row where none are planted."""
        if self.of.couples != "nothing":
            return None
        exact = self.double if if_seen(lambda: self.double.rows.weights(self.of.batch)) else None
        found = planted(self.of, self.single, exact)
        return found and _row("other numbers", found.apart, found.cause)

    def _infinite(self, split: SumSplit) -> Batch | None:
        """The first part that gives what is no number, though it has rows that count; or all."""
        some = [batch for batch in (*split.parts, split.whole) if batch["mask"].any()]
        return next((batch for batch in some if not self._finite(batch)), None)

    def _finite(self, batch: Batch) -> bool:
        """Whether means and gradient of a batch are numbers, in float32."""
        sums = self.single.rows(batch)
        numbers = [x for mean in means(sums.returned).values() for x in (mean.total, mean.weight)]
        return all(np.isfinite(x).all() for x in (*numbers, flatten(sums.gradient)))

    def _infinity(self, batch: Batch) -> Cause:
        rows = self.single.rows
        return cause_of_infinity(self.of, batch, rows.params, rows.key) or Cause(
            "not finite",
            "the loss, compiled, gives no finite number for the first batch, and one operation "
            "after the other it does. Look for a product that is nearly too large.",
        )

    def _no_rounding(self, single: Distances) -> Cause | None:
        """Why a difference that float64 does not have is a fault all the same."""
        for name, where in self.single.facts("narrow").items():
            return cause_of_few_bits("narrow", name, where)
        return no_rounding(self.of, single)

    def _stays_whole(self, split: SumSplit, trials: Trials) -> bool:
        """Whether it is only what is drawn, of a batch that is never split."""
        if self.of.couples == "nothing" or not trials.draws_by_key or not trials.undrawn:
            return False
        if not all(frozen.holds(split) for frozen in trials.undrawn):
            return False
        if DRAWN not in self.left:
            self.left.append(DRAWN)
        return True


def _trials(of: LossCase, *, double: bool) -> Trials:
    """Return experiments on the loss as it draws, or with fixed draws.

    Where a kernel hides its draws it gets no key.
    """
    if of.draws:
        return Trials(of, double=double)
    trials = Trials(of, double=double, frozen=FROZEN[0])
    if if_seen(lambda: trials.rows.weights(of.batch)) is None:
        trials.rows = CompiledRowSums(of, double=double, draws=False)
    return trials


def _apart(split: SumSplit, trials: Trials) -> Distances:
    got, want = (together(trials.rows, parts)[0] for parts in (split.parts, [split.whole]))
    return distances(got, want)


def _pair(mean: Mean) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(mean.total), np.asarray(mean.weight)


def _row(
    name: str, single: Distances | None, cause: Cause | None, double: Distances | None = None
) -> Comparison:
    if cause is None:
        return Comparison(name, "ok", single, double)
    return Comparison(
        name, "FAILS" if cause.fault else "named", single, double, cause.why, cause.name
    )
