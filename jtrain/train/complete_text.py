"""What an experiment writes: a prompt as tokens, and the text of what follows."""

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


def writes(build: Callable[[], IncrementalModel], tokenizer: Tokenizer) -> Complete:
    """An experiment's `complete`: the prompt and what follows.

    An empty prompt is the end of another document; where the tokenizer has none a new line, and
    where it does not know that either its first token.

    Args:
        build: the model for one row of text, which is laid out nowhere; called when it is needed.
        tokenizer: of the model's data; tokens that it does not have are left out of the text.
    """
    model = functools.cache(build)

    def complete(params: Params, extra: Extra, key: Key, prompt: Prompt) -> str:
        del extra
        begun = tokenizer.encode(prompt.text) if prompt.text else _nothing(tokenizer)
        tokens = generate(
            model(),
            params,
            jnp.asarray(begun, jnp.int32)[None],
            key,
            steps=prompt.tokens,
            temperature=prompt.temperature,
            top_k=prompt.top_k,
            top_p=prompt.top_p,
        )
        known = jax.device_get(tokens)[0]
        return tokenizer.decode(known[known < len(tokenizer)])

    return complete


def _nothing(tokenizer: Tokenizer) -> Sequence[int] | np.ndarray:
    """What stands for an empty prompt."""
    if tokenizer.end is not None:
        return [tokenizer.end]
    try:
        return tokenizer.encode("\n")
    except DataError:
        return [0]
