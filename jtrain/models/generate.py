"""Text in a model's hand, token by token, with the keys and values of what came before kept."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.core.types import Key, Params
from jtrain.errors import ConfigError
from jtrain.models.sampling import draw


@runtime_checkable
class IncrementalModel(Protocol):
    """A model that reads on from where it stopped, such as `Transformer.build()` gives."""

    @property
    def context(self) -> int:
        """Tokens that it sees at once, at most."""
        ...

    def empty(self, params: Params, rows: int, /) -> Any:
        """What it remembers before the first token."""
        ...

    def extend(
        self, params: Params, cache: Any, tokens: Int[Array, "b t"], at: Int[Array, ""], /
    ) -> tuple[Float[Array, "b v"], Any]:
        """Logits after the last of `tokens`, the first of which stands at `at`, and the memory."""
        ...


def generate(
    model: IncrementalModel,
    params: Params,
    prompt: Int[Array, "b p"],
    key: Key,
    *,
    steps: int,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int = 0,
    top_p: float | Float[Array, ""] = 1.0,
) -> Int[Array, "b n"]:
    """The prompt and `steps` tokens drawn after it, one by one: b p + steps.

    The prompt is read at once, then a token a step. A row draws by its own key, by the position,
    and from what `jtrain.models.sampling.draw` says. Where the text grows past the model's context
    the model goes on from the last half of it, read once more: a token sees between half the
    context and all of it. Compiles once for a model, a shape, a number of steps and a `top_k`.

    Raises:
        ConfigError: if the prompt has no token, or a number is out of its range.
    """
    _check(prompt, steps, temperature, top_k, top_p)
    if steps == 0:
        return prompt
    return _generate(
        model,
        params,
        prompt,
        key,
        steps=steps,
        top_k=top_k,
        how={"temperature": jnp.float32(temperature), "top_p": jnp.float32(top_p)},
    )


@functools.partial(jax.jit, static_argnames=("model", "steps", "top_k"))
def _generate(model, params, prompt, key, *, steps, top_k, how):
    (rows, start), context = prompt.shape, model.context
    half = context - context // 2
    row = jnp.arange(rows)
    text = jnp.zeros((rows, start + steps), prompt.dtype).at[:, :start].set(prompt)

    def read(text, first, count):
        """The memory of `count` tokens from `first` on, and the logits after them."""
        window = jax.lax.dynamic_slice_in_dim(text, first, count, axis=1)
        return *model.extend(params, model.empty(params, rows), window, jnp.int32(0)), first

    def grow(present, carry):
        text, logits, cache, first = carry
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, present), row)
        token = draw(logits, keys, top_k=top_k, **how).astype(text.dtype)[:, None]
        text = jax.lax.dynamic_update_slice_in_dim(text, token, present, axis=1)

        def on(_):
            return *model.extend(params, cache, token, present - first), first

        if start + steps <= context:  # it never is full
            return text, *on(None)
        full = present - first == context
        return text, *jax.lax.cond(full, lambda _: read(text, present + 1 - half, half), on, None)

    seen = min(start, context)
    logits, cache, first = read(text, jnp.int32(start - seen), seen)
    return jax.lax.fori_loop(start, start + steps, grow, (text, logits, cache, first))[0]


@dataclasses.dataclass(frozen=True)
class UncachedModel:
    """Any function that gives logits, as a model for `generate`: it reads all once more each step.

    Args:
        logits: `(params, tokens b t) -> b t v`; what stands after a position must not change what
            it says there.
        context: tokens that it sees at once, at most.
    """

    logits: Callable[[Params, Int[Array, "b t"]], Float[Array, "b t v"]]
    context: int

    def empty(self, params: Params, rows: int) -> Int[Array, "b c"]:
        """A window of no tokens."""
        del params
        return jnp.zeros((rows, self.context), jnp.int32)

    def extend(
        self, params: Params, cache: Int[Array, "b c"], tokens: Int[Array, "b t"], at: Array
    ) -> tuple[Float[Array, "b v"], Int[Array, "b c"]]:
        """Logits after the last of `tokens`, and the window with them."""
        cache = jax.lax.dynamic_update_slice_in_dim(cache, tokens.astype(cache.dtype), at, axis=1)
        last = at + tokens.shape[1] - 1
        scores = self.logits(params, cache)
        return jax.lax.dynamic_index_in_dim(scores, last, axis=1, keepdims=False), cache


def _check(prompt, steps, temperature, top_k, top_p):
    if not prompt.shape[1]:
        raise ConfigError(
            "the prompt has no token, and a model goes on from at least one. Give one: a line "
            "break starts a line."
        )
    fine = {
        "steps": (steps, steps >= 0, "0 or more"),
        "temperature": (temperature, _fits(temperature, lambda x: x >= 0), "0 or more"),
        "top_k": (top_k, top_k >= 0, "0 for all tokens, or how many of the likeliest"),
        "top_p": (top_p, _fits(top_p, lambda x: 0 < x <= 1), "above 0 and at most 1, for all"),
    }
    for name, (value, fits, words) in fine.items():
        if not fits:
            raise ConfigError(f"generate was asked for {name}={value}. Give {name} {words}.")


def _fits(value, fits) -> bool:
    """Whether a number is as it should be; what is not on the host is not looked at."""
    return not isinstance(value, int | float) or fits(value)
