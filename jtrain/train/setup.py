"""TrainSetup: a config, its experiment, its strategy and the programs compiled for them."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.stages import Lowered

from jtrain.checkpoint import WeightsPlan
from jtrain.core.batches import FiniteBatches
from jtrain.core.gradient import GradientSharding
from jtrain.core.interpret import equations_in
from jtrain.core.loop import Hook
from jtrain.core.loss import LossOutput, Stateful, normalize_loss
from jtrain.core.loss_checks import check_product_precision, check_unused_params
from jtrain.core.precision.cast import compute_in
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn, make_step, scan_steps
from jtrain.core.types import Batch, Extra, Key, LossFn, Params
from jtrain.data import ReadAhead
from jtrain.data.batches.fingerprint import fingerprint
from jtrain.data.batches.step_batches import SkipBatches, StackedBatches, Window
from jtrain.optim import WithEvalParams
from jtrain.parallel import Device, Strategy, check_divides
from jtrain.parallel.offload import device_shardings, to_device, with_offload
from jtrain.train.auto_layout import choose_layout
from jtrain.train.check_batch.first_batch import FirstRows
from jtrain.train.eight_bits import check_hardware, int8_loss
from jtrain.train.evaluation import (
    SetEvaluations,
    check_set_names,
    gather_weights,
    make_evaluation_params,
)
from jtrain.train.experiment import Experiment, RunConfig, build_experiment
from jtrain.train.initial_state import (
    Weights,
    make_initial_state,
    plan_initial_weights,
    trace_state,
    trace_weights,
    with_shardings,
)
from jtrain.train.program import LIVE, mark_live, pack_metrics, repeat_step
from jtrain.train.runtime import check_jit_enabled
from jtrain.train.schedule_steps import ConfigDurations, resolve_durations
from jtrain.train.supersteps import (
    CallSchedule,
    HookEnds,
    Observe,
    choose_schedule,
    read_call,
    read_calls,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSetup:
    """Experiment under a strategy."""

    config: RunConfig
    strategy: Strategy
    experiment: Experiment
    like: TrainState  # shapes, dtypes and shardings
    lengths: ConfigDurations  # the config's durations, before they were counted in steps
    requested: RunConfig  # the config with its durations and its layout
    unresolved: Experiment | None  # as `ResolvedRun` has it
    why: str = ""  # the layout was chosen, if it was
    windows: tuple[Window, ...] = ()  # of batches that are left out
    hooks: tuple[Hook, ...] = ()  # of the caller
    hook_ends: HookEnds = HookEnds()  # where those of any process take the state: a call ends

    def with_step_time(self, seconds: float) -> "TrainSetup":
        """Return the setup with durations in time counted by the seconds that a step takes."""
        run = _build_setup(self.requested, self.strategy, self.why, seconds, self.unresolved)
        return dataclasses.replace(run, hooks=self.hooks, hook_ends=self.hook_ends)

    def fresh(self) -> TrainState:
        """Return the state before the first step, made straight into its shardings.

        Raises:
            UserError: if `init_from` names a missing file or one that does not fit.
        """
        return make_initial_state(
            self.config, self.experiment, self.like, self._initial, self.begins
        )

    @functools.cached_property
    def begins(self) -> WeightsPlan | None:
        """Weights that a new state starts from, if configured; raises as `fresh`."""
        return plan_initial_weights(self.config, self._initial)

    @property
    def _initial(self) -> Weights:
        """Shapes of the weights that `init` makes, without an adapter and the loss's state."""
        return trace_weights(self.config, self.experiment, self.like, self.strategy)

    @functools.cached_property
    def loss(self) -> LossFn | Stateful:
        """Loss in the config's precision; cached, so that it is traced once."""
        x, compute = self.experiment, self.config.precision.compute
        return compute_in(x.loss, compute, self._sharding.params)

    @property
    def _sharding(self) -> GradientSharding:
        return self.strategy.gradient_sharding(self.like.params, self.experiment.dims)

    @functools.cached_property
    def calls(self) -> StackedBatches:
        """Batches of calls that all have the most steps, as numpy arrays: this process's rows."""
        return StackedBatches(self.train, self.schedule.most, stacked=self.schedule.varies)

    @functools.cached_property
    def schedule(self) -> CallSchedule:
        """Steps of each call."""
        return choose_schedule(
            self.config,
            self.strategy,
            self.like,
            lambda: self._loss_jaxpr,
            lambda: self.first.own,
            evaluates=bool(self.sets),
            unknown=self.lengths.unknown,
        ).ending_for(self.hook_ends)

    def with_schedule(self, schedule: CallSchedule) -> "TrainSetup":
        """Return the same setup, whose calls end at other steps."""
        other = copy.copy(self)
        vars(other)["schedule"] = schedule
        return other

    @property
    def steps_per_call(self) -> int | Callable[[int], int]:
        """Steps of a call, as `train_loop` takes them."""
        return self.schedule.steps if self.schedule.varies else self.schedule.most

    def read_ahead(self, start: int, observers: Sequence[Observe] = ()) -> ReadAhead[Batch]:
        """Return the batches of each call on the devices, from step `start` on; close it after use.

        Args:
            observers: called with the step before each call and the batches of its steps.

        Raises:
            DataError: if several workers cannot read these batches.
        """
        self.config.workers.check(self.experiment.train)
        workers = self.config.workers
        return read_calls(self.calls, self.schedule, workers, start, self.place, observers)

    def read_call(self, first: int) -> Batch:
        """Return the batches of the call that begins after step `first`, as numpy arrays."""
        return read_call(self.calls, self.schedule, first)

    @functools.cached_property
    def train(self) -> SkipBatches:
        """Batch of each step, as this process reads it."""
        return SkipBatches(self.own_rows(self.experiment.train), self.windows)

    def without(self, windows: tuple[Window, ...]) -> "TrainSetup":
        """Return the same setup, compiled programs included, that skips these batches."""
        other = copy.copy(self)
        for made in ("train", "calls"):
            vars(other).pop(made, None)
        vars(other)["windows"] = windows
        return other

    @functools.cached_property
    def data(self) -> str:
        """Fingerprint of the training data; empty where the batches have none."""
        return fingerprint(self.experiment.train)

    @functools.cached_property
    def devices(self) -> list[Device]:
        """Devices of the layout, of all processes, by their ids."""
        taken = jax.tree.leaves(self.like)[0].sharding.device_set
        return sorted(taken, key=lambda device: device.id)

    def own_rows(self, batches: Any) -> Any:
        """Return the same batches, of which this process reads only the rows of its devices."""
        return batches.shard(*self.strategy.part)

    @functools.cached_property
    def first(self) -> FirstRows:
        """The first batch, for what is traced of it."""
        return FirstRows(self.own_rows(self.experiment.train), self.strategy.part[1])

    def place(self, batch: Batch) -> Batch:
        """Put the batch of a call on the devices."""
        batch = mark_live(batch, self.schedule.most) if self.schedule.varies else batch
        return self.strategy.place_for_call(batch, stacked=self.stacked)

    def compile_step(self, then: Callable[[], object] = lambda: None) -> StepFn:
        """Compile the step, or the steps of a call; `then` is called as by `Strategy.compile`."""
        return self.strategy.compile(*self._step(), **self._how, then=then)

    def lower_step(self) -> Lowered:
        """Lower the step; the result compiles also for devices of another machine.

        Raises:
            LossError: if the loss or the model violates its contract.
            ShardingError: if an axis of the mesh splits nothing of it.
        """
        return self.strategy.lower(*self._step(), **self._how)

    @property
    def _how(self) -> dict[str, bool]:
        return {"stacked": self.stacked, "keeps": True}

    def _step(self) -> tuple[StepFn, TrainState, Batch]:
        """Return the step function, and the shapes that it is compiled for."""
        config, x, strategy = self.config, self.experiment, self.strategy
        check_hardware(config.precision, self.devices)
        terms, params = self._terms(self.first.repeated), self._weights[0]
        check_unused_params(terms, params)
        strategy.check_axes_used(self.like, x.dims)
        if config.precision.compute is not None:
            check_product_precision(terms, params, config.precision.compute)
        # XLA:CPU runs a convolution many times slower in a loop than written out.
        unroll = self.devices[0].platform == "cpu" and self._has_convolutions
        step = make_step(
            x.loss,
            x.transformation,
            microbatches=config.microbatches,
            couples=x.couples,
            psum=strategy.psum,
            ragged=x.train.ragged,
            unroll=unroll,
            compute=config.precision.compute,
            sharding=self._sharding,
        )
        step = pack_metrics(with_offload(step, self.like))
        most, stack = self.schedule.most, (self.schedule.most,) * self.stacked
        of = lambda x: jax.ShapeDtypeStruct((*stack, *x.shape), x.dtype)
        batch = {name: of(array) for name, array in self.first.like.items()}
        if self.schedule.varies:
            live = jax.ShapeDtypeStruct((most, x.train.size), bool)
            return repeat_step(step), self.like, {**batch, LIVE: live}
        return scan_steps(step, unroll=unroll) if self.stacked else step, self.like, batch

    @property
    def stacked(self) -> bool:
        """Whether a call takes arrays k b ... and returns metrics k ...."""
        return self.schedule.varies or self.schedule.most > 1

    @functools.cached_property
    def _loss_jaxpr(self) -> Any:
        return jax.make_jaxpr(self._terms(self.first.repeated))(self._weights[0]).jaxpr

    @property
    def _has_convolutions(self) -> bool:
        found = equations_in(self._loss_jaxpr)
        return any(x.primitive.name == "conv_general_dilated" for x in found)

    @functools.cached_property
    def sets(self) -> Mapping[str, FiniteBatches]:
        """Validation sets by name; a single set is called `valid`."""
        valid = self.experiment.valid
        if isinstance(valid, Mapping):
            return valid
        return {} if valid is None else {"valid": valid}

    def check_evaluation(self) -> None:
        """Trace the evaluation, so that its errors are raised before training.

        Raises:
            LossError: if the loss does not take the rows of `valid`.
            ConfigError: if `checkpoint.best` is none of its metrics.
        """
        self._evaluations.check(self.config.checkpoint.best)

    def measure(
        self,
        state: TrainState,
        name: str = "valid",
        reading: Callable[[Iterable[Batch]], Iterable[Batch]] = iter,
    ) -> dict[str, float]:
        """Return the metrics of a state over all of a set; `reading` passes on its batches.

        Raises:
            LossError: if rows meet that are in several batches.
        """
        return self._evaluations.measure(self._evaluation_weights(state), name, reading)

    def check_set(self, name: str, state: TrainState) -> None:
        """Check that a set is one batch where its rows meet; see `SetEvaluations.check_set`."""
        self._evaluations.check_set(name, lambda: self._evaluation_weights(state))

    @functools.cached_property
    def _evaluations(self) -> SetEvaluations:
        config, x = self.config, self.experiment
        couples = x.couples
        loss = int8_loss(x.loss, config.evaluate.int8)
        compute = config.precision.compute
        return SetEvaluations(
            self.sets,
            # The same object is traced once for both.
            self.loss if loss is x.loss else compute_in(loss, compute, self._sharding.params),
            self.strategy,
            couples=config.evaluate.couples if couples == "batch" else couples,
            workers=config.workers,
            weights=self._weights,
            generated=x.generated,
            check_hidden=config.checks.first_batch,
        )

    def _evaluation_weights(self, state: TrainState) -> tuple[Params, Extra]:
        return self.evaluation_params(state), state.extra

    def evaluation_params(self, state: TrainState) -> Params:
        """Return the parameters to evaluate a state with: the optimizer's average, or `params`.

        They are sharded as the trained ones, and computed once for a whole evaluation.
        """
        if not isinstance(self.experiment.transformation, WithEvalParams):
            return to_device(state.params, self.like.params)
        return self._evaluation_params(state)

    def gather_weights(self, state: TrainState) -> tuple[Params, Extra, Key]:
        """Return evaluation parameters, extra and the step's key, for samples and pictures.

        Every process calls this, and gets unsharded arrays of its own.
        """
        params, extra = self._evaluation_weights(state)
        return gather_weights(params, extra, state)

    @functools.cached_property
    def _evaluation_params(self) -> Callable[[TrainState], Params]:
        return make_evaluation_params(self.experiment.transformation, self.like)

    @property
    def _weights(self) -> Weights:
        """Shapes of the weights that an evaluation takes, on the devices."""
        return device_shardings((self.like.params, self.like.extra))

    def _terms(self, batch: Batch) -> Callable[[Params], LossOutput]:
        terms = normalize_loss(self.loss, ragged=self.experiment.train.ragged)
        key = jax.eval_shape(TrainState.step_key, self.like)
        return lambda params: terms(params, self.like.extra, batch, key)


def set_up(
    config: RunConfig, seconds: float = 0.0, *, among: Sequence[Device] | None = None
) -> TrainSetup:
    """Set up a config: layout, experiment, durations in steps, shapes and shardings.

    Args:
        among: devices to use in the place of those of this machine.
        seconds: of a step, by which durations in time are counted. While it is 0 their
            steps are provisional; `jtrain.train.step_time.set_up_with_step_time` measures it.

    Raises:
        ConfigError: if batches do not divide into the devices and microbatches, or `build` gives
            no Experiment.
        DataError: if the data is not what the config says it is.
    """
    check_jit_enabled()
    layout, why = choose_layout(config, among)
    config, strategy = dataclasses.replace(config, parallel=layout), layout.build(among)
    check_divides(config.batch, strategy.shares, config.microbatches)
    return _build_setup(config, strategy, why, seconds)


def _build_setup(
    requested: RunConfig,
    strategy: Strategy,
    why: str,
    seconds: float,
    unresolved: Experiment | None = None,
) -> TrainSetup:
    """Build an experiment under a strategy, with durations in steps and the state's shapes."""
    build = lambda config: build_experiment(config, strategy.placement)
    run = resolve_durations(requested, build, seconds, unresolved)
    config, rule = run.config, strategy.optimizer(run.experiment.transformation)
    experiment = dataclasses.replace(run.experiment, optimizer=rule)
    shapes = trace_state(config, experiment)
    like = with_shardings(shapes, strategy.shardings(shapes, experiment.dims))
    setup = TrainSetup(
        config=config,
        strategy=strategy,
        experiment=experiment,
        like=like,
        lengths=run.durations,
        requested=requested,
        unresolved=run.unresolved,
        why=why,
        windows=config.guard.without,
    )
    for rows in setup.sets.values():
        check_divides(rows.size, strategy.shares, 1, name="evaluate.batch")
    check_set_names(config, setup.sets, setup.experiment.generated)
    return setup
