"""One optimizer step, as a pure function of a state and a batch."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax

from jtrain.core.extra_arguments import with_named_arguments
from jtrain.core.finite import is_finite_update, update_if
from jtrain.core.gradient import NO_SHARDING, GradientSharding, make_gradient, make_value_fn
from jtrain.core.loss import Stateful, update_extra
from jtrain.core.loss_checks import check_split_rows
from jtrain.core.mean import Mean, sum_dtype
from jtrain.core.pytree import norm
from jtrain.core.state import TrainState
from jtrain.core.types import Batch, LossFn, Metrics, RowsInteract
from jtrain.errors.plain_numbers import plain_numbers

StepFn: TypeAlias = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
Carry = TypeVar("Carry")


@plain_numbers
def make_step(
    loss: LossFn | Stateful,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    rows_interact: RowsInteract = "never",
    psum: Callable[[Any], Any] | None = None,
    ragged: bool = False,
    unroll: bool = False,
    compute: Any = None,
    sharding: GradientSharding = NO_SHARDING,
) -> StepFn:
    """Return `(state, batch) -> (state, metrics)`: pure, not compiled, and bound to no device.

    The step takes the exact gradient of the loss over the whole batch (`make_gradient`), so any
    split of the rows takes the same step. If the loss, the gradient or a change of `extra` (the
    model's state that is not differentiated, such as batch norm's statistics) is not finite, then
    parameters, optimizer state and `extra` stay; `step` and `skipped` advance, and the loss scale
    adapts.

    Args:
        microbatches: slices of the batch whose gradients are summed, one after the other.
        rows_interact: "batch" if the loss of a row depends on others (batch norm, contrastive):
            then a batch is not split into slices. "slice" if each slice is meant as its own group.
        psum: sums a pytree over the copies of the step; None where there is one copy, or the
            compiler sums.
        ragged: whether masks may hide rows; then a loss that is a plain scalar is refused.
        unroll: write the microbatches out instead of looping.
        compute: the type of the copy of the parameters that the loss gets and that is
            differentiated; None: the parameters themselves. Gradients stay in this type until they
            are summed over microbatches or copies, or reach the optimizer: the very values that a
            cast inside the loss would give, in half the memory.
        sharding: where gradients and that copy are placed; see `Strategy.gradient_sharding`.

    Raises:
        LossError: if the loss couples the rows of a batch that would be split.
    """
    check_split_rows(rows_interact, microbatches, psum is not None)
    update = with_named_arguments(optimizer).update
    bind_batch = make_gradient(
        loss,
        microbatches=microbatches,
        psum=psum,
        ragged=ragged,
        unroll=unroll,
        compute=compute,
        sharding=sharding,
    )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss_gradient_at = bind_batch(state, batch)
        value, grads, metrics, changes = loss_gradient_at(state.params)
        grad_norm = norm(grads)
        extra = update_extra(state.extra, changes)
        # No loss scale changes the forward pass, so what is not finite in it is no overflow.
        forward_finite = jnp.isfinite(value) & is_finite_update(extra, changes)
        finite = forward_finite & jnp.isfinite(grad_norm)
        # For optax: line searches take the first three, SAM `grad_fn`, our clip the norm summed
        # over all copies, Muon the way to whole matrices.
        known = {"value": value, "grad": grads, "value_fn": make_value_fn(loss_gradient_at)}
        known |= {"grad_fn": lambda params, *index: loss_gradient_at(params).grads}
        known |= {"grad_norm": grad_norm, "matrices": sharding.matrices}
        old = state.opt_state, state.params, state.extra
        params, opt_state, extra, update_norm = update_if(
            finite, update, grads, *old, extra, sharded=sharding.splits, **known
        )
        skipped = state.skipped + ~finite
        own = {"loss": value, "grad_norm": grad_norm, "update_norm": update_norm}
        own |= {"skipped": skipped, **state.scale.metrics()}
        own = {name: Mean(x.astype(sum_dtype(x)), jnp.float32(1)) for name, x in own.items()}
        state = TrainState(
            step=state.step + 1,
            skipped=skipped,
            scale=state.scale.after(finite, overflow=forward_finite & ~finite),
            params=params,
            extra=extra,
            opt_state=opt_state,
            seed=state.seed,
        )
        return state, {**metrics, **own}

    return step


def scan_steps(step: Callable[[Carry, Batch], tuple[Carry, Metrics]], *, unroll: bool = False):
    """Return `(state, batches) -> (state, metrics)`, `step` scanned over batches stacked k b ..."""
    return lambda state, batches: jax.lax.scan(step, state, batches, unroll=unroll)
