"""Text completion: an experiment's `complete`, which continues a prompt."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.types import Extra, Key, Params
from jtrain.data.text.tokenizers import Tokenizer, decode_known
from jtrain.errors import DataError
from jtrain.models.generate import IncrementalModel, generate
from jtrain.train.experiment import Prompt

Complete: TypeAlias = Callable[[Params, Extra, Key, Prompt], str]


def make_complete(
    build: Callable[[], IncrementalModel],
    tokenizer: Tokenizer,
    *,
    encode: Callable[[str], np.ndarray] | None = None,
    stop: Sequence[int] | np.ndarray = (),
) -> Complete:
    """Return an experiment's `complete`, which gives the prompt and its continuation.

    An empty prompt stands for the end of a document; if the tokenizer has no such token, for a new
    line, or else for its first token.

    Args:
        build: makes the model for one row of text, without a sharding; called at the first use.
        tokenizer: of the model's data; unknown tokens are omitted from the text.
        encode: returns the tokens that the model reads of a prompt; by default the prompt's own.
        stop: tokens in a row after which the continuation is left out; none: it is of full length.
    """
    model, read = functools.cache(build), encode or tokenizer.encode

    def complete(params: Params, extra: Extra, key: Key, prompt: Prompt) -> str:
        del extra
        start = read(prompt.text) if prompt.text else _empty_prompt(tokenizer)
        tokens = generate(
            model(),
            params,
            jnp.asarray(start, jnp.int32)[None],
            key,
            steps=prompt.tokens,
            temperature=prompt.temperature,
            top_k=prompt.top_k,
            top_p=prompt.top_p,
        )
        row = until_mark(jax.device_get(tokens)[0], np.asarray(stop), len(start))
        return decode_known(tokenizer, row)

    return complete


def until_mark(row: np.ndarray, stop: np.ndarray, begin: int = 0) -> np.ndarray:
    """Return the tokens up to the first `stop` that lies after `begin`, included, or all."""
    if len(stop) and len(row) >= begin + len(stop):
        windows = np.lib.stride_tricks.sliding_window_view(row[begin:], len(stop))
        found = (windows == stop).all(axis=1)
        if found.any():
            return row[: begin + int(found.argmax()) + len(stop)]
    return row


def _empty_prompt(tokenizer: Tokenizer) -> Sequence[int] | np.ndarray:
    """Return the tokens that stand for an empty prompt."""
    if tokenizer.end is not None:
        return [tokenizer.end]
    try:
        return tokenizer.encode("\n")
    except DataError:
        return [0]
