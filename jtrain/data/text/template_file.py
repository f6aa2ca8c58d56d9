"""Chat templates of files: one of jinja2, or that of a tokenizer_config.json or a GGUF file."""

from pathlib import Path
from typing import Any

from jtrain.data.text.chat_template import CHATML, TOKENS, ChatTemplate
from jtrain.data.text.gguf_tokenizer import GGUF, read_header
from jtrain.errors import DataError
from jtrain.io.regular_files import parse_json, read_bytes

CONFIG = "tokenizer_config.json"
MOST = 1 << 26  # bytes


def read_template(path: str, day: str = "") -> ChatTemplate:
    """Return the template of a file; ChatML for an empty path. A date in it is that of `day`.

    The tokens that it may write come from the GGUF file or the tokenizer_config.json: the file
    itself, or the one beside it.

    Raises:
        DataError: if the file cannot be read, or has no template.
    """
    if not path:
        return ChatTemplate(CHATML)
    name = f"data.template={path}"
    text = "" if path.endswith(GGUF) else _read(Path(path), name)
    if path.endswith((GGUF, ".json")):
        config = _gguf_config(Path(path)) if path.endswith(GGUF) else _parsed(text, name)
        return ChatTemplate(_source(config, name), path, day=day, **_tokens(config, name))
    beside = Path(path).parent / CONFIG
    config = _parsed(_read(beside, str(beside)), str(beside)) if beside.is_file() else {}
    return ChatTemplate(text, path, day=day, **_tokens(config, str(beside)))


def _gguf_config(path: Path) -> dict[str, Any]:
    """Return what a tokenizer_config.json would have of a GGUF file."""
    header = read_header(path)
    tokens = header.get("tokenizer.ggml.tokens", [])
    numbers = {key: header.get(f"tokenizer.ggml.{key}_id") for key in TOKENS}
    known = {key: tokens[i] for key, i in numbers.items() if i is not None and i < len(tokens)}
    return {"chat_template": header.get("tokenizer.chat_template"), **known}


def _read(path: Path, name: str) -> str:
    try:
        return read_bytes(path, most=MOST).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{name} cannot be read: {error}. Name a file in UTF-8 that you may read."
        ) from None


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        config = parse_json(text)
    except ValueError as error:
        raise DataError(
            f"{name} is no JSON: {error}. Take the {CONFIG} of the model, or name a template of "
            f"jinja2 in a file that does not end in .json."
        ) from None
    if not isinstance(config, dict):
        raise DataError(f"{name} has no entries by name. Take the {CONFIG} of the model.")
    return config


def _source(config: dict[str, Any], name: str) -> str:
    """Return the template of a tokenizer_config.json; of several the one named `default`."""
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
        if not isinstance(source, str):
            names = ", ".join(str(key) for key in named) or "nothing"
            raise DataError(
                f"{name} has several chat templates ({names}), and none has the name `default`. "
                f"Write the text of one to a file and name that: data.template=FILE.jinja."
            )
    if not isinstance(source, str):
        raise DataError(
            f"{name} has no chat_template. Leave data.template out for ChatML, or name a file with "
            f"a template."
        )
    return source


def _tokens(config: dict[str, Any], name: str) -> dict[str, str]:
    """Return the tokens that a template may write; null means that the tokenizer has none."""
    found = {}
    for key in TOKENS:
        if key in config:
            entry = config[key]
            value = entry.get("content") if isinstance(entry, dict) else (entry or "")
            if not isinstance(value, str):
                raise DataError(
                    f"{name} has the {key} {str(entry)[:60]}, which is no text. Set it to the "
                    f'token, as in "{key}": "</s>".'
                )
            found[key] = value
    return found
