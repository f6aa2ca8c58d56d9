"""Conversations of rows as OpenAI, transformers, ShareGPT and Alpaca write them."""

import json
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jtrain.data.text.chat_template import ANSWERS, Message
from jtrain.errors import DataError

FIELD = "messages"
# Fields of a row that are part of what a model reads, so a template has to write them.
VALUES = ("tools", "functions", "documents", "images", "videos", "audios")
ROLES = {"human": "user", "observation": "tool"} | dict.fromkeys(
    ("gpt", "chatgpt", "bing", "bard", "function_call"), ANSWERS
)  # of ShareGPT


class Conversation(NamedTuple):
    """Messages, their place, and what a template reads beside them, such as `tools`."""

    messages: list[Message]
    where: str
    values: Mapping[str, Any]


def read_conversation(where: str, row: Any, field: str) -> Conversation:
    """Return the conversation of a row.

    Raises:
        DataError: if the row has another form.
    """
    row = row if isinstance(row, dict) else {type(row).__name__: row}
    names = [field, "conversations", "conversation"] if field == FIELD else [field]
    messages = next((row[n] for n in names if isinstance(row.get(n), list)), None)
    if messages is None and field == FIELD and {"instruction", "output"} <= set(row):
        messages = _alpaca(row)
    if messages is None:
        raise DataError(
            f"{where} has no list of messages in {field!r} (it has {', '.join(row)}). Name the "
            f"field: data.field=NAME."
        )
    messages = [_checked(where, _renamed(where, message)) for message in messages]
    for name in ("system", "system_prompt"):
        first = {"role": "system", "content": row.get(name)}
        if row.get(name) and first not in messages:
            messages.insert(0, _checked(where, first))
    values = {name: row[name] for name in VALUES if row.get(name)}
    if isinstance(values.get("tools"), str):
        values["tools"] = _parsed(where, "tools", values["tools"], list)
    values |= row.get("chat_template_kwargs") or {}
    return Conversation(messages, where, values)


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    question = "\n".join(row[n] for n in ("instruction", "input") if row.get(n))
    pairs = [*(row.get("history") or []), (question, row["output"])]
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", ANSWERS), pair, strict=True)
    ]


def _renamed(where: str, message: Any) -> Any:
    """Return a message of ShareGPT, with `from` and `value`, as one with `role` and `content`."""
    if not isinstance(message, dict) or not {"from", "value"} <= set(message):
        return message
    rest = {n: value for n, value in message.items() if n not in ("from", "value")}
    role, text = message["from"], message["value"]
    if role == "function_call":
        call = _parsed(where, role, text, dict)
        return {"role": ANSWERS, "tool_calls": [{"type": "function", "function": call}], **rest}
    return {"role": ROLES.get(role, role), "content": text, **rest}


def _checked(where: str, message: Any) -> Message:
    known = isinstance(message, dict) and isinstance(message.get("role"), str)
    content = message.get("content") if known else None
    parts = content if isinstance(content, list) else []
    empty = content is None and not any(message[n] for n in set(message) - {"role"}) if known else 0
    if not known or empty or not isinstance(content, str | list | None):
        raise DataError(
            f"{where} has the message {reprlib.repr(message)}, and each needs a `role` and a "
            f"`content`, both text."
        )
    for part in parts:
        if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            raise DataError(
                f"{where} has content with the part {reprlib.repr(part)}, and a model of text "
                f'reads parts of text alone, {{"type": "text", "text": "..."}}. Remove it.'
            )
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(arguments := function.get("arguments"), str):
            _parsed(where, "arguments", arguments, dict)
    return message


def _parsed(where: str, name: str, text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError, TypeError):
        value = None
    if not isinstance(value, kind):
        noun = "a list" if kind is list else "an object"
        raise DataError(
            f"{where} has {name!r} that are not {noun} of JSON: {reprlib.repr(text)}. Correct or "
            f"remove them."
        )
    return value
