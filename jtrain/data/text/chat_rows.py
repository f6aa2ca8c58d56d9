"""Conversations of rows as OpenAI, transformers, ShareGPT and Alpaca write them."""

import contextlib
import json
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jtrain.data.text.chat_template import ANSWERS, Message, Values
from jtrain.errors import DataError

FIELD = "messages"
# Fields of a row that a model reads, so that a template has to write them.
VALUES = ("tools", "functions", "documents", "images", "videos", "audios")
ROLES = {"human": "user", "observation": "tool"} | dict.fromkeys(
    ("gpt", "chatgpt", "bing", "bard"), ANSWERS
)  # of ShareGPT


class Conversation(NamedTuple):
    """Messages, their place, and what a template reads beside them, such as `tools`."""

    messages: list[Message]
    where: str
    values: Values


def read_conversation(where: str, row: Any, field: str) -> Conversation:
    """Return the conversation of a row.

    Raises:
        DataError: if the row has another form.
    """
    row = row if isinstance(row, dict) else {type(row).__name__: row}
    names = [field, "conversations", "conversation"] if field == FIELD else [field]
    messages = next((row[n] for n in names if isinstance(row.get(n), list)), None)
    try:
        if messages is None and field == FIELD and {"instruction", "output"} <= set(row):
            messages = _alpaca(row)
        if messages is None:
            raise DataError(
                f"has no list of messages in {field!r} (it has {', '.join(row)}). Name the field: "
                f"data.field=NAME."
            )
        messages = [_checked(_renamed(message)) for message in messages]
        for name in ("system", "system_prompt"):
            first = {"role": "system", "content": row.get(name)}
            if row.get(name) and first not in messages:
                messages.insert(0, _checked(first))
        values = {name: row[name] for name in VALUES if row.get(name)}
        if "tools" in values:
            values["tools"] = _parsed("tools", values["tools"], list)
        values |= _parsed("chat_template_kwargs", row.get("chat_template_kwargs") or {}, dict)
    except (AttributeError, TypeError, ValueError) as error:
        form = f"is no row of OpenAI, transformers, ShareGPT or Alpaca ({error}). Correct it."
        raise DataError(f"{where} {error if isinstance(error, DataError) else form}") from None
    return Conversation(messages, where, values)


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    question = "\n".join(row[n] for n in ("instruction", "input") if row.get(n))
    return [
        {"role": role, "content": text}
        for pair in [*(row.get("history") or []), (question, row["output"])]
        for role, text in zip(("user", ANSWERS), pair, strict=True)
    ]


def _renamed(message: Any) -> Any:
    """Return a message of ShareGPT, with `from` and `value`, as one with `role` and `content`."""
    if not isinstance(message, dict) or not {"from", "value"} <= set(message):
        return message
    rest = {n: value for n, value in message.items() if n not in ("from", "value")}
    role, text = message["from"], message["value"]
    if role == "function_call":
        call = {"type": "function", "function": _parsed(role, text, dict)}
        return {"role": ANSWERS, "tool_calls": [call], **rest}
    return {"role": ROLES.get(role, role), "content": text, **rest}


def _checked(message: Any) -> Message:
    known = isinstance(message, dict) and isinstance(message.get("role"), str)
    content = message.get("content") if known else 0
    if not isinstance(content, str | list | None) or not any(
        value for name, value in message.items() if name != "role" or content is not None
    ):
        raise DataError(
            f"has the message {reprlib.repr(message)}, and each needs a `role` and a `content`, "
            f"both text."
        )
    for part in content if isinstance(content, list) else []:
        if not str(part.get("type")).endswith("text") or not isinstance(part.get("text"), str):
            raise ValueError(f"a model of text reads no part {reprlib.repr(part)}")
    if not (calls := message.get("tool_calls")):
        return message
    calls = _parsed("tool_calls", calls, list)
    for call in calls:
        _parsed("arguments", call.get("function", call).get("arguments") or {}, dict)
    return {**message, "tool_calls": calls}


def _parsed(name: str, value: Any, kind: type) -> Any:
    """Return a value that may be written as JSON."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, kind):
        raise ValueError(f"{name!r} is no {kind.__name__}: {reprlib.repr(value)}")
    return value
