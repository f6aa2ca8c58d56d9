"""The values of tokenizers, and tokenizers from the files that keep them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from jtrain.data.bpe import BPE, learned
from jtrain.data.byte_tokenizer import ByteTokenizer
from jtrain.data.characters import Vocabulary
from jtrain.data.files import found
from jtrain.data.tokenizer import Tokenizer
from jtrain.errors import DataError
from jtrain.values import values

END = "<|endoftext|>"


@values
class ByBytes:
    """A token a byte of UTF-8."""

    kind: Literal["bytes"] = "bytes"

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer; nothing is read."""
        del texts
        return ByteTokenizer()


@values
class ByCharacters:
    """A token a character."""

    kind: Literal["characters"] = "characters"
    alphabet: str = ""
    """The characters there are; empty: those of the texts."""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer; the texts are read if no alphabet is given."""
        return Vocabulary(self.alphabet or "".join(sorted(set().union(*texts))))


@values
class ByPairs:
    """Byte pair encoding, learned from the texts."""

    kind: Literal["bpe"] = "bpe"
    vocab: int = Field(default=4096, gt=0)
    """Tokens, the bytes and the end of a document among them."""

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer, learned from the texts."""
        return learned(texts, vocab=self.vocab, end=END)


@values
class FromFile:
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
    ByBytes | ByCharacters | ByPairs | FromFile, Field(discriminator="kind")
]


def read_tokenizer(path: str | Path, *, end: str = END) -> Tokenizer:
    """The tokenizer of a file: one that `jtrain data prepare` wrote, or a tokenizer.json.

    Raises:
        DataError: no such file, or no tokenizer in it.
    """
    (path,) = found(path)
    try:
        parsed = json.loads(path.read_bytes())
    except ValueError as error:
        place = getattr(error, "pos", getattr(error, "start", 0))
        raise DataError(
            f"{path} was to hold a tokenizer as JSON and does not, from byte {place} on. "
            f"Give a tokenizer.json, or the one in a folder that jtrain data prepare wrote."
        ) from error
    if not isinstance(parsed, dict):
        raise DataError(
            f"{path} was to hold a tokenizer and holds a {type(parsed).__name__}. "
            f"Give a tokenizer.json, or the one in a folder that jtrain data prepare wrote."
        )
    if "kind" in parsed:
        return tokenizer_of(parsed)
    return BPE(parsed, end=end)


def tokenizer_of(description: dict[str, Any]) -> Tokenizer:
    """The tokenizer that described itself so.

    Raises:
        DataError: a kind that there is not.
    """
    match description:
        case {"kind": "bytes"}:
            return ByteTokenizer()
        case {"kind": "characters", "characters": str(characters)}:
            return Vocabulary(characters)
        case {"kind": "bpe", "tokenizer": dict(parsed), "end": str(end)}:
            return BPE(parsed, end=end)
    raise DataError(
        f"A tokenizer of kind {description.get('kind')!r} was to be made again, and there is "
        f"bytes, characters and bpe. Write the data again: jtrain data prepare FILES --out DIR"
    )
