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
from jtrain.testing.float64 import to_float64, widen
from jtrain.testing.sums import flatten_metrics

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

    def __init__(self, case: LossCase, variant: StepVariant, make: MakeStep):
        self.case, self.variant, strategy = case, variant, variant.strategy
        loss = variant.change(case.loss.build(strategy.placement if strategy else Unplaced()))
        params = init_first_state(case).params
        more = {"sharding": strategy.gradient_sharding(params, case.dims)} if strategy else {}
        step = make(
            loss,
            observe_optimizer(case.optimizer),
            microbatches=variant.microbatches,
            rows_interact=case.rows_interact,
            psum=strategy.psum if strategy else None,
            ragged=not case.mask_error,
            **more,
        )
        plain = not variant.double and variant.frozen is None
        self._step = step if plain else widen(step, floats=variant.double, frozen=variant.frozen)
        self._program = None

    def __call__(self, batch: Any) -> StepResult:
        """Return the result of a step from the first state."""
        variant, strategy = self.variant, self.variant.strategy
        with jax.enable_x64(variant.double):
            state, rows = init_first_state(self.case), dict(batch)
            if variant.double:
                state, rows = to_float64((state, rows))
            state = jax.tree.map(jnp.asarray, state)  # anew, because the step donates its input
            if strategy:
                state = jax.device_put(state, strategy.shardings(state, self.case.dims))
                rows = strategy.place(jax.device_get(rows))
            if self._program is None:
                self._program = (
                    strategy.compile(self._step, state, rows, returns_state=True)
                    if strategy
                    else jax.jit(self._step, donate_argnums=0 if variant.donate else ())
                )
            state, metrics = jax.device_get(self._program(state, rows))
        return StepResult(
            loss=float(np.ravel(metrics["loss"].value())[0]),
            gradient=state.opt_state.gradient,
            state=state_trees(state),
            metrics=flatten_metrics({n: m for n, m in metrics.items() if n not in OWN}),
            calls=int(state.opt_state.calls),
        )


@functools.lru_cache(maxsize=4)
def init_first_state(case: LossCase) -> TrainState:
    """Return the state before the step, as numpy arrays."""
    with jax.enable_x64(False):
        optimizer = observe_optimizer(case.optimizer)
        init = lambda: new_state(case.params, optimizer, case.key, case.extra)
        return jax.device_get(jax.jit(init)())


def state_trees(state: TrainState) -> dict[str, Any]:
    """Return the trees of a state that are compared, as in StepResult."""
    opt_state: Any = state.opt_state
    trees = {name: getattr(state, name) for name in ("params", "extra", "step", "skipped")}
    return {**trees, "opt_state": opt_state.inner}


def change_loss(
    loss: Loss,
    before: Callable[..., tuple[Any, ...]] = lambda *args: args,
    after: Callable[[Any], Any] = lambda output: output,
) -> Loss:
    """Return the loss with its arguments and its output changed."""
    inner: Any = loss.loss if isinstance(loss, Stateful) else loss
    changed: Any = lambda *args: after(inner(*before(*args)))
    return Stateful(changed) if isinstance(loss, Stateful) else changed


def drop_key(loss: Loss) -> Loss:
    """Return the loss without a key, as in evaluation."""
    return change_loss(loss, before=lambda *args: (*args[:-1], None))


def scale_loss(loss: Loss, factor: float) -> Loss:
    """Return the loss times a factor, with metrics and `extra` unchanged."""

    def scale(output: Any) -> Any:
        return (factor * output[0], *output[1:]) if type(output) is tuple else factor * output

    return change_loss(loss, after=scale)


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
    named = {name for names in dims.values() for name in names if name}
    variants = [kind.list_variants(counts, named) for kind in get_args(parallel.Layout) if counts]
    return {name: layout for each in variants for name, layout in each.items()}


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
