"""One optimizer step, as a pure function of a state and a batch."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax

from jtrain.accumulate import accumulate, value_of
from jtrain.loss_checks import refuse_split_rows, refuse_weights_of_params
from jtrain.rows import with_rows
from jtrain.state import TrainState
from jtrain.terms import absorb, combine, in_terms
from jtrain.trees import norm
from jtrain.types import Batch, Couples, LossFn, Mean, Metrics, Stateful

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
) -> StepFn:
    """`(state, batch) -> (state, metrics)`; compiles nothing and knows no device.

    The weights of all terms are summed over the whole batch first (they depend on no parameter, so
    the compiler drops the forward pass). Then one gradient, of the sum of coefficient x total /
    weight, is summed over microbatches and over the copies that `psum` adds up: any split of the
    rows takes the same step. Where loss or gradient is not finite the old state stays.

    Args:
        microbatches: slices of the batch whose gradients are summed, one after the other.
        couples: "batch" if the loss makes rows meet (batch norm, contrastive): then a batch is not
            split into slices. "slice" if it does and each slice is meant to be its own group.
        psum: sums a pytree over the copies of the step; None where there is one, or the compiler
            sums.
        ragged: whether masks may hide rows; then a loss that is a plain scalar is refused.
        unroll: write the microbatches out instead of looping.

    Raises:
        LossError: if the loss couples the rows of a batch that would be split.
    """
    refuse_split_rows(couples, microbatches, psum is not None)
    terms, update = in_terms(loss, ragged=ragged), optax.with_extra_args_support(optimizer).update

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        batch = with_rows(batch, copies=psum is not None)
        rng = state.step_key()

        def total(fn):  # over the whole batch, on all devices
            sums = accumulate(fn, microbatches, unroll=unroll)(batch)
            return sums if psum is None else psum(sums)

        def weights_of(rows):
            of_params = lambda params: terms(params, state.extra, rows, rng)
            refuse_weights_of_params(of_params, state.params)
            return [mean.weight for mean in of_params(state.params).terms.means]

        weights = total(weights_of)

        def share(params, rows):  # what these rows add to the loss
            got = terms(params, state.extra, rows, rng)
            return combine(got.terms, weights), (got.metrics, got.extra)

        def gradient(params):  # of the loss over the whole batch
            return total(lambda rows: jax.value_and_grad(share, has_aux=True)(params, rows))

        (value, (metrics, changes)), grads = gradient(state.params)
        grad_norm = norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)

        def take():
            updates, opt_state = update(
                grads,
                state.opt_state,
                state.params,
                value=value,
                grad=grads,
                value_fn=value_of(gradient),
            )
            updates = optax.tree.cast_like(updates, state.params)
            return updates, opt_state, absorb(state.extra, changes)

        # A branch and not a select: for a select XLA:CPU copies the whole donated state, a quarter
        # of the time of a small step (docs/log.md). In the other branch the gradients stand for
        # updates that are not taken, so that either can lie in the memory of the gradients.
        stay = lambda: (optax.tree.cast_like(grads, state.params), state.opt_state, state.extra)
        updates, opt_state, extra = jax.lax.cond(finite, take, stay)
        update_norm = jnp.where(finite, norm(updates), 0)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, -0.0), updates)  # x + -0.0 is x
        params = optax.apply_updates(state.params, updates)
        skipped = state.skipped + ~finite
        own = {"loss": value, "grad_norm": grad_norm, "update_norm": update_norm}
        own |= {"skipped": skipped}
        metrics |= {name: Mean(x.astype(jnp.float32), jnp.float32(1)) for name, x in own.items()}
        state = TrainState(
            step=state.step + 1,
            skipped=skipped,
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
