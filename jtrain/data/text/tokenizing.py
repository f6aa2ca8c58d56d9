"""The values of tokenizers."""

from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.text.bpe import learned
from jtrain.data.text.byte_tokenizer import ByteTokenizer
from jtrain.data.text.characters import Vocabulary
from jtrain.data.text.tokenizer import Tokenizer
from jtrain.data.text.tokenizer_file import END, read_tokenizer


@configclass
class ByteTokens:
    """A token a byte of UTF-8."""

    kind: Literal["bytes"] = "bytes"

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer; nothing is read."""
        del texts
        return ByteTokenizer()


@configclass
class CharacterTokens:
    """A token a character."""

    kind: Literal["characters"] = "characters"
    alphabet: str = ""
    """The characters there are; empty: those of the texts."""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer; the texts are read if no alphabet is given."""
        return Vocabulary(self.alphabet or "".join(sorted(set().union(*texts))))


@configclass
class BytePairTokens:
    """Byte pair encoding, learned from the texts."""

    kind: Literal["bpe"] = "bpe"
    vocab: int = Field(default=4096, gt=0)
    """Tokens, the bytes and the end of a document among them."""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer, learned from the texts."""
        return learned(texts, vocab=self.vocab, end=END)


@configclass
class PretrainedTokenizer:
    """A tokenizer that is there already."""

    kind: Literal["file"] = "file"
    path: str
    """A tokenizer.json: of prepared data, or of the package `tokenizers`."""
    end: str = END
    """The token behind every document, where the file does not say."""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer of the file; the texts are not read."""
        del texts
        return read_tokenizer(self.path, end=self.end)


Tokenizing: TypeAlias = Annotated[
    ByteTokens | CharacterTokens | BytePairTokens | PretrainedTokenizer, Field(discriminator="kind")
]
