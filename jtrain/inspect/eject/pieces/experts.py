"""Mixture of experts, dropless."""

import jax
import jax.numpy as jnp

from jtrain.inspect.eject.pieces.block import (
    ACTIVATION,
    EXPERTS,
    HIDDEN,
    STD,
    STD_OUT,
    WIDTH,
    gelu,
    swiglu,
)

TOP_K: int = 2  # experts that a token goes through
CHOSEN: bool = True  # whether weights are of the chosen experts alone


def init_experts(draws):
    """Return the router and the experts' MLPs."""
    params = {"router": draws.normal((WIDTH, EXPERTS), STD)}
    if ACTIVATION == "swiglu" or ACTIVATION == "geglu":
        params["gate"] = draws.normal((EXPERTS, WIDTH, HIDDEN), STD)
    params["up"] = draws.normal((EXPERTS, WIDTH, HIDDEN), STD)
    return {**params, "down": draws.normal((EXPERTS, HIDDEN, WIDTH), STD_OUT)}


def mixture(layer, x):
    """Return the weighted sum of each token's experts, and the logits of the router."""
    wide, router = x.astype(jnp.float32), layer["router"].astype(jnp.float32)
    logits = jnp.matmul(wide, router, precision="highest")
    order = jnp.argsort(jax.lax.stop_gradient(logits), stable=True, descending=True)
    chosen = order[..., :TOP_K]
    one_hot = jax.nn.one_hot(chosen, EXPERTS, dtype=bool)  # b t k e
    highest = jnp.where(one_hot, logits[..., None, :], 0).sum(-1)
    if CHOSEN:
        weights = jax.nn.softmax(highest, -1)
    else:
        weights = jnp.exp(highest - jax.nn.logsumexp(logits, -1, keepdims=True))
    return apply_experts(layer, x, chosen, weights), logits


def apply_experts(layer, x, chosen, weights):
    """Apply each expert to its tokens, which are sorted by expert; none is dropped."""
    tokens, flat = x.reshape(-1, x.shape[-1]), chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)  # the choices, by expert
    slots = jnp.argsort(order).reshape(-1, TOP_K)  # of the choices of each token
    before = flat[:, None] < jnp.arange(EXPERTS + 1, dtype=flat.dtype)[None]
    sizes = jnp.diff(before.sum(0, dtype=jnp.int32))
    product = lambda rows, kernel: jax.lax.ragged_dot(rows, kernel, sizes)
    rows = to_slots(tokens, slots, order)
    wide = product(rows, layer["up"])
    if ACTIVATION == "swiglu":
        wide = swiglu(wide, product(rows, layer["gate"]))
    elif ACTIVATION == "geglu":
        wide = gelu(product(rows, layer["gate"])) * wide
    else:
        wide = gelu(wide)
    mixed = product(wide, layer["down"])[slots].reshape(*chosen.shape, -1)
    return (mixed.astype(jnp.float32) * weights[..., None]).sum(-2).astype(mixed.dtype)


@jax.custom_vjp
def to_slots(x, slots, order):
    """Return the token in each slot; the gradients of a token's choices are gathered and added."""
    return x[order // slots.shape[1]]


to_slots.defvjp(
    lambda x, slots, order: (to_slots(x, slots, order), slots),
    lambda slots, grad: (grad[slots].sum(1), None, None),
)
