"""The configs of tokenizers."""

from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.text.tokenizer_file import END, read_tokenizer
from jtrain.data.text.tokenizers import ByteTokenizer, Tokenizer, Vocabulary, train_bpe


@configclass
class ByteTokens:
    """One token a byte of UTF-8."""

    kind: Literal["bytes"] = "bytes"

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """Build the tokenizer; no text is read."""
        del texts
        return ByteTokenizer()


@configclass
class CharacterTokens:
    """One token a character."""

    kind: Literal["characters"] = "characters"
    alphabet: str = ""
    """The characters of the vocabulary; empty: all characters of the texts."""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """Build the tokenizer; the texts are read if no alphabet is given."""
        return Vocabulary(self.alphabet or "".join(sorted(set().union(*texts))))


@configclass
class BytePairTokens:
    """Byte pair encoding, trained on the texts."""

    kind: Literal["bpe"] = "bpe"
    vocab: int = Field(default=4096, gt=0)
    """Vocabulary size, including the bytes and the end-of-document token."""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """Train the tokenizer on the texts."""
        return train_bpe(texts, vocab=self.vocab, end=END)


@configclass
class PretrainedTokenizer:
    """A tokenizer that exists in a file."""

    kind: Literal["file"] = "file"
    path: str
    """A tokenizer.json of prepared data, or of the package `tokenizers`."""
    end: str = END
    """The end-of-document token, if the file names none."""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """Read the tokenizer of the file; the texts are not read."""
        del texts
        return read_tokenizer(self.path, end=self.end)


Tokenizing: TypeAlias = Annotated[
    ByteTokens | CharacterTokens | BytePairTokens | PretrainedTokenizer, Field(discriminator="kind")
]
