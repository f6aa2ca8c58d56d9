"""One step under a strategy, and what it gave."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jtrain.core.loss import Stateful
from jtrain.core.placement import Unplaced
from jtrain.core.state import TrainState, new_state
from jtrain.core.types import Params
from jtrain.parallel import Strategy
from jtrain.testing.case import Loss, LossCase, MakeStep
from jtrain.testing.float64 import ReplayRules, wide, widened
from jtrain.testing.result import StepResult
from jtrain.testing.row_sums import flat_metrics

# Metrics that a step adds, of which the loss is compared for itself and the others follow.
OWN = {"loss", "grad_norm", "update_norm", "skipped", "loss_scale"}


class ObservedState(NamedTuple):
    """The state of an optimizer, and what it was given."""

    gradient: Params
    calls: Any  # int32 scalar
    inner: Any


def observed(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same updates; its state keeps the last gradient and counts the calls."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Params) -> ObservedState:
        return ObservedState(jax.tree.map(jnp.zeros_like, params), jnp.int32(0), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **known: Any) -> Any:
        changed, after = inner.update(updates, state.inner, params, **known)
        return changed, ObservedState(updates, state.calls + 1, after)

    return optax.GradientTransformationExtraArgs(init, update)


class StepVariant(NamedTuple):
    """How a step is split and computed."""

    strategy: Strategy | None = None  # None: plain `jax.jit`
    microbatches: int = 1
    double: bool = False
    frozen: float | None = None  # what each draw is replaced by
    donate: bool = True
    change: Callable[[Loss], Loss] = lambda loss: loss  # what is asked of another loss


class CompiledStep:
    """A step that was compiled for a batch of a subject, to be taken from its start."""

    def __init__(self, of: LossCase, way: StepVariant, make: MakeStep | None = None):
        self.subject, self.way = of, way
        strategy = way.strategy
        loss = way.change(of.loss.build(strategy.placement if strategy else Unplaced()))
        like = first_state(of)
        self._step = (make or of.make)(
            loss,
            observed(of.optimizer),
            microbatches=way.microbatches,
            couples=of.couples,
            psum=strategy.psum if strategy else None,
            ragged=not of.masks,
            **({"lay": strategy.lay(like.params, of.dims)} if strategy else {}),
        )
        self._program = None

    def __call__(self, batch: Any) -> StepResult:
        """What a step from the start gives."""
        strategy = self.way.strategy
        with jax.enable_x64(self.way.double):
            state = self._start()
            rows = wide(dict(batch)) if self.way.double else dict(batch)
            if strategy:
                rows = strategy.place(jax.device_get(rows))
            if self._program is None:
                self._program = self._compile(state, rows)
            state, metrics = self._program(state, rows)
            return _result(jax.device_get(state), jax.device_get(metrics))

    def before(self) -> dict[str, Any]:
        """The state before the step, as of a Result."""
        return _of_state(first_state(self.subject))

    def _start(self) -> TrainState:
        """A state of its own: a step takes it away."""
        state = first_state(self.subject)
        state = wide(state) if self.way.double else jax.tree.map(jnp.asarray, state)
        if self.way.strategy is None:
            return state
        return jax.device_put(state, self.way.strategy.shardings(state, self.subject.dims))

    def _compile(self, state: TrainState, batch: Any) -> Callable[..., Any]:
        rules = ReplayRules(floats=self.way.double, frozen=self.way.frozen)
        plain = not self.way.double and self.way.frozen is None
        fn = self._step if plain else widened(self._step, rules)
        if self.way.strategy is None:
            return jax.jit(fn, donate_argnums=0 if self.way.donate else ())
        return self.way.strategy.compile(fn, state, batch, keeps=True)


@functools.lru_cache(maxsize=4)
def first_state(of: LossCase) -> TrainState:
    """The state before the step, as numpy arrays."""
    with jax.enable_x64(False):
        make = lambda: new_state(of.params, observed(of.optimizer), of.key, of.extra)
        return jax.device_get(jax.jit(make)())


def _result(state: TrainState, metrics: Any) -> StepResult:
    own = {name: metric for name, metric in metrics.items() if name not in OWN}
    seen: Any = state.opt_state
    return StepResult(
        loss=float(np.ravel(metrics["loss"].value())[0]),
        gradient=seen.gradient,
        state=_of_state(state),
        metrics=flat_metrics(own),
        calls=int(seen.calls),
    )


def _of_state(state: TrainState) -> dict[str, Any]:
    seen: Any = state.opt_state
    return {
        "params": state.params,
        "opt_state": seen.inner,
        "extra": state.extra,
        "step": state.step,
        "skipped": state.skipped,
    }


def without_draws(loss: Loss) -> Loss:
    """The loss as it is evaluated: it gets no key."""
    if isinstance(loss, Stateful):
        return Stateful(lambda params, extra, batch, rng: loss.loss(params, extra, batch, None))
    return lambda params, batch, rng: loss(params, batch, None)
