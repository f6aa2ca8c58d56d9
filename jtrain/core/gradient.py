"""The exact gradient of a loss over a whole batch, however its rows are split."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import optax

from jtrain.core.accumulate import accumulate
from jtrain.core.loss import Stateful, combine, normalize_loss
from jtrain.core.loss_checks import check_weights
from jtrain.core.precision.cast import cast_params
from jtrain.core.pytree import at_least_f32, conjugate
from jtrain.core.rows import with_rows
from jtrain.core.state import TrainState
from jtrain.core.types import Batch, Extra, Leaf, LossFn, Metrics, Params


@runtime_checkable
class MatrixSharding(Protocol):
    """Protocol by which an optimizer gets whole matrices of leaves that are split over devices."""

    def group(self, name: str, leaf: Leaf) -> Any | None:
        """Return what names leaves `*n d f` that are moved together; None: they stay."""
        ...

    def shards(self, group: Any) -> int:
        """Return the number of shards that the dim n of a stack is split into."""
        ...

    def gather(self, stack: Leaf, group: Any) -> Leaf:
        """Return a stack n d f with whole matrices on each device."""
        ...

    def scatter(self, stack: Leaf, group: Any) -> Leaf:
        """Return a stack n d f split as the leaves are."""
        ...


class GradientSharding(NamedTuple):
    """Functions that place trees of the structure of the parameters while a step computes."""

    params: Callable[[Params], Params]  # the copy of the parameters that is computed with
    each: Callable[[Params], Params]  # the gradient of a microbatch
    summed: Callable[[Params], Params]  # the gradient of the batch
    matrices: MatrixSharding | None = None  # of gradients, where they are split
    splits: bool = False  # whether a leaf is split over devices


FEW = 4096
"""Operations that sum the weights of all microbatches, up to which they are written out.

A collective in a loop may run beside one that does not depend on the loop, and with jax before 0.12
devices of a CPU that begin with different ones deadlock (docs/decisions.md).
"""
_same: Callable[[Params], Params] = lambda tree: tree
NO_SHARDING = GradientSharding(params=_same, each=_same, summed=_same)


class LossGradient(NamedTuple):
    """The loss of a whole batch at some parameters, and its gradient."""

    value: Leaf  # f32 scalar
    grads: Params  # in the types of the parameters; dL/dx + i dL/dy of a complex leaf
    metrics: Metrics
    changes: Extra  # a Mean for each leaf of `extra` that changes, None for the others


GradientFn: TypeAlias = Callable[[Params], LossGradient]


def make_gradient(
    loss: LossFn | Stateful,
    *,
    microbatches: int,
    psum: Callable[[Any], Any] | None = None,
    ragged: bool = False,
    unroll: bool = False,
    compute: Any = None,
    sharding: GradientSharding = NO_SHARDING,
) -> Callable[[TrainState, Batch], GradientFn]:
    """Return `(state, batch) -> (params -> LossGradient)`; arguments as `make_step` takes them.

    The weights of all terms are summed over the whole batch first. They depend on no parameter, so
    the compiler drops that forward pass. Then the gradient of the sum of coefficient x total /
    weight is summed over microbatches and over the copies that `psum` adds up. Every split of the
    rows gives the same sums, up to rounding.
    """
    terms = normalize_loss(loss, ragged=ragged)

    def of_batch(state: TrainState, batch: Batch) -> GradientFn:
        batch = with_rows(batch, copies=psum is not None)
        rng = state.step_key()

        def total(fn: Callable[..., Any], **options: Any) -> Any:  # over all rows, on all devices
            sums = accumulate(fn, microbatches, unroll=unroll, **options)(batch)
            return sums if psum is None else psum(at_least_f32(sums))

        copy_of = lambda params: sharding.params(cast_params(params, compute))

        def weights_of(rows: Batch) -> list[Leaf]:
            of_params = lambda params: terms(copy_of(params), state.extra, rows, rng)
            check_weights(of_params, state.params)
            return [mean.weight for mean in of_params(state.params).terms.means]

        weights = total(weights_of, few=FEW)

        def contribution(params: Params, rows: Batch):  # of these rows to the loss: scaled, plain
            output = terms(params, state.extra, rows, rng)
            value = combine(output.terms, weights)
            return state.scale.up(value), (value, (output.metrics, output.extra))

        def gradient(params: Params) -> LossGradient:
            copy = copy_of(params)
            place = lambda sums: (sums[0], sharding.each(sums[1]))

            def of_rows(rows: Batch):
                grads, unscaled = jax.grad(contribution, has_aux=True)(copy, rows)
                return unscaled, grads

            (value, (metrics, changes)), grads = total(of_rows, place=place)
            grads = conjugate(optax.tree.cast_like(sharding.summed(grads), params))
            return LossGradient(value, state.scale.down(grads), metrics, changes)

        return gradient

    return of_batch


def make_value_fn(gradient: GradientFn) -> Callable[[Params], Leaf]:
    """Return `params -> value`, differentiable, whose derivative is the summed gradient.

    Differentiating the value itself would go backwards through the sum over copies, of which each
    copy sees its own part alone.
    """
    value = jax.custom_vjp(lambda params: gradient(params).value)

    def forward(params: Params) -> tuple[Leaf, Params]:
        at = gradient(params)
        return at.value, at.grads

    backward = lambda grads, up: (jax.tree.map(lambda g: up * g, conjugate(grads)),)
    value.defvjp(forward, backward)

    def value_fn(
        params: Params, grad_fn: Any = None, grad_norm: Leaf | None = None, matrices: Any = None
    ) -> Leaf:
        # optax's line searches hand on what an update gets, and refuse the rest
        del grad_fn, grad_norm, matrices
        return value(params)

    return value_fn
