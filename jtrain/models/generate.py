"""Text in a model's hand."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.types import Key, Params


@functools.partial(jax.jit, static_argnames=("logits", "steps", "context"))
def generate(
    logits: Callable[[Params, Int[Array, "b t"]], Float[Array, "b t v"]],
    params: Params,
    prompt: Int[Array, "b p"],
    key: Key,
    *,
    steps: int,
    context: int,
    temperature: float | Float[Array, ""] = 1.0,
) -> Int[Array, "b n"]:
    """The prompt and `steps` tokens drawn after it, one by one: b p + steps.

    Each is drawn from what `logits` says of the last `context` tokens, divided by `temperature`;
    at 0 the likeliest is taken. A row draws by its own key. Compiles once for a function, a shape
    and a number of steps. Each step runs the whole window (nothing is cached); what stands after
    the present in it must not change what `logits` says of the present.
    """
    batch, start = prompt.shape
    size = max(start + steps, context)
    text = jnp.zeros((batch, size), prompt.dtype).at[:, :start].set(prompt)
    rows = jnp.arange(batch)

    def grow(present, text):
        first = jnp.maximum(present - context, 0)
        window = jax.lax.dynamic_slice_in_dim(text, first, context, axis=1)
        scores = logits(params, window)
        scores = jax.lax.dynamic_index_in_dim(scores, present - first - 1, axis=1, keepdims=False)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, present), rows)
        warm = scores.astype(jnp.float32) / jnp.maximum(temperature, 1e-6)
        drawn = jax.vmap(jax.random.categorical)(keys, warm)
        token = jnp.where(temperature > 0, drawn, scores.argmax(-1)).astype(text.dtype)
        return jax.lax.dynamic_update_slice_in_dim(text, token[:, None], present, axis=1)

    return jax.lax.fori_loop(start, start + steps, grow, text)[:, : start + steps]
