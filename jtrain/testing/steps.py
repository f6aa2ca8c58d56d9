"""Comparisons of steps under every strategy with the step of one device."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jtrain.core.interpret import equations_in
from jtrain.core.step import make_step
from jtrain.core.types import Batch
from jtrain.errors import ConfigError, ShardingError
from jtrain.testing.case import LossCase, describe_error, is_raised_by_loss
from jtrain.testing.causes import Cause, cause
from jtrain.testing.compare import StepResult, compare_results
from jtrain.testing.float64 import unless_opaque
from jtrain.testing.report import SINGLE, Comparison, judge
from jtrain.testing.run_step import (
    CompiledStep,
    Layout,
    StepVariant,
    build_strategy,
    drop_key,
    init_first_state,
    redo_update,
    scale_loss,
    state_trees,
)
from jtrain.testing.splits import make_ragged, take_rows
from jtrain.testing.sums import FROZEN
from jtrain.testing.why_numbers import explain_rounding
from jtrain.testing.why_steps import FailedSplit, explain_step, explain_time_split

_UNKNOWN = Cause("unexplained", "")  # until a failure is diagnosed


@dataclasses.dataclass(frozen=True)
class _Compared:
    """A step variant under comparison, and the parts that it splits the batch into."""

    name: str
    variant: StepVariant
    parts: Sequence[Batch]
    noun: str


def compare_steps(
    case: LossCase,
    strategies: Mapping[str, Layout],
    log: Callable[[str], None],
    not_compared: list[str],
    *,
    named: Comparison | None = None,
) -> Iterator[Comparison]:
    """Yield a comparison for each variant; variants that do not fit go to `not_compared`.

    Args:
        named: the comparison that found draws of the loss to depend on the layout, if one did: a
            step that differs is then compared with fixed draws as well.
    """
    steps = _Steps(case, named)
    for compared in _variants(case, steps.batch, strategies, not_compared):
        log(compared.name)
        try:
            yield steps.row(compared)
        except (ShardingError, ConfigError) as error:
            not_compared.append(f"{compared.name} was not compared: {str(error).split('. ')[0]}.")
        except Exception as error:
            if not is_raised_by_loss(error):
                raise
            fewer, raised = len(compared.parts[0]["mask"]), describe_error(error)
            found = cause("fixed number of rows", rows=case.rows, fewer=fewer, raised=raised)
            yield Comparison.explained(compared.name, found, None)


def _variants(
    case: LossCase, batch: Batch, strategies: Mapping[str, Layout], not_compared: list[str]
) -> Iterator[_Compared]:
    if case.make is not make_step:
        yield _Compared("own step", StepVariant(donate=False), [batch], "device")
    yield _Compared("state given up", StepVariant(), [batch], "device")
    for count in (2, 4):
        if case.rows % count == 0 and case.rows_interact == "never":
            parts = [take_rows(batch, np.arange(i, case.rows, count)) for i in range(count)]
            variant = StepVariant(microbatches=count)
            yield _Compared(f"{count} microbatches", variant, parts, "microbatch")
    for name, values in strategies.items():
        strategy = build_strategy(values)
        cuts = {"batch": strategy.psum is not None, "slice": strategy.shares > 1}
        if cuts.get(case.rows_interact):
            not_compared.append(
                f"{name} was not compared: it would cut the batch, whose rows interact."
            )
            continue
        parts = [take_rows(batch, rows) for rows in np.split(np.arange(case.rows), strategy.shares)]
        yield _Compared(name, StepVariant(strategy), parts, "device")


class _Steps:
    def __init__(self, case: LossCase, named: Comparison | None = None):
        self.case, self.named = case, named
        self.batch = dict(case.batch) if case.mask_error else make_ragged(case.batch)
        # One device's steps serve all comparisons; those of a variant only its own.
        self._one_device = functools.cache(lambda x: CompiledStep(case, x, make_step))
        self._variant = functools.lru_cache(2)(lambda x: CompiledStep(case, x, case.make))
        self._expected_of = functools.cache(lambda x: self._one_device(x)(self.batch))

    def row(self, compared: _Compared) -> Comparison:
        """Compare a variant with one device, and explain a failure."""
        if not self.case.draws:
            compared = self._without_draws(compared)
        drawn = self._compare(compared)
        if drawn.verdict != "FAILS" or self.named is None:
            return self._add_cause(drawn, compared)
        frozen = self._without_draws(compared)  # a layer draws by the layout; compare the rest
        row = self._compare(frozen)
        if row.verdict == "FAILS":
            return self._add_cause(row, frozen)
        why, name = self.named.why, self.named.cause
        return dataclasses.replace(drawn, verdict="named", why=why, cause=name)

    def _compare(self, compared: _Compared) -> Comparison:
        """Compare a variant with one device, without a diagnosis."""
        name, variant = compared.name, compared.variant
        actual, expected = self._results(variant)
        single = compare_results(actual, expected)
        if single.largest <= SINGLE:
            return Comparison(name, "ok", single)
        rest = single._replace(state=single.state._replace(by=0.0))
        updated = redo_update(self.case, actual, expected) if rest.largest <= SINGLE else None
        if updated is not None and compare_results(actual, updated).state.by <= SINGLE:
            return Comparison(name, "rounding", single)
        wide = unless_opaque(lambda: self._results(variant._replace(double=True)))
        double = wide and compare_results(*wide)

        def explain_close() -> Cause | None:
            same = actual.finite == expected.finite
            return explain_rounding(self.case, single) if same else _UNKNOWN

        return judge(name, single, double, lambda: _UNKNOWN, explain_close)

    def _add_cause(self, row: Comparison, compared: _Compared) -> Comparison:
        """Add the cause to a comparison that fails."""
        if row.verdict != "FAILS" or row.cause == "rounding":
            return row
        found = self._cause(compared)
        return dataclasses.replace(row, why=found.why, cause=found.name)

    def _results(self, variant: StepVariant) -> tuple[StepResult, StepResult]:
        """Return the results of the step, and of jtrain's own on one device."""
        return self._variant(variant)(self.batch), self._expected_of(_on_one_device(variant))

    def _without_draws(self, compared: _Compared) -> _Compared:
        """Return the comparison with all draws frozen, or without draws if a kernel hides them."""
        variant = compared.variant._replace(frozen=FROZEN[0])
        if unless_opaque(lambda: self._results(variant)) is None:
            variant = compared.variant._replace(change=drop_key)
        return dataclasses.replace(compared, variant=variant)

    def _cause(self, compared: _Compared) -> Cause:
        variant = compared.variant
        actual, expected = self._results(variant)

        def distance_without_draws() -> float:
            equations = equations_in(self.case.trace.program)
            if not any(e.primitive.name.startswith("random_") for e in equations):
                return float("inf")
            return compare_results(*self._results(self._without_draws(compared).variant)).largest

        def scaled(factor: float) -> tuple[StepResult, StepResult]:
            change = lambda loss: scale_loss(variant.change(loss), factor)
            return self._results(variant._replace(change=change))

        def explain_time() -> Cause | None:
            parts = variant.strategy.axes.get("context", 1) if variant.strategy else 1
            single = self._one_device(_on_one_device(variant))
            return explain_time_split(self.batch, parts, self._variant(variant), single)

        return explain_step(
            FailedSplit(
                case=self.case,
                batch=self.batch,
                actual=actual,
                expected=expected,
                start=state_trees(init_first_state(self.case)),
                parts=compared.parts,
                noun=compared.noun,
                distance_without_draws=distance_without_draws,
                scale_loss=scaled,
                explain_time=explain_time,
            )
        )


def _on_one_device(variant: StepVariant) -> StepVariant:
    return variant._replace(strategy=None, microbatches=1, donate=False)
