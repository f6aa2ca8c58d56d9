"""The config of text files as characters, and the corpus that text configs build."""

from typing import Literal, NamedTuple

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.batches.by_step import InOrder, Shuffled
from jtrain.data.sources.source import Source
from jtrain.data.text.characters import Vocabulary, read_text
from jtrain.data.text.tokenizer import Tokenizer
from jtrain.data.text.windows import Windows
from jtrain.errors import DataError


class Corpus(NamedTuple):
    """A training text, a validation text, and the vocabulary of both."""

    train: Source
    validation: Source  # every target occurs once
    vocabulary: Tokenizer

    def shuffled(self, *, size: int, seed: int) -> Shuffled:
        """Return the batches to train on."""
        return Shuffled(self.train, size=size, seed=seed)

    def in_order(self, *, size: int) -> InOrder:
        """Return the batches to validate on."""
        return InOrder(self.validation, size=size)


def build_corpus(train: str, validation: str, *, context: int) -> Corpus:
    """Return windows of `context` targets over both texts, and their vocabulary of characters."""
    vocabulary = Vocabulary("".join(sorted(set(train) | set(validation))))
    return Corpus(
        Windows(vocabulary.encode(train), context=context),
        Windows(vocabulary.encode(validation), context=context, stride=context),
        vocabulary,
    )


@configclass
class Text:
    """Files of text, character by character."""

    kind: Literal["text"] = "text"
    path: str | list[str]
    """A UTF-8 file, a pattern (`plays/*.txt`) or a list of them; relative to the working folder."""
    context: int = Field(default=64, gt=0)
    """Context length in characters."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share of the text, at its end, that is held out for validation."""

    def build(self) -> Corpus:
        """Read the text and split it in two."""
        text = read_text(self.path)
        held_out = round(len(text) * self.validation)
        if held_out <= self.context:
            raise DataError(
                f"context {self.context} does not fit validation {self.validation} of {self.path}, "
                f"which is {held_out} of its {len(text)} characters. Set "
                f"context={max(held_out - 1, 1)} or less, or give more text."
            )
        return build_corpus(text[:-held_out], text[-held_out:], context=self.context)
