"""One optimizer step, as a pure function of a state and a batch."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax

from jtrain.core.accumulate import accumulate, make_value_fn
from jtrain.core.finite import is_finite_update, update_if
from jtrain.core.loss import Stateful, combine, normalize_loss, update_extra
from jtrain.core.loss_checks import check_split_rows, check_weights
from jtrain.core.mean import Mean
from jtrain.core.precision.cast import cast_params
from jtrain.core.pytree import at_least_f32, norm
from jtrain.core.rows import with_rows
from jtrain.core.sharding import NO_SHARDING, GradientSharding
from jtrain.core.state import TrainState
from jtrain.core.types import Batch, Couples, LossFn, Metrics

StepFn: TypeAlias = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
Carry = TypeVar("Carry")


def make_step(
    loss: LossFn | Stateful,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    couples: Couples = "nothing",
    psum: Callable[[Any], Any] | None = None,
    ragged: bool = False,
    unroll: bool = False,
    compute: Any = None,
    lay: GradientSharding = NO_SHARDING,
) -> StepFn:
    """`(state, batch) -> (state, metrics)`; compiles nothing and knows no device.

    The weights of all terms are summed over the whole batch first (they depend on no parameter, so
    the compiler drops the forward pass). Then one gradient, of the sum of coefficient x total /
    weight, is summed over microbatches and over the copies that `psum` adds up: any split of the
    rows takes the same step. Where loss, gradient or a change of `extra` is not finite the old
    state stays.

    Args:
        microbatches: slices of the batch whose gradients are summed, one after the other.
        couples: "batch" if the loss makes rows meet (batch norm, contrastive): then a batch is not
            split into slices. "slice" if it does and each slice is meant to be its own group.
        psum: sums a pytree over the copies of the step; None where there is one, or the compiler
            sums.
        ragged: whether masks may hide rows; then a loss that is a plain scalar is refused.
        unroll: write the microbatches out instead of looping.
        compute: the type of the copy of the parameters that the loss gets and that is
            differentiated; None: they themselves. Gradients are in it until they are summed over
            microbatches or copies or get to the optimizer, the very values that a cast inside the
            loss would give, in half the memory.
        lay: where gradients and that copy are put; see `Strategy.lay`.

    Raises:
        LossError: if the loss couples the rows of a batch that would be split.
    """
    check_split_rows(couples, microbatches, psum is not None)
    terms, update = (
        normalize_loss(loss, ragged=ragged),
        optax.with_extra_args_support(optimizer).update,
    )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        batch = with_rows(batch, copies=psum is not None)
        rng = state.step_key()

        def total(fn, **options):  # over the whole batch, on all devices
            sums = accumulate(fn, microbatches, unroll=unroll, **options)(batch)
            return sums if psum is None else psum(at_least_f32(sums))

        def weights_of(rows):
            of_params = lambda params: terms(cast_params(params, compute), state.extra, rows, rng)
            check_weights(of_params, state.params)
            return [mean.weight for mean in of_params(state.params).terms.means]

        weights = total(weights_of)

        def share(params, rows):  # what these rows add to the loss, scaled; and as it is
            got = terms(params, state.extra, rows, rng)
            value = combine(got.terms, weights)
            return state.scale.up(value), (value, (got.metrics, got.extra))

        def gradient(params):  # of the loss over the whole batch
            copy = lay.params(cast_params(params, compute))
            put = lambda sums: (sums[0], lay.each(sums[1]))

            def of_rows(rows):
                grads, unscaled = jax.grad(share, has_aux=True)(copy, rows)
                return unscaled, grads

            unscaled, grads = total(of_rows, lay=put)
            grads = optax.tree.cast_like(lay.summed(grads), params)
            return unscaled, state.scale.down(grads)

        (value, (metrics, changes)), grads = gradient(state.params)
        grad_norm = norm(grads)
        extra = update_extra(state.extra, changes)
        forward = jnp.isfinite(value) & is_finite_update(extra, changes)  # which no scale changes
        finite = forward & jnp.isfinite(grad_norm)
        known = {"value": value, "grad": grads, "value_fn": make_value_fn(gradient)}
        known |= {"grad_norm": grad_norm}  # summed here, where all copies of the step take part
        params, opt_state, extra, update_norm = update_if(
            finite, update, grads, state.opt_state, state.params, state.extra, extra, **known
        )
        skipped = state.skipped + ~finite
        own = {"loss": value, "grad_norm": grad_norm, "update_norm": update_norm}
        own |= {"skipped": skipped, **state.scale.told()}
        metrics |= {name: Mean(x.astype(jnp.float32), jnp.float32(1)) for name, x in own.items()}
        state = TrainState(
            step=state.step + 1,
            skipped=skipped,
            scale=state.scale.after(finite, overflow=forward & ~finite),
            params=params,
            extra=extra,
            opt_state=opt_state,
            seed=state.seed,
        )
        return state, metrics

    return step


def many(step: Callable[[Carry, Batch], tuple[Carry, Metrics]], *, unroll: bool = False):
    """`(state, batches) -> (state, metrics)` that scans `step` over batches stacked k b ..."""
    return lambda state, batches: jax.lax.scan(step, state, batches, unroll=unroll)
