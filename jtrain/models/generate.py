"""Generation of text token by token: sampling from logits, with a cache of keys and values."""

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from jtrain.core.pytree import at_least_f32
from jtrain.core.rows import threefry
from jtrain.core.types import Keys, Params
from jtrain.errors import ConfigError
from jtrain.errors.plain_numbers import plain_numbers
from jtrain.losses.cross_entropy import cross_entropy_per_label


class Draw(NamedTuple):
    """A token drawn for each row, and the distribution that it was drawn from."""

    tokens: Int[Array, "b"]
    logits: Float[Array, "b v"]
    """Logits divided by the temperature."""
    candidates: Bool[Array, "b v"]


def draw(
    logits: Float[Array, "b v"],
    keys: Shaped[Array, "b"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int = 0,
    top_p: float | Float[Array, ""] = 1.0,
) -> Draw:
    """Draw a token for each row by the row's key.

    Probabilities are the softmax of the logits divided by `temperature`; at 0 the likeliest token
    is taken. Candidates are the `top_k` likeliest tokens, and of these the fewest whose
    probabilities add up to `top_p` or more: at least one.

    Args:
        logits: any floating type; computed in at least float32.
        keys: one for each row.
        temperature: 0 or more.
        top_k: 0 draws from all.
        top_p: above 0; 1 draws from all.

    Source of top_p: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751.
    """
    wide = at_least_f32(logits)
    warm = wide / jnp.maximum(temperature, 1e-6).astype(wide.dtype)
    ordered, order = jax.lax.top_k(warm, min(top_k or warm.shape[-1], warm.shape[-1]))
    chances = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(chances, axis=-1) - chances
    rank = jnp.arange(ordered.shape[-1])[None]
    likely = (before < top_p) | (rank == 0) | (top_p >= 1)  # a rounded sum reaches 1 too early
    drawn = jax.vmap(jax.random.categorical)(keys, jnp.where(likely, ordered, -jnp.inf))
    drawn = jnp.where(temperature > 0, drawn, 0)  # the first is the likeliest
    tokens = jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0]
    nothing = jnp.zeros(warm.shape, bool)
    candidates = jnp.put_along_axis(nothing, order, likely, axis=-1, inplace=False)
    return Draw(tokens, warm, candidates)


def candidate_log_probs(
    logits: Float[Array, "*b v"],
    tokens: Int[Array, "*b"],
    candidates: Bool[Array, "*b v"] | None = None,
) -> Float[Array, "*b"]:
    """Return the log probability of each token among its candidates; None: among all tokens."""
    if candidates is not None:
        logits = jnp.where(candidates, logits, -jnp.inf)
    return -cross_entropy_per_label(logits, tokens)


@runtime_checkable
class IncrementalModel(Protocol):
    """A model with a cache of the tokens so far, such as `Transformer.build()` returns."""

    @property
    def context(self) -> int:
        """Most tokens that the model reads at once."""
        ...

    def empty(self, params: Params, rows: int, /) -> Any:
        """Return the cache before the first token."""
        ...

    def extend(
        self, params: Params, cache: Any, tokens: Int[Array, "b t"], at: Int[Array, ""], /
    ) -> tuple[Float[Array, "b v"], Any]:
        """Return the logits after `tokens`, whose first position is `at`, and the cache."""
        ...


@plain_numbers
def generate(
    model: IncrementalModel,
    params: Params,
    prompt: Integer[Array, "b p"],
    key: Keys,
    *,
    steps: int,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int = 0,
    top_p: float | Float[Array, ""] = 1.0,
) -> Int[Array, "b n"]:
    """Return the prompt and `steps` tokens drawn after it, b p + steps.

    The model reads the prompt at once, then draws a token a step by `jtrain.models.generate.draw`,
    with a key for each row and position. When the text fills the context, the model reads the last
    half of the context again and continues: a token sees between half the context and all of it.
    Compiles once for a model, a shape, a number of steps and a `top_k`.

    Args:
        key: one, from which each row gets its own by its place; or those of the rows, so that a
            row's draws are the same in any batch.

    Raises:
        ConfigError: if the prompt is empty or no rows of tokens, the key is of the old kind, or a
            number is out of its range.
    """
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    return _check_and_generate(model, params, prompt, key, steps, sampling, record=())[0]


class Sample(NamedTuple):
    """Texts, and the distributions that their tokens were drawn from."""

    text: Int[Array, "b n"]
    log_probs: Float[Array, "b s"]
    """Log probabilities of the tokens that were drawn, each among its candidates."""
    candidates: Bool[Array, "b s v"] | None
    """Tokens that could have been drawn; None: all, as `top_k` and `top_p` leave none out."""


@plain_numbers
def generate_with_log_probs(
    model: IncrementalModel,
    params: Params,
    prompt: Integer[Array, "b p"],
    key: Keys,
    *,
    steps: int,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Sample:
    """Return the text of `generate`, with the log probability by which each token was drawn.

    Arguments and errors are those of `generate`, with at least one step.
    """
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    record = ("log_probs", "candidates") if top_k or top_p < 1 else ("log_probs",)
    text, found = _check_and_generate(model, params, prompt, key, steps, sampling, record)
    return Sample(text, found["log_probs"], found.get("candidates"))


def _check_and_generate(model, params, prompt, key, steps, sampling, record):
    _check(prompt, key)
    _check_sampling(steps, **sampling)
    # As int32, or int64: a drawn token may not fit the type of a prompt.
    prompt = prompt.astype(jnp.promote_types(prompt.dtype, jnp.int32))
    if steps == 0 and not record:
        return prompt, {}
    numbers = {name: jnp.float32(sampling[name]) for name in ("temperature", "top_p")}
    how = {"steps": steps, "top_k": sampling["top_k"], "sampling": numbers, "record": record}
    return _generate(model, params, prompt, key, **how)


@functools.partial(jax.jit, static_argnames=("model", "steps", "top_k", "record"))
def _generate(model, params, prompt, key, *, steps, top_k, sampling, record):
    """Return the text, and the fields of Sample that `record` names, by name."""
    (rows, start), context = prompt.shape, model.context
    half = context - context // 2
    text = jnp.zeros((rows, start + steps), prompt.dtype).at[:, :start].set(prompt)

    def read(text, first, count):
        """Return the cache of `count` tokens from `first` on, and the logits after them."""
        window = jax.lax.dynamic_slice_in_dim(text, first, count, axis=1)
        return *model.extend(params, model.empty(params, rows), window, jnp.int32(0)), first

    def grow(present, carry):
        text, found, logits, cache, first = carry
        drawn = draw(logits, _keys_at(key, present, rows), top_k=top_k, **sampling)
        token = drawn.tokens.astype(text.dtype)[:, None]
        text = jax.lax.dynamic_update_slice_in_dim(text, token, present, axis=1)
        candidates = drawn.candidates if "candidates" in record else None
        new = {
            "log_probs": candidate_log_probs(drawn.logits, drawn.tokens, candidates),
            "candidates": candidates,
        }
        for name in record:
            found = {**found, name: found[name].at[:, present - start].set(new[name])}

        def extend(_):
            return *model.extend(params, cache, token, present - first), first

        if start + steps <= context:  # the context never fills
            return text, found, *extend(None)
        full = present - first == context
        reread = lambda _: read(text, present + 1 - half, half)
        return text, found, *jax.lax.cond(full, reread, extend, None)

    length = min(start, context)
    logits, cache, first = read(text, jnp.int32(start - length), length)
    room = {
        "log_probs": jnp.zeros((rows, steps), at_least_f32(logits).dtype),
        "candidates": jnp.zeros((rows, steps, logits.shape[-1]), bool),
    }
    carry = text, {name: room[name] for name in record}, logits, cache, first
    return jax.lax.fori_loop(start, start + steps, grow, carry)[:2]


def _keys_at(key: Keys, position: Int[Array, ""] | int, rows: int) -> Shaped[Array, "b"]:
    key = threefry(key)
    if key.ndim:
        return jax.vmap(jax.random.fold_in, (0, None))(key, position)
    return jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.fold_in(key, position), jnp.arange(rows)
    )


def _check_sampling(steps: int, temperature: Any, top_k: int, top_p: Any) -> None:
    """Raise ConfigError if a number is out of its range; numbers on the device are not read."""
    ranges = {
        "steps": (steps, steps >= 0, "0 or more"),
        "temperature": (temperature, _holds(temperature, lambda x: x >= 0), "0 or more"),
        "top_k": (top_k, top_k >= 0, "0 for all tokens, or how many of the likeliest"),
        "top_p": (top_p, _holds(top_p, lambda x: 0 < x <= 1), "above 0 and at most 1, for all"),
    }
    for name, (value, valid, words) in ranges.items():
        if not valid:
            raise ConfigError(f"generate got {name}={value}. Give {name} {words}.")


def _check(prompt: Any, key: Any) -> None:
    shape, dtype = np.shape(prompt), getattr(prompt, "dtype", None)
    if len(shape) != 2 or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise ConfigError(
            f"the prompt is a {type(prompt).__name__} of shape {list(shape)} and type {dtype}, and "
            f"generate takes an array of whole numbers, a row of tokens for each text. Give "
            f"jnp.asarray(tokens, jnp.int32)[None] for one text."
        )
    if not shape[1]:
        raise ConfigError(
            "the prompt is empty, and a model needs at least one token to continue. Give one: a "
            "line break starts a line."
        )
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ConfigError(
            f"the key is an array of {key.dtype}, as jax.random.PRNGKey makes it, and one cannot "
            f"be told from the keys of the rows. Give jax.random.key(0)."
        )


def _holds(value, condition) -> bool:
    """Check a number on the host; pass arrays, whose values are on the device."""
    return not isinstance(value, int | float) or condition(value)


@functools.partial(jax.jit, static_argnames=("model", "start", "steps", "stop"))
def generate_answers(
    model: IncrementalModel,
    params: Params,
    prompts: Int[Array, "b p"],
    lengths: Int[Array, "b"],
    *,
    start: int,
    steps: int,
    stop: tuple[int, ...] = (),
) -> tuple[Int[Array, "b n"], Int[Array, "b"]]:
    """Return the texts, b p + steps, and where the answer of each ends, its mark included.

    The model reads the first `start` tokens of all prompts at once, then a token a step, that of
    the prompt or the likeliest one, with a cache of keys and values. An answer ends with `stop`, or
    after `steps` tokens, and the loop when all have. Behind the end of an answer a text is 0. A
    row's answer does not depend on the others. Compiles once for a model, a shape and the numbers.

    Args:
        prompts: filled up at the end, with any tokens.
        lengths: tokens of each prompt.
        start: tokens that every prompt has, at least 1.
        steps: most tokens of an answer, at least 1.
        stop: tokens in a row that end an answer; none: it has `steps` tokens.

    Raises:
        ConfigError: if the longest text does not fit the context.
    """
    rows, longest = prompts.shape
    if longest + steps > model.context:
        raise ConfigError(
            f"prompts of {longest} tokens and answers of {steps} make {longest + steps}, and the "
            f"model reads {model.context}. Take shorter prompts, or answers of "
            f"{max(model.context - longest, 0)} tokens."
        )
    padded = jnp.where(jnp.arange(longest)[None] < lengths[:, None], prompts, 0)
    text = jnp.pad(padded, ((0, 0), (0, steps)))
    mark = jnp.asarray(stop, text.dtype)

    def unfinished(carry):
        return (carry[-1] == 0).any()

    def grow(carry):
        present, text, logits, cache, ends = carry
        likeliest = jnp.argmax(logits, axis=-1).astype(text.dtype)
        given = jax.lax.dynamic_index_in_dim(text, present, axis=1, keepdims=False)
        token = jnp.where((present < lengths) | (ends > 0), given, likeliest)
        text = jax.lax.dynamic_update_slice_in_dim(text, token[:, None], present, axis=1)
        answered = present + 1 - lengths
        ended = answered >= steps
        if stop:
            last = jax.lax.dynamic_slice_in_dim(text, present + 1 - len(stop), len(stop), axis=1)
            ended |= (answered >= len(stop)) & (last == mark[None]).all(axis=1)
        ends = jnp.where((ends == 0) & ended, present + 1, ends)
        logits, cache = model.extend(params, cache, token[:, None], present)
        return present + 1, text, logits, cache, ends

    logits, cache = model.extend(params, model.empty(params, rows), text[:, :start], jnp.int32(0))
    carry = jnp.int32(start), text, logits, cache, jnp.zeros(rows, jnp.int32)
    _, text, _, _, ends = jax.lax.while_loop(unfinished, grow, carry)
    return text, ends
