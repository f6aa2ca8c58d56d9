"""Comparisons of steps under every strategy with the step of one device."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jtrain.core.interpret import operations
from jtrain.core.loss import Stateful, normalize_loss
from jtrain.core.step import make_step
from jtrain.core.types import Batch
from jtrain.errors import ConfigError, ShardingError
from jtrain.testing.case import (
    Loss,
    LossCase,
    describe_error,
    explain_fixed_rows,
    is_raised_by_loss,
)
from jtrain.testing.causes import Cause
from jtrain.testing.compare import StepResult, compare_results
from jtrain.testing.float64 import unless_opaque
from jtrain.testing.report import SINGLE, Comparison, is_finite, judge
from jtrain.testing.rounding import explain_rounding
from jtrain.testing.run_step import (
    CompiledStep,
    Layout,
    StepVariant,
    build_strategy,
    drop_key,
    redo_update,
)
from jtrain.testing.splits import make_ragged, take_rows
from jtrain.testing.trials import FROZEN
from jtrain.testing.why_steps import FailedSplit, explain_step, explain_time_split

Change: TypeAlias = Callable[[Loss], Loss]
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
            fewer = len(compared.parts[0]["mask"])
            found = explain_fixed_rows(case.rows, fewer, describe_error(error))
            yield Comparison.explained(compared.name, found, None)


def _variants(
    case: LossCase, batch: Batch, strategies: Mapping[str, Layout], not_compared: list[str]
) -> Iterator[_Compared]:
    if case.make is not make_step:
        yield _Compared("own step", StepVariant(donate=False), [batch], "device")
    yield _Compared("state given up", StepVariant(), [batch], "device")
    coupled = case.couples == "batch"
    for count in (2, 4):
        if case.rows % count == 0 and case.couples == "nothing":
            parts = [take_rows(batch, np.arange(i, case.rows, count)) for i in range(count)]
            yield _Compared(
                f"{count} microbatches", StepVariant(microbatches=count), parts, "microbatch"
            )
    for name, values in strategies.items():
        strategy = build_strategy(values)
        if (coupled and strategy.psum is not None) or (
            case.couples == "slice" and strategy.shares > 1
        ):
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
        return dataclasses.replace(
            drawn, verdict="named", why=self.named.why, cause=self.named.cause
        )

    def _compare(self, compared: _Compared) -> Comparison:
        """Compare a variant with one device, without a diagnosis."""
        name, variant = compared.name, compared.variant
        actual, expected = self._actual(variant), self._expected(variant)
        single = compare_results(actual, expected)
        if single.largest <= SINGLE:
            return Comparison(name, "ok", single)
        rest = single._replace(state=single.state._replace(by=0.0))
        updated = redo_update(self.case, actual, expected) if rest.largest <= SINGLE else None
        if updated is not None and compare_results(actual, updated).state.by <= SINGLE:
            return Comparison(name, "rounding", single)
        exact = variant._replace(double=True)
        double = unless_opaque(lambda: compare_results(self._actual(exact), self._expected(exact)))
        row = judge(
            name, single, double, lambda: _UNKNOWN, lambda: explain_rounding(self.case, single)
        )
        if row.verdict == "rounding" and is_finite(actual) != is_finite(expected):
            return dataclasses.replace(row, verdict="FAILS")
        return row

    def _add_cause(self, row: Comparison, compared: _Compared) -> Comparison:
        """Add the cause to a comparison that fails."""
        if row.verdict != "FAILS" or row.cause == "rounding":
            return row
        cause = self._cause(compared, self._actual(compared.variant))
        return dataclasses.replace(row, why=cause.why, cause=cause.name)

    def _actual(self, variant: StepVariant) -> StepResult:
        """Return the result of the step under a variant."""
        return self._compiled_step(variant)(self.batch)

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def _compiled_step(self, variant: StepVariant) -> CompiledStep:
        return CompiledStep(self.case, variant)

    def _expected(self, variant: StepVariant) -> StepResult:
        """Return the result of jtrain's own step on one device with the full batch."""
        return self._single_device_result(variant.double, variant.frozen, variant.change)

    @functools.cache  # noqa: B019
    def _single_device_result(
        self, double: bool, frozen: float | None, change: Change
    ) -> StepResult:
        return self._single_device_step(double, frozen, change)(self.batch)

    @functools.cache  # noqa: B019
    def _single_device_step(
        self, double: bool, frozen: float | None, change: Change
    ) -> CompiledStep:
        variant = StepVariant(donate=False, double=double, frozen=frozen, change=change)
        return CompiledStep(self.case, variant, make_step)

    def _without_draws(self, compared: _Compared) -> _Compared:
        """Return the comparison with all draws frozen, or without draws if a kernel hides them."""
        frozen = compared.variant._replace(frozen=FROZEN[0])
        traceable = unless_opaque(lambda: (self._actual(frozen), self._expected(frozen)))
        without_key = compared.variant._replace(change=drop_key)
        return dataclasses.replace(
            compared, variant=frozen if traceable is not None else without_key
        )

    def _cause(self, compared: _Compared, actual: StepResult) -> Cause:
        variant = compared.variant

        def distance_without_draws() -> float:
            if not _uses_key(self.case, self.batch):
                return float("inf")
            frozen = self._without_draws(compared).variant
            return compare_results(self._actual(frozen), self._expected(frozen)).largest

        def scale_loss(factor: float) -> tuple[StepResult, StepResult]:
            scaled = variant._replace(change=lambda loss: _scaled(variant.change(loss), factor))
            return self._actual(scaled), self._expected(scaled)

        def explain_time() -> Cause | None:
            parts = variant.strategy.axes.get("context", 1) if variant.strategy else 1
            single = self._single_device_step(False, variant.frozen, variant.change)
            return explain_time_split(self.batch, parts, self._compiled_step(variant), single)

        return explain_step(
            FailedSplit(
                case=self.case,
                batch=self.batch,
                actual=actual,
                expected=self._expected(variant),
                start=self._compiled_step(variant).before(),
                parts=compared.parts,
                noun=compared.noun,
                distance_without_draws=distance_without_draws,
                scale_loss=scale_loss,
                explain_time=explain_time,
            )
        )


def _uses_key(case: LossCase, batch: Batch) -> bool:
    """Return whether the loss uses its key."""
    terms = normalize_loss(case.unplaced_loss(), ragged=not case.mask_error)
    output = lambda key: terms(case.params, case.extra, batch, key)
    return any(name.startswith("random_") for name in operations(output, case.step_key))


def _scaled(loss: Loss, factor: float) -> Loss:
    """Return the loss times a factor, with metrics and `extra` unchanged."""

    def scale(output: Any) -> Any:
        if type(output) is tuple:
            return (factor * output[0], *output[1:])
        return factor * output

    if isinstance(loss, Stateful):
        return Stateful(lambda *given: scale(loss.loss(*given)))
    return lambda *given: scale(loss(*given))
