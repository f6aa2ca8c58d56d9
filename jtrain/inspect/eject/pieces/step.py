"""One step of training."""

import jax
import jax.numpy as jnp
import optax

from jtrain.inspect.eject.pieces.classifier_mlp import init_model
from jtrain.inspect.eject.pieces.classify import loss
from jtrain.inspect.eject.pieces.layers import BF16
from jtrain.inspect.eject.pieces.optimizer import CLIP, optimizer
from jtrain.inspect.eject.pieces.shuffle import SEED

MICROBATCHES: int = 1  # slices of a batch, whose gradients are added


def start():
    """Return the state before the first step."""
    key, run_key = jax.random.split(jax.random.key(SEED))
    params, extra = init_model(key)
    return {
        "step": jnp.int32(0),
        "params": params,
        "extra": extra,
        "opt_state": optimizer.init(params),
        "key": jax.random.key_data(run_key),
    }


def step(state, batch):
    """Return the state after a step, and its loss."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["step"])
    old = state["params"], state["opt_state"], state["extra"]
    value, grads, extra = loss_and_gradient(state["params"], state["extra"], batch, key)
    size = norm(grads)

    # A step whose gradient is not finite changes nothing; a branch, as XLA:CPU copies the state for
    # a select.
    def take():
        if CLIP > 0:
            limit = lambda g: jnp.where(size < CLIP, g, g / size * CLIP)
            return *optimizer.update(jax.tree.map(limit, grads), old[1], old[0]), extra
        else:
            return *optimizer.update(grads, old[1], old[0]), extra

    finite = jnp.isfinite(value) & jnp.isfinite(size)
    updates, opt_state, extra = jax.lax.cond(finite, take, lambda: (grads, *old[1:]))
    updates = jax.tree.map(lambda u: jnp.where(finite, u, -0.0), updates)
    params = optax.apply_updates(old[0], updates)
    new = {"params": params, "extra": extra, "opt_state": opt_state}
    return {**state, **new, "step": state["step"] + 1}, value


def loss_and_gradient(params, extra, batch, key):
    """Return the loss of a batch, its gradient, and what the model carries on."""
    copy = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params) if BF16 else params
    if MICROBATCHES > 1:
        weights = sum_slices(batch, lambda rows: [x[2] for x in loss(copy, extra, rows, key)[0]])
        part = lambda rows: part_of_loss(copy, extra, rows, key, weights)
        grads, value = sum_slices(batch, part)
        changed = extra
    else:

        def value_of(params):
            terms, changed = loss(params, extra, batch, key)
            value = sum(c * (total / weight) for c, total, weight in terms)
            return value, (value, changed)

        grads, (value, changed) = jax.grad(value_of, has_aux=True)(copy)
    if BF16:
        grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, params)
    return value, grads, changed


def part_of_loss(params, extra, rows, key, weights):
    """Return what some rows add to the gradient and to the loss of the whole batch."""

    def value_of(params):
        terms = loss(params, extra, rows, key)[0]
        value = sum(c * (x / weight) for (c, x, _), weight in zip(terms, weights, strict=True))
        return value, value

    return jax.grad(value_of, has_aux=True)(params)


def sum_slices(batch, fn):
    """Return the sum of `fn` over slices of the rows, one after the other: every n-th row each."""
    cut = lambda x: x.reshape(-1, MICROBATCHES, *x.shape[1:]).swapaxes(0, 1)
    slices = jax.tree.map(cut, batch)
    wide = lambda rows: jax.tree.map(lambda x: x.astype(jnp.float32), fn(rows))
    shapes = jax.eval_shape(wide, jax.tree.map(lambda x: x[0], slices))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    add = lambda total, rows: (jax.tree.map(jnp.add, total, wide(rows)), None)
    return jax.lax.scan(add, zeros, slices)[0]


def norm(tree):
    """Return the 2-norm over all leaves together."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))
