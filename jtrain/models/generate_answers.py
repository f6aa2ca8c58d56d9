"""Answers to several prompts at once, until each has reached its end mark."""

import functools

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Int, Integer

from jtrain.core.rows import threefry
from jtrain.core.types import Key, Params
from jtrain.errors import ConfigError
from jtrain.models.generate import IncrementalModel, check_sampling, draw, with_room


def generate_answers(
    model: IncrementalModel,
    params: Params,
    prompts: Integer[Array, "b p"],
    lengths: Int[Array, "b"],
    key: Key,
    *,
    start: int,
    steps: int,
    stop: tuple[int, ...] = (),
    temperature: float = 0.0,
    top_k: int = 0,
) -> tuple[Int[Array, "b n"], Int[Array, "b"]]:
    """Return the texts, b p + steps, and where the answer of each ends, its mark included.

    The model reads the first `start` tokens of all prompts at once, then a token a step, that of
    the prompt or a drawn one, with a cache of keys and values. An answer ends with `stop`, or after
    `steps` tokens, and the loop when all have. Behind the end of an answer a text is 0. A row's
    answer does not depend on the others. Compiles once for a model, a shape and the numbers.

    Args:
        prompts: filled up at the end, with any tokens.
        lengths: tokens of each prompt.
        start: tokens that every prompt has, at least 1.
        steps: most tokens of an answer.
        stop: tokens in a row that end an answer; none: it has `steps` tokens.

    Raises:
        ConfigError: if the longest text does not fit the context, or a number is out of its range.
    """
    width = prompts.shape[1] + steps
    if width > model.context:
        raise ConfigError(
            f"prompts of {prompts.shape[1]} tokens and answers of {steps} make {width}, and the "
            f"model reads {model.context}. Take shorter prompts, or answers of "
            f"{max(model.context - prompts.shape[1], 0)} tokens."
        )
    if steps < 1 or not 1 <= start <= prompts.shape[1]:
        raise ConfigError(
            f"generate_answers got start={start} and steps={steps}. Give steps of 1 or more, and "
            f"start in 1 .. {prompts.shape[1]}, the tokens of the prompts."
        )
    check_sampling("generate_answers", steps=steps, temperature=temperature, top_k=top_k)
    if not isinstance(lengths, Tracer) and (shortest := int(lengths.min())) < start:
        raise ConfigError(
            f"generate_answers got start={start}, and the shortest prompt has {shortest} tokens. "
            f"Set start={shortest} or less."
        )
    return _generate(
        model,
        params,
        with_room(prompts),
        lengths,
        key,
        start=start,
        steps=steps,
        stop=stop,
        temperature=jnp.float32(temperature),
        top_k=top_k,
    )


@functools.partial(jax.jit, static_argnames=("model", "start", "steps", "stop", "top_k"))
def _generate(model, params, prompts, lengths, key, *, start, steps, stop, temperature, top_k):
    rows, longest = prompts.shape
    index, key = jnp.arange(rows), threefry(key)
    padded = jnp.where(jnp.arange(longest)[None] < lengths[:, None], prompts, 0)
    text = jnp.pad(padded, ((0, 0), (0, steps)))
    mark = jnp.asarray(stop, text.dtype)

    def unfinished(carry):
        return (carry[-1] == 0).any()

    def grow(carry):
        present, text, logits, cache, ends = carry
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, present), index)
        drawn = draw(logits, keys, temperature=temperature, top_k=top_k).astype(text.dtype)
        given = jax.lax.dynamic_index_in_dim(text, present, axis=1, keepdims=False)
        token = jnp.where((present < lengths) | (ends > 0), given, drawn)
        text = jax.lax.dynamic_update_slice_in_dim(text, token[:, None], present, axis=1)
        answered = present + 1 - lengths
        ended = answered >= steps
        if stop:
            last = jax.lax.dynamic_slice_in_dim(text, present + 1 - len(stop), len(stop), axis=1)
            ended |= (answered >= len(stop)) & (last == mark[None]).all(axis=1)
        ends = jnp.where((ends == 0) & ended, present + 1, ends)
        logits, cache = model.extend(params, cache, token[:, None], present)
        return present + 1, text, logits, cache, ends

    first = jax.lax.slice_in_dim(text, 0, start, axis=1)
    logits, cache = model.extend(params, model.empty(params, rows), first, jnp.int32(0))
    ends = jnp.zeros(rows, jnp.int32)
    carry = jnp.int32(start), text, logits, cache, ends
    _, text, _, _, ends = jax.lax.while_loop(unfinished, grow, carry)
    return text, ends
