"""Program of a run: its compiled step, its evaluation, its first state, its batches."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Lowered

from jtrain.checkpoint import WeightsPlan
from jtrain.core.gradient import GradientSharding
from jtrain.core.interpret import equations_in
from jtrain.core.loss import LossOutput, Stateful, normalize_loss
from jtrain.core.loss_checks import check_product_precision, check_unused_params
from jtrain.core.mean import Mean
from jtrain.core.precision.cast import compute_in
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn, make_step, scan_steps
from jtrain.core.types import Batch, Extra, Key, LossFn, Metrics, Params
from jtrain.data.batches.step_batches import Window
from jtrain.optim import WithEvalParams, evaluation_params
from jtrain.parallel import Device
from jtrain.parallel.custom_loop import gather
from jtrain.parallel.offload import device_shardings, to_device, with_offload
from jtrain.train.call_schedule import CallBatches, CallSchedule, choose_schedule
from jtrain.train.check_batch.first_batch import FirstRows
from jtrain.train.eight_bits import check_hardware
from jtrain.train.evaluation import SetEvaluations
from jtrain.train.experiment import RunConfig
from jtrain.train.initial_state import (
    Weights,
    make_initial_state,
    plan_initial_weights,
    shardings_of,
    trace_weights,
)
from jtrain.train.repeat_step import LIVE, mark_live, repeat_step
from jtrain.train.resolve import Resolved, resolve
from jtrain.train.stages import StageBatch, staged_step


class Program:
    """Functions of a resolved run, each compiled once.

    What differs from one start of a run to the next is an argument: the schedule of its calls, and
    the batches that it skips.
    """

    def __init__(self, resolved: Resolved):
        self.resolved = resolved

    def initial_state(self) -> TrainState:
        """Return the state before the first step, made straight into its shardings.

        Raises:
            UserError: if `init_from` names a missing file or one that does not fit.
        """
        x = self.resolved
        return make_initial_state(
            x.config, x.experiment, x.abstract_state, self._initial, self.stored_weights
        )

    @functools.cached_property
    def stored_weights(self) -> WeightsPlan | None:
        """Weights that a new state starts from, if configured; raises as `initial_state`."""
        return plan_initial_weights(self.resolved.config, self._initial)

    @property
    def _initial(self) -> Weights:
        """Shapes of the weights that `init` makes, without an adapter and the loss's state."""
        x = self.resolved
        return trace_weights(x.config, x.experiment, x.abstract_state, x.strategy)

    @functools.cached_property
    def loss(self) -> LossFn | Stateful:
        """Loss in the config's precision; cached, so that it is traced once."""
        compute = self.resolved.config.precision.compute
        return compute_in(self.resolved.experiment.loss, compute, self._sharding.params)

    @property
    def _sharding(self) -> GradientSharding:
        x = self.resolved
        return x.strategy.gradient_sharding(x.abstract_state.params, x.experiment.dims)

    @functools.cached_property
    def schedule(self) -> CallSchedule:
        """Steps of each call, where no hook of the caller takes the state."""
        x = self.resolved
        chosen = choose_schedule(
            x.config,
            x.strategy,
            x.abstract_state,
            lambda: self._loss_jaxpr,
            lambda: self.first.own,
            evaluates=bool(x.sets),
            untimed=x.lengths.unknown,
        )
        return chosen.ending_at(*x.starts.stops) if x.starts else chosen

    def batches(
        self, schedule: CallSchedule | None = None, windows: Sequence[Window] | None = None
    ) -> CallBatches:
        """Return the batches of each call, of this process's rows.

        Args:
            windows: as `Resolved.train` takes them.
        """
        if schedule is None and windows is None:
            return self._batches
        return CallBatches(self.resolved.train(windows), schedule or self.schedule)

    @functools.cached_property
    def _batches(self) -> CallBatches:
        return CallBatches(self.resolved.train(), self.schedule)

    @functools.cached_property
    def first(self) -> FirstRows:
        """The first batch, for what is traced of it."""
        x = self.resolved
        return FirstRows(x.own_rows(x.experiment.train), x.strategy.part[1])

    def place(self, batch: Batch, schedule: CallSchedule | None = None, *, first: int = 0) -> Any:
        """Put the batch of the call after step `first` on the devices."""
        schedule, starts = schedule or self.schedule, self.resolved.starts
        batch = mark_live(batch, schedule.longest) if schedule.varies else batch
        placed = self.resolved.strategy.place_for_call(batch, stacked=schedule.stacked)
        return placed if starts is None else StageBatch(placed, starts.find(first))

    def compile_step(
        self,
        schedule: CallSchedule | None = None,
        meanwhile: Callable[[], object] = lambda: None,
        *,
        start: int = 0,
    ) -> StepFn:
        """Compile the step, or the steps of a call; `meanwhile` as for `Strategy.compile`.

        Args:
            start: steps that were taken before; stages that are over are not compiled.
        """
        schedule = schedule or self.schedule
        stacked, starts = schedule.stacked, self.resolved.starts

        def compiled(program: Program) -> StepFn:
            step = program._step(schedule)
            options = {"stacked": stacked, "returns_state": True, "meanwhile": meanwhile}
            return self.resolved.strategy.compile(*step, **options)

        if starts is None:
            return compiled(self)
        each = [functools.partial(compiled, program) for program in (*self.stages, self)]
        return staged_step(each, starts, start)

    @functools.cached_property
    def stages(self) -> Sequence["Program"]:
        """Program of each stage before the rest of the run."""
        return [Program(stage) for stage in self.resolved.stages]

    def at(self, step: int) -> "Program":
        """Return the program of the stage that takes the step after `step` steps."""
        starts = self.resolved.starts
        return (*self.stages, self)[starts.find(step)] if starts else self

    def lower_step(self) -> Lowered:
        """Lower the step; the result compiles also for devices of another machine.

        Raises:
            LossError: if the loss or the model violates its contract.
            ShardingError: if an axis of the mesh splits nothing of it.
        """
        lower, stacked = self.resolved.strategy.lower, self.schedule.stacked
        return lower(*self._step(self.schedule), stacked=stacked, returns_state=True)

    def _step(self, schedule: CallSchedule) -> tuple[StepFn, TrainState, Batch]:
        resolved = self.resolved
        config, x, strategy = resolved.config, resolved.experiment, resolved.strategy
        like, devices = resolved.abstract_state, resolved.devices
        check_hardware(config.precision, devices)
        terms, params = self._terms(self.first.repeated), self._weights[0]
        check_unused_params(terms, params)
        strategy.check_axes_used(like, x.dims)
        if config.precision.compute is not None:
            check_product_precision(terms, params, config.precision.compute)
        # XLA:CPU runs a convolution many times slower in a loop than written out.
        unroll = devices[0].platform == "cpu" and self._has_convolutions
        step = make_step(
            x.loss,
            x.transformation,
            microbatches=config.microbatches,
            rows_interact=x.rows_interact,
            psum=strategy.psum,
            ragged=x.train.ragged,
            unroll=unroll,
            compute=config.precision.compute,
            sharding=self._sharding,
        )
        step = pack_metrics(with_offload(step, like))
        longest, stack = schedule.longest, (schedule.longest,) * schedule.stacked
        of = lambda x: jax.ShapeDtypeStruct((*stack, *x.shape), x.dtype)
        batch = {name: of(array) for name, array in self.first.shapes.items()}
        if schedule.varies:
            live = jax.ShapeDtypeStruct((longest, x.train.size), bool)
            return repeat_step(step), like, {**batch, LIVE: live}
        return scan_steps(step, unroll=unroll) if schedule.stacked else step, like, batch

    @functools.cached_property
    def _loss_jaxpr(self) -> Any:
        return jax.make_jaxpr(self._terms(self.first.repeated))(self._weights[0]).jaxpr

    @property
    def _has_convolutions(self) -> bool:
        found = equations_in(self._loss_jaxpr)
        return any(x.primitive.name == "conv_general_dilated" for x in found)

    def check_evaluation(self) -> None:
        """Trace the evaluation, so that its errors are raised before training.

        Raises:
            LossError: if the loss does not take the rows of `valid`.
            ConfigError: if `checkpoint.best` is none of its metrics.
        """
        self._evaluations.check(self.resolved.config.checkpoint.best)

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
        config, x = self.resolved.config, self.resolved.experiment
        rows_interact = x.rows_interact
        if rows_interact == "batch":
            rows_interact = config.evaluate.rows_interact
        return SetEvaluations(
            self.resolved.sets,
            self.loss,
            self.resolved.strategy,
            rows_interact=rows_interact,
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
        if not isinstance(self.resolved.experiment.transformation, WithEvalParams):
            return to_device(state.params, self.resolved.abstract_state.params)
        return self._evaluation_params(state)

    def gather_weights(self, state: TrainState) -> tuple[Params, Extra, Key]:
        """Return evaluation parameters, extra and the step's key, for samples and pictures.

        Every process calls this, and gets unsharded arrays of its own.
        """
        params, extra = self._evaluation_weights(state)
        if jax.process_count() == 1:
            return params, extra, state.step_key()
        params, extra, seed, step = gather((params, extra, state.seed, state.step))
        return params, extra, jax.random.fold_in(jax.random.wrap_key_data(jnp.array(seed)), step)

    @functools.cached_property
    def _evaluation_params(self) -> Callable[[TrainState], Params]:
        x = self.resolved
        optimizer, like = x.experiment.transformation, x.abstract_state
        return jax.jit(
            lambda state: evaluation_params(optimizer, to_device(state, like)),
            in_shardings=(shardings_of(like),),
            out_shardings=shardings_of(device_shardings(like.params)),
        )

    @property
    def _weights(self) -> Weights:
        return device_shardings(
            (self.resolved.abstract_state.params, self.resolved.abstract_state.extra)
        )

    def _terms(self, batch: Batch) -> Callable[[Params], LossOutput]:
        terms = normalize_loss(self.loss, ragged=self.resolved.experiment.train.ragged)
        key = jax.eval_shape(TrainState.step_key, self.resolved.abstract_state)
        return lambda params: terms(params, self.resolved.abstract_state.extra, batch, key)


def set_up(
    config: RunConfig, seconds: float = 0.0, *, among: Sequence[Device] | None = None
) -> Program:
    """Return the program of a config; see `resolve`."""
    return Program(resolve(config, seconds, among=among))


@jax.tree_util.register_pytree_node_class
class PackedMetrics(Mapping[str, Mean]):
    """Scalar metrics as one array.

    Args:
        numbers: f32 ... 2n, the total and the weight of each metric in turn.
        names: of the n metrics.
    """

    __slots__ = ("names", "numbers")

    def __init__(self, numbers: Any, names: tuple[str, ...]):
        self.numbers, self.names = numbers, names

    def __getitem__(self, name: str) -> Mean:
        if name not in self.names:
            raise KeyError(name)
        at = 2 * self.names.index(name)
        return Mean(self.numbers[..., at], self.numbers[..., at + 1])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[str, ...]]:
        """Return the array, and the names."""
        return (self.numbers,), self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], leaves: tuple[Any]) -> "PackedMetrics":
        """Build the metrics from what `tree_flatten` returned."""
        return cls(leaves[0], names)


def pack_metrics(step: StepFn) -> StepFn:
    """Return the step whose metrics are one array, if all of them are Means of float32 scalars."""

    def packed(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state, metrics = step(state, batch)
        names = tuple(sorted(metrics))
        numbers = [x for name in names for x in (metrics[name].total, metrics[name].weight)]
        if any(type(mean) is not Mean for mean in metrics.values()) or any(
            jnp.shape(x) or jnp.result_type(x) != jnp.float32 for x in numbers
        ):
            return state, metrics
        return state, PackedMetrics(jnp.stack(numbers), names)

    return packed
