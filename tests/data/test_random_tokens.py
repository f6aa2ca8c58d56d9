"""Random tokens: uniform, with a vocabulary of numbers."""

import numpy as np
import pytest

from jtrain.data.text.random_tokens import UniformTokens
from jtrain.data.text.tokenizer import Tokenizer
from jtrain.errors import DataError


def test_every_token_is_about_equally_frequent():
    rows = UniformTokens(vocab=16, context=63, rows=512).build().train
    tokens = rows[np.arange(512)]["tokens"]
    assert tokens.shape == (512, 64)
    count = np.bincount(tokens.ravel(), minlength=16)
    spread = np.sqrt(512 * 64 / 16)
    assert len(count) == 16
    assert np.abs(count - 512 * 64 / 16).max() < 5 * spread


def test_its_tokens_are_written_as_numbers():
    vocabulary = UniformTokens(vocab=16).build().vocabulary
    assert isinstance(vocabulary, Tokenizer)
    assert vocabulary.decode(vocabulary.encode("3 15 0")) == "3 15 0"
    for text in ("sixteen", "3 16"):
        with pytest.raises(DataError, match=r"the numbers 0 to 15\. Write numbers with blanks"):
            vocabulary.encode(text)
