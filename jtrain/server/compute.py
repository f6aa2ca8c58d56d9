"""Programs of a worker: what it computes of a batch, from the parts of `make_step`."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jtrain.core.finite import is_finite_update
from jtrain.core.gradient import make_gradient
from jtrain.core.loss import update_extra
from jtrain.core.loss_checks import check_split_rows
from jtrain.core.mean import Mean, sum_dtype
from jtrain.core.precision.loss_scale import LossScale, Unscaled
from jtrain.core.pytree import norm
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn, make_step
from jtrain.core.types import Batch, Extra, Leaf, Metrics, Params
from jtrain.parallel import Server
from jtrain.parallel.strategies.server_modes import SSP, Async, Mode, splits_rows
from jtrain.train.program import Program


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """The state of a run without parameters and optimizer state: small, and sent with each step."""

    step: Leaf
    skipped: Leaf
    scale: LossScale | Unscaled
    extra: Extra
    seed: Leaf

    @classmethod
    def of(cls, state: TrainState) -> "Head":
        """Return the head of a state."""
        return cls(**{field.name: getattr(state, field.name) for field in dataclasses.fields(cls)})

    def state(self, params: Params, opt_state: Any = ()) -> TrainState:
        """Return the state with these parameters."""
        rest = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return TrainState(params=params, opt_state=opt_state, **rest)


class Sums(NamedTuple):
    """Sums over rows, beside the gradient."""

    value: Leaf  # of the loss, f32 scalar
    metrics: Metrics
    changes: Extra


class Finished(NamedTuple):
    """The head after a step, and whether its update is taken."""

    head: Head
    finite: Leaf


class Programs(NamedTuple):
    """Pure functions that a worker compiles, of a program."""

    weights: Callable[[TrainState, Batch], list[Leaf]]
    """Weights of the terms of the loss, summed over the rows."""
    share: Callable[[TrainState, Batch, list[Leaf]], tuple[Sums, Params]]
    """Sums and gradient of some rows, divided by the weights of the whole batch."""
    whole: Callable[[TrainState, Batch], tuple[Sums, Params, Leaf, Leaf]]
    """Sums and gradient of a batch, its norm, and whether all of it is finite."""
    inner: StepFn
    """A complete step, whose loss has the weight of the rows."""


def has_clock(mode: Mode) -> bool:
    """Return whether workers take steps of the run one by one, each at its own pace."""
    return isinstance(mode, Async | SSP)


def make_programs(program: Program, server: Server, rule: optax.GradientTransformation) -> Programs:
    """Return the programs of a worker.

    Args:
        server: the values under `parallel`.
        rule: the experiment's optimizer.

    Raises:
        LossError: if the loss couples the rows of a batch that would be split.
    """
    config, x = program.resolved.config, program.resolved.experiment
    copies = splits_rows(server.mode) and server.workers > 1
    check_split_rows(x.rows_interact, config.microbatches, copies)
    arguments = {"microbatches": config.microbatches, "ragged": x.train.ragged}
    arguments |= {"compute": config.precision.compute}

    def weights(state: TrainState, batch: Batch) -> list[Leaf]:
        found: list[Any] = []
        make_gradient(x.loss, psum=lambda sums: found.append(sums) or sums, **arguments)(
            state, batch
        )
        return found[0]

    def share(state: TrainState, batch: Batch, weights: list[Leaf]) -> tuple[Sums, Params]:
        psums = iter([lambda _: weights, lambda sums: sums])  # of the weights, of the gradient
        bind = make_gradient(x.loss, psum=lambda sums: next(psums)(sums), **arguments)
        value, grads, metrics, changes = bind(state, batch)(state.params)
        return Sums(value, metrics, changes), grads

    def whole(state: TrainState, batch: Batch) -> tuple[Sums, Params, Leaf, Leaf]:
        bind = make_gradient(x.loss, **arguments)
        value, grads, metrics, changes = bind(state, batch)(state.params)
        sums, grad_norm = Sums(value, metrics, changes), norm(grads)
        return sums, grads, grad_norm, finish(Head.of(state), sums, grad_norm).finite

    step = make_step(x.loss, rule, rows_interact=x.rows_interact, **arguments)

    def inner(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        weight = sum(weights(state, batch), start=jnp.float32(0))
        state, metrics = step(state, batch)
        total = jnp.where(weight == 0, 0, metrics["loss"].total * weight)
        return state, {**metrics, "loss": Mean(total, weight)}

    return Programs(weights, share, whole, inner)


def finish(head: Head, sums: Sums, grad_norm: Leaf) -> Finished:
    """Return the head after a step, as `make_step` computes it."""
    extra = update_extra(head.extra, sums.changes)
    forward = jnp.isfinite(sums.value) & is_finite_update(extra, sums.changes)
    finite = forward & jnp.isfinite(grad_norm)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), extra, head.extra)
    after = Head(
        step=head.step + 1,
        skipped=head.skipped + ~finite,
        scale=head.scale.after(finite, overflow=forward & ~finite),
        extra=kept,
        seed=head.seed,
    )
    return Finished(after, finite)


def step_metrics(before: Head, after: Head, sums: Sums, norms: tuple[float, float]) -> Metrics:
    """Return the metrics of a step, as `make_step` names them.

    Args:
        norms: of the gradient and of the update.
    """
    own = {"loss": sums.value, "grad_norm": norms[0], "update_norm": norms[1]}
    own |= {"skipped": after.skipped, **before.scale.metrics()}
    one = jnp.float32(1)
    return {
        **sums.metrics,
        **{name: Mean(jnp.asarray(x, sum_dtype(x)), one) for name, x in own.items()},
    }
