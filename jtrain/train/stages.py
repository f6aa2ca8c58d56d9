"""Stages of a run: its first steps with other values, such as a smaller batch.

A stage has a config of its own, and a program of its own for the one state of the run; all programs
are compiled before the first step. Which stage takes a step, and on which batch, are functions of
the step, so a run that is resumed anywhere takes the same steps.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.config.dump import plain_values
from jtrain.config.durations import SECONDS, Duration, DurationUnits, convert_part
from jtrain.config.node import SourceLocation, make_nodes
from jtrain.config.resolve import check, resolve_kinds
from jtrain.config.schema import FieldSchema
from jtrain.config.top import BaseConfig, Stage
from jtrain.core import pytree
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.core.types import Batch, Metrics
from jtrain.data.batches.step_batches import SkipBatches, Window
from jtrain.errors import ConfigError
from jtrain.optim.schedules import LearningRate

C = TypeVar("C", bound=BaseConfig)


def stage_config(config: C, number: int) -> C:
    """Return the config of a stage: the run's, with the values that the stage sets.

    Raises:
        ConfigError: for a key or a value that the experiment does not have.
    """
    values = plain_values(dataclasses.replace(config, stages=()))
    for key, value in config.stages[number].set.items():
        *above, last = key.split(".")
        at = values
        for name in above:
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                raise ConfigError(f"{key} is no key: {name} is a value, which has no keys")
        at[last] = value
    root = make_nodes(values, SourceLocation(0, f"stages.{number}.set"))
    made, wrong = check(type(config), resolve_kinds(FieldSchema(type(config)), root)[0])
    if made is None:
        raise ConfigError("; ".join(f"{one.key}: {one.words}" for one in wrong))
    return made


def stage_problems(config: BaseConfig, run: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys of stages whose values conflict, with the conflict.

    Args:
        run: the keys that every run has, whatever it trains.
    """
    lengths = [config.steps, *(stage.until for stage in config.stages)]
    if config.stages and any(isinstance(x, Duration) and x.unit in SECONDS for x in lengths):
        yield "stages", "are counted in steps, rows or tokens, and so is steps beside them"
    known = [*dataclasses.replace(config, stages=()).problems()] if config.stages else []
    for number, stage in enumerate(config.stages):
        key = f"stages.{number}.set"
        whole = {*run, *config.implied_by} - {"batch", "microbatches"}
        fixed = [x for x in stage.set if x.split(".")[0] in whole or x in whole]
        if fixed:
            yield key, f"{fixed[0]} holds for all of a run; set batch or keys of the experiment"
            continue
        try:
            made = stage_config(config, number)
        except ConfigError as error:
            yield key, str(error)
            continue
        if "microbatches" not in stage.set:  # chosen when the devices are known
            made = dataclasses.replace(made, microbatches=1)
        new = [each for each in made.problems() if each not in known]
        yield from ((key, f"{name}: {words}") for name, words in new)


@dataclasses.dataclass(frozen=True)
class StageStarts:
    """Where the stages of a run begin and end; the rest of the run is the last of them."""

    stops: tuple[int, ...]
    """Last step of each but the last."""
    sizes: tuple[DurationUnits, ...]
    """Rows of a batch and tokens of a row of each."""
    batches: tuple[int, ...]
    """Number of the first batch of each, among its own batches: those before it hold what the
    earlier stages trained on."""

    def find(self, step: int) -> int:
        """Return the stage that takes the step after `step` steps."""
        return sum(step >= stop for stop in self.stops)

    def first_step(self, stage: int) -> int:
        """Return the number of steps before a stage."""
        return (0, *self.stops)[stage]

    def shift(self, stage: int, windows: Sequence[Window]) -> int:
        """Return what leads from the number of a batch in the run to that among a stage's own.

        Batches that are skipped in the stages before count by their rows.

        Args:
            windows: of batches to skip, as `merge_windows` returns them.
        """
        numbers = [_first_number(self.first_step(i), windows) for i in range(stage + 1)]
        skipped = [number - self.first_step(i) for i, number in enumerate(numbers)]
        own, amount = self.sizes[stage], 0
        for i, (before, after) in enumerate(itertools.pairwise(skipped)):
            each = self.sizes[i]
            scale = (each.tokens or 1) / (own.tokens or 1)
            amount += (after - before) * each.batch * scale
        return self.batches[stage] + math.ceil(amount / own.batch) - numbers[-1]

    def total(self, step: int, each: Sequence[float]) -> float:
        """Return a sum over the first steps of a run.

        Args:
            each: the amount of a step of each stage.
        """
        ends = [*(min(step, stop) for stop in self.stops), step]
        return sum((end - first) * x for first, end, x in zip([0, *ends], ends, each, strict=False))

    def lr_factor(self, stages: Sequence[Stage]) -> LearningRate:
        """Return the factor of the learning rate at each step, from 0."""
        factors = [*map(self._factor, stages, self.sizes), 1.0]

        def factor(step: Any) -> Any:
            found = factors[-1]
            for stop, own in zip(reversed(self.stops), reversed(factors[:-1]), strict=True):
                found = jnp.where(step < stop, own, found)
            return found

        return factor

    def _factor(self, stage: Stage, own: DurationUnits) -> float:
        if not isinstance(stage.lr, str):
            return stage.lr
        last = self.sizes[-1]
        share = own.batch * (own.tokens or 1) / (last.batch * (last.tokens or 1))
        return share if stage.lr == "linear" else math.sqrt(share)


def _first_number(step: int, windows: Sequence[Window]) -> int:
    """Return the number of a stage's first batch, before a window that begins with it."""
    number = step
    for first, stop in windows:
        if number <= first:
            break
        number += stop - first
    return number


def count_stages(stages: Sequence[Stage], sizes: Sequence[DurationUnits]) -> StageStarts:
    """Return where stages begin, each of which continues with the row after the one before.

    Where the next batch would begin within a batch, the stage is some steps longer. A stage whose
    rows have another number of tokens has an order of its own, and begins at as many tokens.

    Args:
        sizes: of each stage, the rest of the run included.

    Raises:
        ConfigError: if a stage ends before it begins, or its length cannot be counted.
    """
    stops, numbers = [], [0]
    for i, (own, after) in enumerate(itertools.pairwise(sizes)):
        first, key = (stops or [0])[-1], f"stages.{i}"
        known = own._replace(earlier=tuple(zip(stops, sizes, strict=False)))
        asked = convert_part(stages[i], key, known, 0).until
        if asked <= first:
            raise ConfigError(
                f"{key}.until: {stages[i].until} is step {asked}, and the stage before it ends at "
                f"step {first}. Raise it, or leave the stage out."
            )
        rows = lambda stop, own=own, first=first: (numbers[-1] + stop - first) * own.batch
        each, same = own.steps_per_call, own.tokens == after.tokens
        longer = range(-(-asked // each) * each, asked + each * after.batch, each)
        stop = next((x for x in longer if same and rows(x) % after.batch == 0), longer[0])
        tokens = rows(stop) if same else rows(stop) * max(own.tokens, 1)
        numbers.append(-(-tokens // (after.batch if same else after.batch * max(after.tokens, 1))))
        stops.append(stop)
    return StageStarts(tuple(stops), tuple(sizes), tuple(numbers))


def fit_microbatches(config: C, stage: C, shares: int) -> C:
    """Return a stage's config with as many microbatches as keep them no larger than the run's."""
    most = config.batch // config.microbatches
    divides = lambda count: stage.batch % (count * shares) == 0
    counts = range(-(-stage.batch // most), stage.batch + 1)
    count = next(filter(divides, counts), stage.microbatches)
    return dataclasses.replace(stage, microbatches=count)


def check_same_state(number: int, expected: TrainState, found: TrainState) -> None:
    """Raise ConfigError unless a stage trains arrays of the shapes that the run has."""
    shapes = lambda state: {
        f"{where}{name}": f"{x.dtype} {list(x.shape)}"
        for where, tree in {"": state.params, "extra/": state.extra}.items()
        for name, x in pytree.named_leaves(tree).items()
    }
    before, here = shapes(expected), shapes(found)
    for name in sorted(before.keys() | here.keys()):
        if before.get(name) != here.get(name):
            raise ConfigError(
                f"stages.{number}.set: {name} is {here.get(name, 'absent')} in this stage and "
                f"{before.get(name, 'absent')} in the run, whose one state all stages train. Leave "
                f"out the key that changes it."
            )


class StagedBatches(SkipBatches):
    """The batch of each step, of the stage that takes it, without the batches in `windows`.

    A window skips batches by their numbers in the run: batch n is the one of step n if none is
    skipped.
    """

    def __init__(self, stages: Sequence[SkipBatches], starts: StageStarts):
        super().__init__((), stages[0].windows)
        self._stages, self._starts = stages, starts

    def __getitem__(self, step: int, /) -> Mapping[str, Any]:
        return self._stages[self._starts.find(step)][step]

    def indices(self, step: int) -> np.ndarray | None:
        """Return the rows of the data set that a step takes; None where they have no numbers."""
        return self._stages[self._starts.find(step)].indices(step)

    def read_stacked(self, step: int, count: int) -> Mapping[str, Any] | None:
        """Return the batches of `count` steps of one stage; None to read them one by one."""
        return self._stages[self._starts.find(step)].read_stacked(step, count)

    def state(self, step: int) -> Mapping[str, Any]:
        """Return the state to save at a step; empty if the batches are functions of the step."""
        stage = self._starts.find(step)
        inner = self._stages[stage].state(step)
        return {**inner, "stage": stage} if inner else {}

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Resume from the state of a checkpoint."""
        inner = {name: x for name, x in state.items() if name != "stage"}
        self._stages[state.get("stage", -1)].restore(inner)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StageBatch:
    """Batch of a call, on the devices, and the stage whose program takes it."""

    arrays: Batch
    stage: int = dataclasses.field(metadata={"static": True})


def staged_step(compile: Sequence[Callable[[], StepFn]], starts: StageStarts, first: int) -> StepFn:
    """Return the step of all stages, each compiled here unless the run is past it.

    Args:
        compile: compiles the step of each stage.
        first: steps that were taken before.
    """
    steps = [functools.cache(each) for each in compile]
    for step in steps[starts.find(first) :]:
        step()

    def take(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        return steps[batch.stage]()(state, batch.arrays)

    return take
