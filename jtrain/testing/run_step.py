"""A single step under a strategy, its result, and the default strategies of a check."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
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
from jtrain.core.step import make_step
from jtrain.core.types import Batch, Dims, Params
from jtrain.errors import ConfigError
from jtrain.parallel import Strategy
from jtrain.testing.case import Loss, LossCase, MakeStep
from jtrain.testing.causes import Cause, cause
from jtrain.testing.compare import Distances, StepResult, compare_results
from jtrain.testing.float64 import to_float64, unless_opaque, widen
from jtrain.testing.splits import make_ragged
from jtrain.testing.sums import FROZEN, RowSums, Sums, flatten_metrics

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


def take_step(case: LossCase, variant: StepVariant, make: MakeStep, batch: Batch) -> StepResult:
    """Compile a step of a case, and return its result from the first state."""
    first, strategy = init_first_state(case), variant.strategy
    loss = variant.change(case.loss.build(strategy.placement if strategy else Unplaced()))
    loss = strategy.loss(loss, case.dims) if strategy else loss
    more = {"sharding": strategy.gradient_sharding(first.params, case.dims)} if strategy else {}
    step = make(
        loss,
        observe_optimizer(case.optimizer),
        microbatches=variant.microbatches,
        rows_interact=case.rows_interact,
        psum=strategy.psum if strategy else None,
        ragged=not case.mask_error,
        **more,
    )
    if variant.double or variant.frozen is not None:
        step = widen(step, floats=variant.double, frozen=variant.frozen)
    with jax.enable_x64(variant.double):
        state, rows = to_float64((first, dict(batch))) if variant.double else (first, dict(batch))
        state = jax.tree.map(jnp.asarray, state)  # anew, because the step donates its input
        if strategy:
            state = jax.device_put(state, strategy.shardings(state, case.dims))
            rows = strategy.place(jax.device_get(rows))
            program = strategy.compile(step, state, rows, returns_state=True)
        else:
            program = jax.jit(step, donate_argnums=0 if variant.donate else ())
        state, metrics = jax.device_get(program(state, rows))
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


class Steps:
    """The steps of a case: of its own `make`, and of jtrain's on one device.

    Args:
        like: steps of the same case by another `make`; the results of one device are shared.
    """

    def __init__(self, case: LossCase, like: "Steps | None" = None):
        self.case = case
        self.batch = dict(case.batch) if case.mask_error else make_ragged(case.batch)
        self.sums = like.sums if like else Sums(case=case)
        # One device's result serves all comparisons.
        expected = functools.cache(lambda x: take_step(case, x, make_step, self.batch))
        self._expected = like._expected if like else expected

    def actual(self, variant: StepVariant) -> StepResult:
        """Return the result of the step of the case's `make`."""
        return take_step(self.case, variant, self.case.make, self.batch)

    def expected(self, variant: StepVariant) -> StepResult:
        """Return the result of one device with the same loss, numbers and draws."""
        one_device = variant._replace(strategy=None, microbatches=1, donate=False)
        return self._expected(one_device)


@dataclasses.dataclass(frozen=True, eq=False)
class SplitStep:
    """A step under a split of its batch, beside that of one device."""

    steps: Steps
    name: str
    variant: StepVariant
    parts: Sequence[Batch]  # as the step splits the batch; one if it does not
    noun: str  # microbatch, device

    @functools.cached_property
    def actual(self) -> StepResult:
        """Result of the step."""
        return self.steps.actual(self.variant)

    @functools.cached_property
    def expected(self) -> StepResult:
        """Result of one device."""
        return self.steps.expected(self.variant)

    def distances(self) -> Distances:
        """Return the distances of the two results."""
        return compare_results(self.actual, self.expected)

    def replace(self, **changes: Any) -> "SplitStep":
        """Return the step with a change of its variant."""
        return dataclasses.replace(self, variant=self.variant._replace(**changes))

    def without_draws(self) -> "SplitStep":
        """Return the step with all draws frozen, or without draws if a kernel hides them."""
        frozen = self.replace(frozen=FROZEN[0])
        opaque = unless_opaque(frozen.distances) is None
        return self.replace(change=drop_key) if opaque else frozen

    def scaled(self, factor: float) -> "SplitStep":
        """Return the step of the loss times a factor."""
        return self.replace(change=lambda loss: scale_loss(self.variant.change(loss), factor))

    def cause(self, row: str, /, **facts: object) -> Cause:
        """Return a cause of the table; the number and the name of the parts are known."""
        nouns = "microbatches" if self.noun == "microbatch" else f"{self.noun}s"
        return cause(row, count=len(self.parts), part=self.noun, parts=nouns, **facts)

    def each_part(self, weights: Sequence[float] | None = None) -> list[RowSums]:
        """Return the sums of each part, divided by its own weights or by these."""
        return [self.steps.sums(part, weights) for part in self.parts]


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
