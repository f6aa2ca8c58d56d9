import jax
import numpy as np
import pytest

from jtrain import Prompt
from jtrain.data.text.characters import Vocabulary
from jtrain.data.text.tokenizer import ByteTokenizer, Tokenizer
from jtrain.train import complete_text
from jtrain.train.complete_text import make_complete


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
    complete = make_complete(lambda: None, tokenizer)  # a model that writes nothing
    complete({}, (), jax.random.key(0), Prompt(text=text))
    np.testing.assert_array_equal(seen[0], [begun])
