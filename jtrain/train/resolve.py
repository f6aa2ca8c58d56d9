"""Resolved run: the values of a run, from its config: layout, experiment, steps, shapes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jtrain.core.batches import FiniteBatches
from jtrain.core.state import TrainState
from jtrain.core.types import Extra, Key, Params
from jtrain.data.batches.fingerprint import fingerprint
from jtrain.data.batches.step_batches import SkipBatches, Window, merge_windows
from jtrain.errors import ConfigError, DataError
from jtrain.optim.recipe import scaled
from jtrain.optim.schedules import LearningRate
from jtrain.parallel import Device, Strategy, check_divides
from jtrain.train.auto_layout import choose_layout
from jtrain.train.evaluation import check_set_names
from jtrain.train.experiment import Experiment, Prompt, RunConfig, SampleConfig, build_experiment
from jtrain.train.initial_state import trace_state, with_shardings
from jtrain.train.runtime import check_jit_enabled
from jtrain.train.schedule_steps import ConfigDurations, resolve_durations
from jtrain.train.stages import (
    StagedBatches,
    StageStarts,
    check_same_state,
    fit_microbatches,
    stage_config,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """Values of a run under a strategy."""

    config: RunConfig
    """Config with a number of steps for each duration."""
    strategy: Strategy
    experiment: Experiment
    """Experiment whose optimizer is a transformation for the steps of the run."""
    abstract_state: TrainState
    """Shapes, dtypes and shardings of the state."""
    lengths: ConfigDurations
    """The config's durations, before they were counted in steps."""
    why: str = ""
    """Reason for the layout, if it was chosen."""
    starts: StageStarts | None = None
    """Where its stages begin; None of a run without stages."""
    stages: Sequence["Resolved"] = ()
    """Values of each stage before the rest of the run, whose state they share."""
    lr_factor: LearningRate | None = None
    """Factor of the learning rate that the stages set."""
    count_again: Callable[[float], "Resolved"]
    """Gives the same run with durations in time counted by the seconds that a step takes."""

    @functools.cached_property
    def sets(self) -> Mapping[str, FiniteBatches]:
        """Validation sets by name; a single set is called `valid`."""
        valid = self.experiment.valid
        if isinstance(valid, Mapping):
            return valid
        return {} if valid is None else {"valid": valid}

    @functools.cached_property
    def devices(self) -> list[Device]:
        """Devices of the layout, of all processes, by their ids."""
        taken = jax.tree.leaves(self.abstract_state)[0].sharding.device_set
        return sorted(taken, key=lambda device: device.id)

    @functools.cached_property
    def data(self) -> str:
        """Fingerprint of the training data; empty where the batches have none."""
        found = [fingerprint(x.experiment.train) for x in self.parts]
        return "; ".join(dict.fromkeys(found)) if all(found) else ""

    def own_rows(self, batches: Any) -> Any:
        """Return the same batches, of which this process reads only the rows of its devices."""
        return batches.shard(*self.strategy.part)

    def train(
        self, windows: Sequence[Window] | None = None, *, own_rows: bool = True
    ) -> SkipBatches:
        """Return the batch of each step, without those in windows.

        Args:
            windows: of batches to skip; by default those of the config.
            own_rows: whether only the rows of this process are read.
        """
        skipped = merge_windows(self.config.guard.without if windows is None else windows)
        read = self.own_rows if own_rows else lambda batches: batches
        if self.starts is None:
            return SkipBatches(read(self.experiment.train), skipped)
        stages = [
            SkipBatches(read(x.experiment.train), skipped, shift=self.starts.shift(i, skipped))
            for i, x in enumerate(self.parts)
        ]
        return StagedBatches(stages, self.starts)

    @property
    def parts(self) -> Sequence["Resolved"]:
        """Values of each stage, the rest of the run last; of a run without stages, its own."""
        return (*self.stages, self)

    def trained(self, step: int, each: Sequence[float]) -> float:
        """Return a sum over the first steps of the run, such as of rows.

        Args:
            each: the amount of a step of each of `parts`.
        """
        return step * each[0] if self.starts is None else self.starts.total(step, each)

    @property
    def learning_rate(self) -> LearningRate:
        """Learning rate of the config's optimizer at each step, from 0."""
        return scaled(self.config.optimizer.learning_rate(self.config.steps), self.lr_factor)


def resolve(
    config: RunConfig, seconds: float = 0.0, *, among: Sequence[Device] | None = None
) -> Resolved:
    """Resolve a config: its layout, experiment, durations in steps, shapes and shardings.

    Args:
        among: devices to use in the place of those of this machine.
        seconds: of a step, by which durations in time are counted. While it is 0 their
            steps are provisional; `jtrain.train.compile_step.resolve_with_step_time` measures it.

    Raises:
        ConfigError: if batches do not divide into the devices and microbatches, or `build` gives
            no Experiment.
        DataError: if the data is not what the config says it is.
    """
    check_jit_enabled()
    layout, why = choose_layout(config, among)
    config, strategy = dataclasses.replace(config, parallel=layout), layout.build(among)
    check_divides(config.batch, strategy.shares, config.microbatches)
    return _resolve(config, strategy, why, None, seconds)


def _resolve(
    requested: RunConfig,
    strategy: Strategy,
    why: str,
    unresolved: Experiment | None,
    seconds: float,
) -> Resolved:
    """Build an experiment under a strategy, with durations in steps and the state's shapes."""

    def build(config: RunConfig) -> Experiment:
        x = build_experiment(config, strategy.placement)
        return dataclasses.replace(x, loss=strategy.loss(x.loss, x.dims))

    run = resolve_durations(requested, build, seconds, unresolved)
    config, rule = run.config, strategy.optimizer(run.experiment.transformation)
    sample = _make_sample(config, run.experiment)
    experiment = dataclasses.replace(run.experiment, optimizer=rule, sample=sample)
    shapes = trace_state(config, experiment)
    resolved = Resolved(
        config=config,
        strategy=strategy,
        experiment=experiment,
        abstract_state=with_shardings(shapes, strategy.shardings(shapes, experiment.dims)),
        lengths=run.durations,
        why=why,
        starts=run.starts,
        lr_factor=run.lr_factor,
        count_again=functools.partial(_resolve, requested, strategy, why, run.unresolved),
    )
    for rows in resolved.sets.values():
        check_divides(rows.size, strategy.shares, 1, name="evaluate.batch")
    check_set_names(config, resolved.sets, experiment.generated)
    stages = [_resolve_stage(resolved, i, each) for i, each in enumerate(run.stages)]
    return dataclasses.replace(resolved, stages=tuple(stages)) if stages else resolved


def _resolve_stage(run: Resolved, number: int, experiment: Experiment) -> Resolved:
    """Return the values of a stage, for the state of the run."""
    strategy, stage = run.strategy, run.config.stages[number]
    if strategy.loop != Strategy.loop:
        raise ConfigError(
            f"stages: parallel.kind={run.config.parallel.kind} trains with the same values "
            f"throughout. Leave the stages out, or choose another kind."
        )
    config = stage_config(run.config, number)
    if "microbatches" not in stage.set:
        config = fit_microbatches(run.config, config, strategy.shares)
    key = f"stages.{number}.set.batch"
    check_divides(config.batch, strategy.shares, config.microbatches, name=key)
    experiment = dataclasses.replace(experiment, optimizer=run.experiment.optimizer)
    check_same_state(number, run.abstract_state, trace_state(config, experiment))
    return dataclasses.replace(
        run, config=config, experiment=experiment, starts=None, lr_factor=None
    )


def _make_sample(
    config: RunConfig, experiment: Experiment
) -> Callable[[Params, Extra, Key], str] | None:
    """Return what writes the sample of a run; None if nothing does.

    Raises:
        ConfigError: if the config asks for a text, and the experiment writes none, or the model
            has no tokens for its prompt.
    """
    asked, complete = config.sample, experiment.complete
    prompted = asked != SampleConfig(every=asked.every)
    if not prompted and (experiment.sample is not None or not asked.every):
        return experiment.sample
    if complete is None:
        key = "sample.prompt" if prompted else "sample.every"
        raise ConfigError(
            f"{key}: experiment {config.experiment} writes no text of a prompt: it has no "
            f"`complete`. Leave {key} out, or add one: jt.Experiment(..., "
            f"complete=jtrain.train.make_complete(...))."
        )
    if asked.prompt and (read := getattr(complete, "read", None)):
        try:
            read(asked.prompt)
        except DataError as error:
            raise ConfigError(f"sample.prompt: {error}") from None
    prompt = Prompt(text=asked.prompt, tokens=asked.tokens)
    return lambda params, extra, key: complete(params, extra, key, prompt)
