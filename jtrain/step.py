"""One optimizer step, as a pure function of a state and a batch."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax

from jtrain.accumulate import accumulate
from jtrain.errors import LossError
from jtrain.state import TrainState
from jtrain.terms import absorb, combine, in_terms, refuse_weights_of_params
from jtrain.trees import norm
from jtrain.types import Batch, Couples, LossFn, Mean, Metrics, Stateful, Tree

StepFn: TypeAlias = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
Carry = TypeVar("Carry")


def here(tree: Tree) -> Tree:
    """`tree`: the sum over the copies of the step where there is one, or the compiler sums."""
    return tree


def make_step(
    loss: LossFn | Stateful,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    couples: Couples = "nothing",
    psum: Callable[[Tree], Tree] = here,
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
        psum: sums a pytree over the copies of the step; the identity where there is one copy.
        unroll: write the microbatches out instead of looping.

    Raises:
        LossError: if the loss couples the rows of a batch that would be split.
    """
    if couples == "batch" and (microbatches > 1 or psum is not here):
        raise LossError(
            f"the loss couples the rows of a batch, and {microbatches} microbatches or separate "
            f"copies of the step would cut the batch. Set microbatches=1 and a strategy that shards "
            f'by name (single, mirrored with impl=jit, fsdp), or say couples="slice" if the rows '
            f"that one slice holds are to be the group."
        )
    terms, update = in_terms(loss), optax.with_extra_args_support(optimizer).update

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        batch = with_rows(batch, psum)
        rng = jax.random.fold_in(state.rng, state.step)

        def total(fn):  # over the whole batch, on all devices
            return psum(accumulate(fn, microbatches, unroll=unroll)(batch))

        def weights_of(rows):
            of_params = lambda params: terms(params, state.extra, rows, rng)
            refuse_weights_of_params(of_params, state.params)
            return [mean.weight for mean in of_params(state.params).terms.means]

        weights = total(weights_of)

        def share(params, rows):  # what these rows add to the loss
            got = terms(params, state.extra, rows, rng)
            value = combine(got.terms, weights)
            return value, (value, got.metrics, got.extra)

        grads, (value, metrics, changes) = total(
            lambda rows: jax.grad(share, has_aux=True)(state.params, rows)
        )
        updates, opt_state = update(
            grads,
            state.opt_state,
            state.params,
            value=value,
            grad=grads,
            value_fn=lambda params: total(lambda rows: share(params, rows)[0]),
        )
        params = optax.apply_updates(state.params, updates)
        grad_norm = norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
        new = params, absorb(state.extra, changes), opt_state
        old = state.params, state.extra, state.opt_state
        params, extra, opt_state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
        own = {"loss": value, "grad_norm": grad_norm, "update_norm": norm(updates), "finite": finite}
        metrics |= {name: Mean(x.astype(jnp.float32), jnp.float32(1)) for name, x in own.items()}
        state = dataclasses.replace(
            state, step=state.step + 1, params=params, extra=extra, opt_state=opt_state
        )
        return state, metrics

    return step


def many(step: Callable[[Carry, Batch], tuple[Carry, Metrics]], *, unroll: bool = False):
    """`(state, batches) -> (state, metrics)` that scans `step` over batches stacked k b ..."""
    return lambda state, batches: jax.lax.scan(step, state, batches, unroll=unroll)


def with_rows(batch: Batch, psum: Callable = here) -> Batch:
    """`batch` with the `row` and `mask` of a full batch where it has none of its own."""
    if "row" in batch and "mask" in batch:
        return batch
    if psum is not here:
        raise LossError("a step of several copies needs `row` and `mask` in its batch: row is global.")
    rows = len(jax.tree.leaves(batch)[0])
    return {"row": jnp.arange(rows, dtype=jnp.int32), "mask": jnp.ones(rows, bool), **batch}
