"""Tokenizers of files: JSON, or the header of a GGUF file, which also has a chat template."""

import functools
from pathlib import Path
from typing import Any

from jtrain.data.sources.files import find_files
from jtrain.data.text.tokenizers import BPE, ByteTokenizer, Tokenizer, Vocabulary
from jtrain.errors import DataError
from jtrain.io import gguf_header
from jtrain.io.hub import local_folder
from jtrain.io.regular_files import read_json

GGUF = ".gguf"
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens
# How llama.cpp splits words, by `tokenizer.ggml.pre`; `digits` is how many stand together.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [],
    "smollm": [{"type": "Digits", "individual_digits": True}],
} | {
    name: [{"type": "Split", "behavior": "Isolated", "invert": False,
            "pattern": {"Regex": WORDS.format(digits=digits)}}]
    for name, digits in {"llama-bpe": "{1,3}", "llama3": "{1,3}", "qwen2": ""}.items()
}  # fmt: skip


def read_gguf_tokenizer(path: Path, *, end: str) -> BPE:
    """Return the tokenizer of a GGUF file.

    Raises:
        DataError: if the file is broken, or its tokenizer is not a BPE over bytes with known words.
    """
    header = read_header(path)
    model, pre = header.get("tokenizer.ggml.model"), header.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in SPLITS:
        raise DataError(
            f"{path} has the tokenizer {model!r} with words as {pre!r}, and of GGUF files jtrain "
            f"reads 'gpt2' with {', '.join(SPLITS)}. Name the file of the model's folder: "
            f"FOLDER/tokenizer.json"
        )
    tokens = header.get("tokenizer.ggml.tokens", [])
    kinds = header.get("tokenizer.ggml.token_type", [])
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, "special": bool(kind == CONTROL), **form}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (CONTROL, USER_DEFINED)
    ]
    over_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    words = {**over_bytes, "use_regex": "Split" not in str(SPLITS[pre])}
    parsed = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*SPLITS[pre], words]},
        "decoder": {**over_bytes, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": dict(zip(tokens, range(len(tokens)), strict=True)),
            "merges": header.get("tokenizer.ggml.merges", []),
            "ignore_merges": pre.startswith("llama"),
        },
    }
    return BPE(parsed, end=end)


def read_header(path: Path) -> dict[str, Any]:
    """Return what the header of a GGUF file says of its tokenizer; that of the newest is cached.

    Raises:
        DataError: if the file cannot be read, or is not a GGUF file.
    """
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Name another file.") from None
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"{path} is not a complete GGUF file ({error}). Download it again."
        ) from None


@functools.lru_cache(maxsize=1)
def _read(path: Path, changed: int) -> dict[str, Any]:
    del changed
    data = gguf_header.map_bytes(path)
    header = gguf_header.read_header(data)
    names = [name for name in header.metadata if name.startswith("tokenizer.")]
    return {name: gguf_header.read_value(data, header, name) for name in names}


END = "<|endoftext|>"


def read_tokenizer(path: str | Path, *, end: str = END) -> Tokenizer:
    """Read the tokenizer of a file: of `jtrain data prepare`, any tokenizer.json, or a GGUF file.

    In place of a tokenizer.json stands its folder too, or the name of a model on the Hub.

    Raises:
        DataError: no such file, or no tokenizer in it.
    """
    (path,) = find_files(model_file(str(path), "tokenizer.json"))
    if path.suffix == GGUF:
        return read_gguf_tokenizer(path, end=end)
    try:
        parsed = read_json(path)
        if not isinstance(parsed, dict):
            raise ValueError(f"it holds a {type(parsed).__name__}")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} should hold a tokenizer as JSON and cannot be read: {error}. Give a "
            f"tokenizer.json, or the one in a folder that jtrain data prepare wrote."
        ) from None
    if "kind" in parsed:
        return build_tokenizer(parsed)
    return BPE(parsed, end=end)


def model_file(path: str, *names: str) -> str:
    """Return a path; the first of these files there is, if it is a folder or a name on the Hub."""
    folder = local_folder(path, weights=False)
    if not folder.is_dir():
        return path
    return str(next((folder / n for n in names if (folder / n).is_file()), folder))


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
