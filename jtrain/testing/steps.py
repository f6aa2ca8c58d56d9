"""Steps under every strategy, against the step of one device."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jtrain.core.jaxpr import operations
from jtrain.core.loss import Stateful, normalize_loss
from jtrain.core.step import make_step
from jtrain.core.types import Batch
from jtrain.errors import ConfigError, ShardingError
from jtrain.testing.along_time import cause_along_time
from jtrain.testing.case import Loss, LossCase
from jtrain.testing.cause import Cause
from jtrain.testing.failed_step import FailedSplit
from jtrain.testing.fixed_rows import fixed_rows, is_of_the_loss, raised_in
from jtrain.testing.float64 import if_seen
from jtrain.testing.layouts import Layout, built
from jtrain.testing.redo_update import remade
from jtrain.testing.report import Comparison
from jtrain.testing.result import StepResult, distances
from jtrain.testing.rounding import no_rounding
from jtrain.testing.run_step import CompiledStep, StepVariant, without_draws
from jtrain.testing.splits import ragged, taken
from jtrain.testing.trials import FROZEN
from jtrain.testing.verdict import SINGLE, is_finite, judged
from jtrain.testing.why_steps import cause_of_step

Change: TypeAlias = Callable[[Loss], Loss]
_UNKNOWN = Cause("unexplained", "it differs from one device.")
EXPLAINED = 1e-5  # differences above it are looked into: float32 makes none so large


@dataclasses.dataclass(frozen=True)
class _Compared:
    """A way to take the step, and the parts that it takes the batch in."""

    name: str
    way: StepVariant
    parts: Sequence[Batch]
    noun: str


def of_steps(
    of: LossCase,
    strategies: Mapping[str, Layout],
    tell: Callable[[str], None],
    left: list[str],
    *,
    named: Comparison | None = None,
) -> Iterator[Comparison]:
    """A row for each way; ways that the model does not fit go to `left`.

    Args:
        named: a row of the loss that says what of its draws depends on the layout, if there is one:
            where a step differs, it is compared with fixed draws as well.
    """
    steps = _Steps(of, named)
    for compared in _ways(of, steps.batch, strategies, left):
        tell(compared.name)
        try:
            yield steps.row(compared)
        except (ShardingError, ConfigError) as error:
            left.append(f"{compared.name} was not compared: {str(error).split('. ')[0]}.")
        except Exception as error:
            if not is_of_the_loss(error):
                raise
            cause = fixed_rows(of.rows, len(compared.parts[0]["mask"]), raised_in(error))
            yield Comparison(compared.name, "FAILS", None, None, cause.why, cause.name)


def _ways(
    of: LossCase, batch: Batch, strategies: Mapping[str, Layout], left: list[str]
) -> Iterator[_Compared]:
    if of.make is not make_step:
        yield _Compared("own step", StepVariant(donate=False), [batch], "device")
    yield _Compared("state given up", StepVariant(), [batch], "device")
    whole = of.couples == "batch"
    for count in (2, 4):
        if of.rows % count == 0 and of.couples == "nothing":
            parts = [taken(batch, np.arange(i, of.rows, count)) for i in range(count)]
            yield _Compared(
                f"{count} microbatches", StepVariant(microbatches=count), parts, "microbatch"
            )
    for name, values in strategies.items():
        strategy = built(values)
        if (whole and strategy.psum is not None) or (of.couples == "slice" and strategy.shares > 1):
            left.append(f"{name} was not compared: it would cut the batch, whose rows meet.")
            continue
        parts = [taken(batch, rows) for rows in np.split(np.arange(of.rows), strategy.shares)]
        yield _Compared(name, StepVariant(strategy), parts, "device")


class _Steps:
    def __init__(self, of: LossCase, named: Comparison | None = None):
        self.of, self.named = of, named
        self.batch = dict(of.batch) if of.masks else ragged(of.batch)

    def row(self, compared: _Compared) -> Comparison:
        """The comparison of a way with one device."""
        if not self.of.draws:
            compared = self._still(compared)
        drawn = self._row(compared)
        if drawn.verdict != "FAILS" or self.named is None:
            return self._explained(drawn, compared)
        still = self._still(compared)  # a layer draws by the layout; does all else hold?
        row = self._row(still)
        if row.verdict == "FAILS":
            return self._explained(row, still)
        return dataclasses.replace(
            drawn, verdict="named", why=self.named.why, cause=self.named.cause
        )

    def _row(self, compared: _Compared) -> Comparison:
        """The same, and no cause where it fails."""
        name, way = compared.name, compared.way
        got, want = self._got(way), self._want(way)
        single = distances(got, want)
        if single.largest <= SINGLE:
            return Comparison(name, "ok", single)
        rest = single._replace(state=single.state._replace(by=0.0))
        made = remade(self.of, got, want) if rest.largest <= SINGLE else None
        if made is not None and distances(got, made).state.by <= SINGLE:
            return Comparison(name, "rounding", single)
        exact = way._replace(double=True)
        double = if_seen(lambda: distances(self._got(exact), self._want(exact)))
        row = judged(name, single, double, lambda: _UNKNOWN, lambda: no_rounding(self.of, single))
        if row.verdict == "rounding" and is_finite(got) != is_finite(want):
            return dataclasses.replace(row, verdict="FAILS")
        return row

    def _explained(self, row: Comparison, compared: _Compared) -> Comparison:
        """The row, with the cause where it fails."""
        if row.verdict != "FAILS" or row.cause == "rounding":
            return row
        cause = self._cause(compared, self._got(compared.way))
        return dataclasses.replace(row, why=cause.why, cause=cause.name)

    def _got(self, way: StepVariant) -> StepResult:
        """What a step gives under a way."""
        return self._stepping(way)(self.batch)

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def _stepping(self, way: StepVariant) -> CompiledStep:
        return CompiledStep(self.of, way)

    def _want(self, way: StepVariant) -> StepResult:
        """What one device gives that takes the batch whole, by jtrain's own step."""
        return self._alone_gives(way.double, way.frozen, way.change)

    @functools.cache  # noqa: B019
    def _alone_gives(self, double: bool, frozen: float | None, change: Change) -> StepResult:
        return self._alone(double, frozen, change)(self.batch)

    @functools.cache  # noqa: B019
    def _alone(self, double: bool, frozen: float | None, change: Change) -> CompiledStep:
        way = StepVariant(donate=False, double=double, frozen=frozen, change=change)
        return CompiledStep(self.of, way, make_step)

    def _still(self, compared: _Compared) -> _Compared:
        """The comparison with all draws frozen, or, where they are hidden, without any."""
        frozen = compared.way._replace(frozen=FROZEN[0])
        seen = if_seen(lambda: (self._got(frozen), self._want(frozen)))
        undrawn = compared.way._replace(change=without_draws)
        return dataclasses.replace(compared, way=frozen if seen else undrawn)

    def _cause(self, compared: _Compared, got: StepResult) -> Cause:
        way = compared.way

        def undrawn() -> float:
            if not _draws(self.of, self.batch):
                return float("inf")
            still = self._still(compared).way
            return distances(self._got(still), self._want(still)).largest

        def times(factor: float) -> tuple[StepResult, StepResult]:
            scaled = way._replace(change=lambda loss: _times(way.change(loss), factor))
            return self._got(scaled), self._want(scaled)

        def timed() -> Cause | None:
            parts = way.strategy.axes.get("context", 1) if way.strategy else 1
            alone = self._alone(False, way.frozen, way.change)
            return cause_along_time(self.batch, parts, self._stepping(way), alone)

        return cause_of_step(
            FailedSplit(
                of=self.of,
                batch=self.batch,
                got=got,
                want=self._want(way),
                start=self._stepping(way).before(),
                parts=compared.parts,
                noun=compared.noun,
                tolerance=EXPLAINED,
                undrawn=undrawn,
                times=times,
                timed=timed,
            )
        )


def _draws(of: LossCase, batch: Batch) -> bool:
    """Whether the loss draws at all."""
    terms = normalize_loss(of.alone(), ragged=not of.masks)
    of_key = lambda key: terms(of.params, of.extra, batch, key)
    return any(name.startswith("random_") for name in operations(of_key, of.step_key))


def _times(loss: Loss, factor: float) -> Loss:
    """The loss times a number, its metrics and `extra` as they are."""

    def scale(got: Any) -> Any:
        if type(got) is tuple:
            return (factor * got[0], *got[1:])
        return factor * got

    if isinstance(loss, Stateful):
        return Stateful(lambda *given: scale(loss.loss(*given)))
    return lambda *given: scale(loss(*given))
