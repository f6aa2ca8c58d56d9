"""Completion: the tokens that a prompt stands for, and where a continuation ends."""

from typing import Any

import jax
import numpy as np
import pytest

from jtrain import Prompt
from jtrain.data.text.characters import Vocabulary
from jtrain.data.text.tokenizer import ByteTokenizer, Tokenizer
from jtrain.train import complete_text
from jtrain.train.complete_text import make_complete

NO_MODEL: Any = None  # `generate` is replaced


@pytest.mark.parametrize(
    ("tokenizer", "text", "begun"),
    [
        (ByteTokenizer(), "ab", [97, 98]),
        (ByteTokenizer(), "", [256]),
        (Vocabulary("ab\n"), "", [0]),
        (Vocabulary("\tab\n"), "", [1]),
        (Vocabulary("ab"), "", [0]),
    ],
)
def test_an_empty_prompt_is_what_a_text_may_begin_with(
    tokenizer: Tokenizer, text: str, begun: list[int], monkeypatch: pytest.MonkeyPatch
):
    seen = []
    monkeypatch.setattr(
        complete_text,
        "generate",
        lambda model, params, begun, *_, **__: seen.append(begun) or begun,
    )
    complete = make_complete(lambda: NO_MODEL, tokenizer)
    complete({}, (), jax.random.key(0), Prompt(text=text))
    np.testing.assert_array_equal(seen[0], [begun])


@pytest.mark.parametrize(
    ("stop", "text"),
    [("", "a.b.c.d"), (".", "a.b."), ("c.", "a.b.c."), ("a", "a.b.c.d"), ("d.", "a.b.c.d")],
)
def test_a_continuation_ends_with_the_tokens_to_stop_at(
    stop: str, text: str, monkeypatch: pytest.MonkeyPatch
):
    bytes_of = ByteTokenizer()
    row = bytes_of.encode("a.b.c.d")[None]
    monkeypatch.setattr(complete_text, "generate", lambda *_, **__: row)
    encode = lambda prompt: bytes_of.encode(f"{prompt}.")
    complete = make_complete(lambda: NO_MODEL, bytes_of, encode=encode, stop=bytes_of.encode(stop))
    assert complete({}, (), jax.random.key(0), Prompt(text="a")) == text
