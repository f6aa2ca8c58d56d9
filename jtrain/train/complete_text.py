"""Text completion: an experiment's `complete`, which continues a prompt."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.types import Extra, Key, Params
from jtrain.data.text.tokenizer import Tokenizer
from jtrain.errors import DataError
from jtrain.models.generate import IncrementalModel, generate
from jtrain.train.experiment import Prompt

Complete: TypeAlias = Callable[[Params, Extra, Key, Prompt], str]


def make_complete(build: Callable[[], IncrementalModel], tokenizer: Tokenizer) -> Complete:
    """Return an experiment's `complete`, which gives the prompt and its continuation.

    An empty prompt stands for the end of a document; if the tokenizer has no such token, for a new
    line, or else for its first token.

    Args:
        build: makes the model for one row of text, without a sharding; called at the first use.
        tokenizer: of the model's data; unknown tokens are omitted from the text.
    """
    model = functools.cache(build)

    def complete(params: Params, extra: Extra, key: Key, prompt: Prompt) -> str:
        del extra
        start = tokenizer.encode(prompt.text) if prompt.text else _empty_prompt(tokenizer)
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
        row = jax.device_get(tokens)[0]
        return tokenizer.decode(row[row < len(tokenizer)])

    return complete


def _empty_prompt(tokenizer: Tokenizer) -> Sequence[int] | np.ndarray:
    """Return the tokens that stand for an empty prompt."""
    if tokenizer.end is not None:
        return [tokenizer.end]
    try:
        return tokenizer.encode("\n")
    except DataError:
        return [0]
