"""Evaluation of the sets of a run: their programs, their batches, and the weights they take."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from jtrain.checkpoint.retention import BestMetric
from jtrain.core.batches import FiniteBatches
from jtrain.core.evaluate import EvaluateFn, check_row_independence, evaluate, make_evaluate
from jtrain.core.loss import LossOutput, Stateful
from jtrain.core.types import Batch, LossFn, RowsInteract
from jtrain.data.batches.step_batches import copy_writable
from jtrain.data.batches.workers import Workers, is_streamed
from jtrain.errors import ConfigError
from jtrain.errors.spelling import did_you_mean
from jtrain.parallel import Strategy
from jtrain.parallel.custom_loop import gather
from jtrain.train.check_batch.hidden_rows import check_hidden_rows
from jtrain.train.experiment import GeneratedMetrics, RunConfig, shapes
from jtrain.train.initial_state import Weights


def check_set_names(
    config: RunConfig, sets: Collection[str], generated: Iterable[str] = ()
) -> None:
    """Raise unless each set has a plain name, and the config and `generated` name existing ones.

    Raises:
        ConfigError: if a name is not an identifier, or there is no such set.
    """
    for name in sets:
        if not name.isidentifier():
            raise ConfigError(
                f"The evaluation set {name!r} has no plain name, and metrics are written as "
                f"NAME/loss: use {re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_') or 'valid'}."
            )
    for name in config.evaluate.sets:
        if name not in sets:
            names = ", ".join(sets) or "none"
            raise ConfigError(
                f"evaluate.sets.{name} is not a set of experiment {config.experiment}, which "
                f"has {names}{did_you_mean(name, sets) or '; remove it'}"
            )
    for name in generated:
        if name not in sets:
            raise ConfigError(
                f"generated[{name!r}] of experiment {config.experiment} belongs to no evaluation "
                f"set: the experiment has {', '.join(sets) or 'none'}"
                f"{did_you_mean(name, sets) or '; name one of them, or give `valid`'}"
            )


def check_best(best: str, metrics: Mapping[str, Sequence[str]]) -> None:
    """Raise unless `checkpoint.best` is among the metrics of the sets, by set, first set first.

    Raises:
        ConfigError: if it is no metric.
    """
    goal = BestMetric.parse(best)
    first = next(iter(metrics.values()), ())
    names = [*first, *(f"{name}/{metric}" for name, each in metrics.items() for metric in each)]
    if goal and goal.name not in names:
        short = [name for name in names if len(metrics) > 1 or "/" not in name]
        found = f"has {', '.join(short)}" if names else "has none: there is no `valid`"
        how = "write checkpoint.best=loss" if names else "give a set `valid`, or no checkpoint.best"
        near = did_you_mean(goal.name, names)
        raise ConfigError(
            f"checkpoint.best={best}: {goal.name} is not a metric of the "
            f"evaluation, which {found}{near or f'; {how}'}"
        )


class SetEvaluations:
    """Programs that evaluate sets; sets of the same shapes share one.

    Args:
        loss: in the precision of the run.
        rows_interact: which rows the loss of a row depends on, in an evaluation.
        weights: shapes of the parameters and of the extra state, on the devices.
        generated: metrics of generated texts, by set, which are added to those of the loss.
        check_hidden: whether the first batch of each set is checked for hidden rows that count.
    """

    def __init__(
        self,
        sets: Mapping[str, FiniteBatches],
        loss: LossFn | Stateful,
        strategy: Strategy,
        *,
        rows_interact: RowsInteract,
        workers: Workers,
        weights: Weights,
        generated: Mapping[str, GeneratedMetrics] = {},
        check_hidden: bool = True,
    ):
        self._sets, self._loss, self._strategy = sets, loss, strategy
        self._interact, self._workers, self._weights = rows_interact, workers, weights
        self._generated, self._check_hidden = generated, check_hidden
        self._programs: dict[tuple[bool, str], EvaluateFn] = {}
        self._like: dict[str, Batch] = {}
        self._checked: set[str] = set()

    def check(self, best: str) -> None:
        """Trace each evaluation, so that its errors are raised before training.

        Args:
            best: `checkpoint.best` of the config.

        Raises:
            LossError: if the loss does not take the rows of a set.
            ConfigError: if `best` is none of the metrics.
        """
        metrics: dict[str, list[str]] = {}
        for name, rows in self._sets.items():
            program = make_evaluate(self._loss, ragged=rows.ragged)
            metrics[name] = ["loss", *jax.eval_shape(program, self._weights, self._shapes(name))[1]]
            metrics[name] += self._generated[name].metrics if name in self._generated else ()
        check_best(best, metrics)

    def measure(
        self, weights: Weights, name: str, reading: Callable[[Iterable[Batch]], Iterable[Batch]]
    ) -> dict[str, float]:
        """Return the metrics of (params, extra) over all of a set; `reading` passes on its batches.

        Raises:
            LossError: if rows meet that are in several batches.
        """
        self.check_set(name, lambda: weights)
        rows, own = self._sets[name], self._own_rows(self._sets[name])
        workers = Workers() if is_streamed(rows) else self._workers
        program = self._program(name)
        copied = lambda step: copy_writable(own[step])  # a reader may fill one buffer again
        read = workers.build(copied, start=0, stop=len(rows), processes=False)
        try:
            batches = (self._strategy.place(read(i)) for i in range(len(rows)))
            found = evaluate(program, weights, reading(batches))
        finally:
            read.close()
        if name not in self._generated:
            return found
        whole = weights if jax.process_count() == 1 else gather(weights)
        return {**found, **self._generated[name](*whole)}

    def check_set(self, name: str, weights: Callable[[], Weights]) -> None:
        """Check that a set is one batch where its rows meet, and that none counts if it is hidden.

        Each set is checked once. A loss may make rows meet in training alone, as batch norm does:
        one batch is measured with its rows beside others, where the set has several.

        Args:
            weights: returns (params, extra) to evaluate with; called if the set is to be measured.

        Raises:
            LossError: with the values that keep the rows together, or the line to write.
        """
        rows = self._sets[name]
        split = self._interact == "batch" and len(rows) > 1
        pads = self._check_hidden and rows.ragged
        if not (split or pads) or name in self._checked:
            return
        program, given, first = self._program(name), weights(), self._own_rows(rows)[0]

        def evaluate_on_devices(batch: Batch) -> Any:
            return program(given, self._strategy.place(batch))

        if split:
            check_row_independence(evaluate_on_devices, first, rows, name, self._strategy.shares)
        if pads:
            outputs = lambda batch: LossOutput(*evaluate_on_devices(batch), extra=())
            check_hidden_rows(outputs, first, rows.size, f"the first batch of `{name}`")
        self._checked.add(name)

    def _program(self, name: str) -> EvaluateFn:
        rows, strategy = self._sets[name], self._strategy
        kind = rows.ragged, repr(self._shapes(name))
        if kind not in self._programs:
            how = {"rows_interact": self._interact, "psum": strategy.psum, "ragged": rows.ragged}
            fn = make_evaluate(self._loss, **how)
            example = strategy.place(self._own_rows(rows)[0])
            self._programs[kind] = strategy.compile(fn, self._weights, example)
        return self._programs[kind]

    def _own_rows(self, rows: FiniteBatches) -> Any:
        return rows.shard(*self._strategy.part)

    def _shapes(self, name: str) -> Batch:
        if name not in self._like:
            self._like[name] = shapes(self._sets[name], part=self._strategy.part)
        return self._like[name]
