"""Tokenizers read from files."""

from pathlib import Path
from typing import Any

from jtrain.data.sources.files import find_files
from jtrain.data.text.bpe import BPE
from jtrain.data.text.characters import Vocabulary
from jtrain.data.text.gguf_tokenizer import GGUF, read_gguf_tokenizer
from jtrain.data.text.tokenizer import ByteTokenizer, Tokenizer
from jtrain.errors import DataError
from jtrain.io.regular_files import TooLargeError, read_json

END = "<|endoftext|>"


def read_tokenizer(path: str | Path, *, end: str = END) -> Tokenizer:
    """Read the tokenizer of a file: of `jtrain data prepare`, any tokenizer.json, or a GGUF file.

    Raises:
        DataError: no such file, or no tokenizer in it.
    """
    (path,) = find_files(path)
    if path.suffix == GGUF:
        return read_gguf_tokenizer(path, end=end)
    try:
        parsed = read_json(path)
    except OSError as error:
        raise DataError(
            f"{path} should hold a tokenizer and cannot be read ({error.strerror}). Make it "
            f"readable, or give another file: chmod u+r {path}"
        ) from None
    except TooLargeError as error:
        raise DataError(
            f"{path} should hold a tokenizer as JSON, and {error}. Give a tokenizer.json, or the "
            f"one in a folder that jtrain data prepare wrote."
        ) from None
    except ValueError as error:
        place = getattr(error, "pos", getattr(error, "start", 0))
        raise DataError(
            f"{path} should hold a tokenizer as JSON and is invalid from byte {place} on. "
            f"Give a tokenizer.json, or the one in a folder that jtrain data prepare wrote."
        ) from error
    if not isinstance(parsed, dict):
        raise DataError(
            f"{path} should hold a tokenizer and holds a {type(parsed).__name__}. "
            f"Give a tokenizer.json, or the one in a folder that jtrain data prepare wrote."
        )
    if "kind" in parsed:
        return build_tokenizer(parsed)
    return BPE(parsed, end=end)


def build_tokenizer(description: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer of a description.

    Raises:
        DataError: an unknown kind.
    """
    match description:
        case {"kind": "bytes"}:
            return ByteTokenizer()
        case {"kind": "characters", "characters": str(characters)}:
            return Vocabulary(characters)
        case {"kind": "bpe", "tokenizer": dict(parsed), "end": str(end)}:
            return BPE(parsed, end=end)
    raise DataError(
        f"{description.get('kind')!r} is not a kind of tokenizer; the kinds are bytes, characters "
        f"and bpe. Write the data again: jtrain data prepare FILES --out DIR"
    )
