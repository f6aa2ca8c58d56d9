"""A single step under a strategy, its result, and the default strategies of a check."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jtrain import parallel
from jtrain.core.extra_arguments import with_named_arguments
from jtrain.core.loss import Stateful
from jtrain.core.placement import Unplaced
from jtrain.core.state import TrainState, new_state
from jtrain.core.types import Dims, Params
from jtrain.errors import ConfigError
from jtrain.parallel import Strategy
from jtrain.testing.case import Loss, LossCase, MakeStep
from jtrain.testing.compare import StepResult
from jtrain.testing.float64 import ReplayRules, to_float64, widen
from jtrain.testing.row_sums import flatten_metrics

# Metrics that the step adds: the loss is compared by itself, the others follow from it.
OWN = {"loss", "grad_norm", "update_norm", "skipped", "loss_scale"}


class ObservedState(NamedTuple):
    """The state of an optimizer, with the last gradient and the number of calls."""

    gradient: Params
    calls: Any  # int32 scalar
    inner: Any


def observe_optimizer(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap an optimizer so that its state holds the last gradient and counts the calls."""
    inner = with_named_arguments(optimizer)

    def init(params: Params) -> ObservedState:
        return ObservedState(jax.tree.map(jnp.zeros_like, params), jnp.int32(0), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **kwargs: Any) -> Any:
        new_updates, new_inner = inner.update(updates, state.inner, params, **kwargs)
        return new_updates, ObservedState(updates, state.calls + 1, new_inner)

    return optax.GradientTransformationExtraArgs(init, update)


class StepVariant(NamedTuple):
    """A way to split and compute a step."""

    strategy: Strategy | None = None  # None: plain `jax.jit`
    microbatches: int = 1
    double: bool = False
    frozen: float | None = None  # the uniform number that replaces each draw
    donate: bool = True
    change: Callable[[Loss], Loss] = lambda loss: loss  # applied to the loss


class CompiledStep:
    """The first step of a case, compiled once."""

    def __init__(self, case: LossCase, variant: StepVariant, make: MakeStep | None = None):
        self.case, self.variant = case, variant
        strategy = variant.strategy
        loss = variant.change(case.loss.build(strategy.placement if strategy else Unplaced()))
        like = init_first_state(case)
        self._step = (make or case.make)(
            loss,
            observe_optimizer(case.optimizer),
            microbatches=variant.microbatches,
            couples=case.couples,
            psum=strategy.psum if strategy else None,
            ragged=not case.mask_error,
            **(
                {"sharding": strategy.gradient_sharding(like.params, case.dims)} if strategy else {}
            ),
        )
        self._program = None

    def __call__(self, batch: Any) -> StepResult:
        """Return the result of a step from the first state."""
        strategy = self.variant.strategy
        with jax.enable_x64(self.variant.double):
            state = self._start()
            rows = to_float64(dict(batch)) if self.variant.double else dict(batch)
            if strategy:
                rows = strategy.place(jax.device_get(rows))
            if self._program is None:
                self._program = self._compile(state, rows)
            state, metrics = self._program(state, rows)
            return _result(jax.device_get(state), jax.device_get(metrics))

    def before(self) -> dict[str, Any]:
        """Return the state before the step, as in StepResult."""
        return _state_trees(init_first_state(self.case))

    def _start(self) -> TrainState:
        """Return a fresh copy of the first state, because the step donates its input."""
        state = init_first_state(self.case)
        state = to_float64(state) if self.variant.double else jax.tree.map(jnp.asarray, state)
        if self.variant.strategy is None:
            return state
        return jax.device_put(state, self.variant.strategy.shardings(state, self.case.dims))

    def _compile(self, state: TrainState, batch: Any) -> Callable[..., Any]:
        rules = ReplayRules(floats=self.variant.double, frozen=self.variant.frozen)
        plain = not self.variant.double and self.variant.frozen is None
        fn = self._step if plain else widen(self._step, rules)
        if self.variant.strategy is None:
            return jax.jit(fn, donate_argnums=0 if self.variant.donate else ())
        return self.variant.strategy.compile(fn, state, batch, keeps=True)


@functools.lru_cache(maxsize=4)
def init_first_state(case: LossCase) -> TrainState:
    """Return the state before the step, as numpy arrays."""
    with jax.enable_x64(False):
        init = lambda: new_state(
            case.params, observe_optimizer(case.optimizer), case.key, case.extra
        )
        return jax.device_get(jax.jit(init)())


def _result(state: TrainState, metrics: Any) -> StepResult:
    own = {name: metric for name, metric in metrics.items() if name not in OWN}
    observed_state: Any = state.opt_state
    return StepResult(
        loss=float(np.ravel(metrics["loss"].value())[0]),
        gradient=observed_state.gradient,
        state=_state_trees(state),
        metrics=flatten_metrics(own),
        calls=int(observed_state.calls),
    )


def _state_trees(state: TrainState) -> dict[str, Any]:
    observed_state: Any = state.opt_state
    return {
        "params": state.params,
        "opt_state": observed_state.inner,
        "extra": state.extra,
        "step": state.step,
        "skipped": state.skipped,
    }


def drop_key(loss: Loss) -> Loss:
    """Return the loss without a key, as in evaluation."""
    if isinstance(loss, Stateful):
        return Stateful(lambda params, extra, batch, rng: loss.loss(params, extra, batch, None))
    return lambda params, batch, rng: loss(params, batch, None)


def redo_update(case: LossCase, actual: StepResult, expected: StepResult) -> StepResult | None:
    """Return `expected` with the state after an update by the gradient of `actual`.

    Adam, and even more so sign-based optimizers, turn the rounding of a nearly zero gradient (the
    bias of attention keys) into a full step. A difference that remains after this replacement is
    not caused by rounding of the gradient. The result is None if the optimizer needs the loss.
    """

    def update(gradient: Any) -> Any:
        params, optimizer = case.params, optax.with_extra_args_support(case.optimizer)
        updates, state = optimizer.update(gradient, optimizer.init(params), params)
        return {"params": optax.apply_updates(params, updates), "opt_state": state}

    try:
        trees = jax.device_get(jax.jit(update)(actual.gradient))
    except (TypeError, ValueError):  # a line search and SAM need the loss function
        return None
    return expected._replace(state={**expected.state, **trees})


Layout: TypeAlias = Any  # a value of `jtrain.parallel.Layout`, or a strategy


def list_layouts(
    rows: int, dims: Mapping[str, Dims], *, most: int = 8
) -> dict[str, parallel.Layout]:
    """Return layouts of each kind that the rows divide into, on the available devices.

    Rows are split over 2, 4, ... devices. Each config of `jtrain.parallel.Layout` names its own
    (`list_variants`); `dims` decides which axes can split the model.
    """
    counts = [n for n in (2, 4, 8) if n <= min(most, len(jax.devices())) and rows % n == 0]
    if not counts:
        return {}
    named = {name for names in dims.values() for name in names if name}
    kinds = get_args(parallel.Layout)
    return {
        name: layout for kind in kinds for name, layout in kind.list_variants(counts, named).items()
    }


def build_strategy(values: Layout) -> parallel.Strategy:
    """Build the strategy of these values; return a strategy unchanged.

    Raises:
        ConfigError: if the strategy needs more devices than are available; the message says how to
            simulate them.
    """
    if not hasattr(values, "build"):
        return values
    try:
        return values.build()
    except ConfigError as error:
        available = len(jax.devices())
        raise ConfigError(
            f"a check under {values} needs devices that are not available: {error} (a check "
            f"has {available}; `jtrain check CONFIG --devices 8` cuts the CPU into 8)"
        ) from error
