"""What an experiment writes: a prompt as tokens, and the text of what follows."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jtrain.data.tokenizer import Tokenizer
from jtrain.experiment import Prompt
from jtrain.models.generate import Extends, generate
from jtrain.types import Extra, Key, Params

Complete: TypeAlias = Callable[[Params, Extra, Key, Prompt], str]


def writes(build: Callable[[], Extends], tokenizer: Tokenizer) -> Complete:
    """An experiment's `complete`: the prompt, a new line if it is empty, and what follows.

    Args:
        build: the model for one row of text, which is laid out nowhere; called when it is needed.
        tokenizer: of the model's data; tokens that it does not have are left out of the text.
    """
    model = functools.cache(build)

    def complete(params: Params, extra: Extra, key: Key, prompt: Prompt) -> str:
        del extra
        begun = jnp.asarray(tokenizer.encode(prompt.text or "\n"), jnp.int32)[None]
        tokens = generate(
            model(),
            params,
            begun,
            key,
            steps=prompt.tokens,
            temperature=prompt.temperature,
            top_k=prompt.top_k,
            top_p=prompt.top_p,
        )
        known = jax.device_get(tokens)[0]
        return tokenizer.decode(known[known < len(tokenizer)])

    return complete
