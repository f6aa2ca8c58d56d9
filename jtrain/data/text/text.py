"""The values of a data set of text, and what they build."""

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
    """A text to train on, one to judge by, and what the numbers mean."""

    train: Source
    validation: Source  # every target is in it once
    vocabulary: Tokenizer

    def shuffled(self, *, size: int, seed: int) -> Shuffled:
        """What to train on, as batches."""
        return Shuffled(self.train, size=size, seed=seed)

    def in_order(self, *, size: int) -> InOrder:
        """What to judge by, as batches."""
        return InOrder(self.validation, size=size)


def corpus(train: str, validation: str, *, context: int) -> Corpus:
    """Windows of `context` targets over both texts, and the vocabulary of their characters."""
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
    """A UTF-8 file, a pattern (`plays/*.txt`) or a list of them; relative to where you are."""
    context: int = Field(default=64, gt=0)
    """Characters that the model sees at once."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share of the text, at its end, that is kept to judge by."""

    def build(self) -> Corpus:
        """The text, cut in two."""
        text = read_text(self.path)
        kept = round(len(text) * self.validation)
        if kept <= self.context:
            raise DataError(
                f"context {self.context} does not fit validation {self.validation} of {self.path}, "
                f"which is {kept} of its {len(text)} characters. Set context={max(kept - 1, 1)} or "
                f"less, or give more text."
            )
        return corpus(text[:-kept], text[-kept:], context=self.context)
