"""Steps under every strategy, against the step of one device."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jtrain.errors import ConfigError, ShardingError
from jtrain.jaxprs import operations
from jtrain.step import make_step
from jtrain.terms import in_terms
from jtrain.testing.along_time import cause_along_time
from jtrain.testing.compare import apart
from jtrain.testing.layouts import Layout, built
from jtrain.testing.remade import remade
from jtrain.testing.report import Row
from jtrain.testing.result import Distances, Result, distances
from jtrain.testing.splits import ragged, taken
from jtrain.testing.subject import Loss, Subject
from jtrain.testing.verdict import SINGLE, judged
from jtrain.testing.walk import Stepping, Way, without_draws
from jtrain.testing.why_rows import Cause
from jtrain.testing.why_steps import Parted, cause_of_step
from jtrain.testing.widened import if_seen
from jtrain.types import Batch, Stateful

EXPLAINED = 1e-5  # differences above it are looked into: float32 makes none so large


@dataclasses.dataclass(frozen=True)
class _Compared:
    """A way to take the step, and the parts that it takes the batch in."""

    name: str
    way: Way
    parts: Sequence[Batch]
    noun: str


def of_steps(
    of: Subject,
    strategies: Mapping[str, Layout],
    tell: Callable[[str], None],
    left: list[str],
) -> Iterator[Row]:
    """A row for each way; ways that the model does not fit go to `left`."""
    steps = _Steps(of)
    for compared in _ways(of, steps.batch, strategies, left):
        tell(compared.name)
        try:
            yield steps.row(compared)
        except (ShardingError, ConfigError) as error:
            left.append(f"{compared.name} was not compared: {str(error).split('. ')[0]}.")


def _ways(
    of: Subject, batch: Batch, strategies: Mapping[str, Layout], left: list[str]
) -> Iterator[_Compared]:
    if of.make is not make_step:
        yield _Compared("own step", Way(donate=False), [batch], "device")
    yield _Compared("state given up", Way(), [batch], "device")
    whole = of.couples == "batch"
    for count in (2, 4):
        if of.rows % count == 0 and of.couples == "nothing":
            parts = [taken(batch, np.arange(i, of.rows, count)) for i in range(count)]
            yield _Compared(f"{count} microbatches", Way(microbatches=count), parts, "microbatch")
    for name, values in strategies.items():
        strategy = built(values)
        if (whole and strategy.psum is not None) or (of.couples == "slice" and strategy.shares > 1):
            left.append(f"{name} was not compared: it would cut the batch, whose rows meet.")
            continue
        parts = [taken(batch, rows) for rows in np.split(np.arange(of.rows), strategy.shares)]
        yield _Compared(name, Way(strategy), parts, "device")


class _Steps:
    def __init__(self, of: Subject):
        self.of = of
        self.batch = dict(of.batch) if of.masks else ragged(of.batch)

    def row(self, compared: _Compared) -> Row:
        """The comparison of a way with one device."""
        stepping = Stepping(self.of, compared.way)
        got, want = stepping(self.batch), self.want(False)
        single = distances(got, want)
        if single.largest <= SINGLE:
            return judged(compared.name, single, None, _unasked)
        rest = single._replace(state=single.state._replace(by=0.0))
        made = remade(self.of, got, want) if rest.largest <= SINGLE else None
        if made is not None and distances(got, made).state.by <= SINGLE:
            return Row(compared.name, "rounding", single)
        double = self._double(compared)
        return judged(compared.name, single, double, lambda: self._cause(compared, stepping, got))

    def _double(self, compared: _Compared) -> Distances | None:
        stepping = Stepping(self.of, compared.way._replace(double=True))
        return if_seen(lambda: distances(stepping(self.batch), self.want(True)))

    @functools.cache  # noqa: B019
    def want(self, double: bool) -> Result:
        """What one device gives that takes the batch whole, by jtrain's own step."""
        return self.alone(double)(self.batch)

    @functools.cache  # noqa: B019
    def alone(self, double: bool) -> Stepping:
        """That step."""
        return Stepping(self.of, Way(donate=False, double=double), make_step)

    def _cause(self, compared: _Compared, stepping: Stepping, got: Result) -> Cause:
        of, way = self.of, compared.way

        def under(change: Callable[[Loss], Loss]) -> tuple[Result, Result]:
            here = Stepping(of, way._replace(change=change))(self.batch)
            plain = Way(donate=False, change=change)
            return here, Stepping(of, plain, make_step)(self.batch)

        def undrawn() -> float:
            if not _draws(of, self.batch):
                return float("inf")
            here, there = under(without_draws)
            return distances(here, there).largest

        def scaled(times: float) -> float:
            here, there = under(lambda loss: _times(loss, times))
            return apart(here.gradient, there.gradient).by

        def timed() -> Cause | None:
            parts = way.strategy.axes.get("context", 1) if way.strategy else 1
            return cause_along_time(self.batch, parts, stepping, self.alone(False))

        return cause_of_step(
            Parted(
                of=of,
                batch=self.batch,
                got=got,
                want=self.want(False),
                start=stepping.before(),
                parts=compared.parts,
                noun=compared.noun,
                tolerance=EXPLAINED,
                undrawn=undrawn,
                scaled=scaled,
                timed=timed,
            )
        )


def _unasked() -> Cause:
    raise AssertionError("nothing fails")


def _draws(of: Subject, batch: Batch) -> bool:
    """Whether the loss draws at all."""
    terms = in_terms(of.alone(), ragged=not of.masks)
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
