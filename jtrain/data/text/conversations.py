"""Conversations in files, as rows of tokens with the answers marked."""

import contextlib
import dataclasses
import datetime
import json
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.sources.arrays import hold_out_last
from jtrain.data.sources.parquet import iterate_rows
from jtrain.data.text.chat_template import (
    ANSWERS,
    NO_VALUES,
    ChatTemplate,
    Message,
    Values,
    read_template,
)
from jtrain.data.text.corpora import Corpus
from jtrain.data.text.token_rows import Packed
from jtrain.data.text.tokenizer_file import GGUF, read_header, read_tokenizer
from jtrain.data.text.tokenizers import HALF_PAIR, SURROGATE, ByteTokenizer, Tokenizer
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
        form = f"is not a row of OpenAI, transformers, ShareGPT or Alpaca ({error}). Correct it."
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
        raise ValueError(f"{name!r} is not a {kind.__name__}: {reprlib.repr(value)}")
    return value


class Encoded(NamedTuple):
    """A conversation as tokens."""

    where: str
    tokens: np.ndarray  # int64, n
    answers: np.ndarray  # bool, n


def encode_conversation(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    where: str = "",
    values: Values = NO_VALUES,
    *,
    optional: Collection[str] = (),
) -> Encoded:
    """Return the tokens of a conversation; each part is encoded alone, so that no token is of two.

    The text may leave out the fields that are `optional`.

    Raises:
        DataError: if it has no answer, a message spells out a special token, or the template
            refuses it or leaves out a field.
    """
    try:
        messages = template.adapt(messages)
        check_plain(tokenizer, messages, values)
        pieces = template.pieces(messages, values, optional=optional)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    numbers = [tokenizer.encode(piece.text, special=True).astype(np.int64) for piece in pieces]
    answers = [np.full(len(n), piece.is_answer) for n, piece in zip(numbers, pieces, strict=True)]
    return Encoded(where, np.concatenate(numbers), np.concatenate(answers))


def split_last_answer(conversation: Encoded) -> tuple[np.ndarray, np.ndarray]:  # n, m
    """Return the tokens before the last answer of a conversation, and those of the answer."""
    last = int(np.flatnonzero(conversation.answers)[-1]) + 1
    before = conversation.answers[:last][::-1]
    first = last - (int(np.argmin(before)) if not before.all() else last)
    return conversation.tokens[:first], conversation.tokens[first:last]


def end_of_turn(tokenizer: Tokenizer, template: ChatTemplate) -> np.ndarray:  # n
    """Return the tokens of the mark that a template writes after an answer.

    There are none if the template has no mark, or refuses a question and its answer.
    """
    answer = "seven"  # no mark has it, as a digit may be in one
    talk = [{"role": "user", "content": "3+4?"}, {"role": ANSWERS, "content": answer}]
    try:
        text = "".join(piece.text for piece in template.pieces(talk))
        _, _, mark = text.rpartition(answer)
        return tokenizer.encode(mark.strip(), special=True)
    except DataError:
        return np.zeros(0, np.uint16)


def check_plain(
    tokenizer: Tokenizer, messages: Sequence[Message], values: Values = NO_VALUES
) -> None:
    """Raise DataError if a message, or a value beside them, would be read as more than plain text.

    A message with a template's own marks could end its turn and begin another one.

    Raises:
        DataError: if a text of a message spells out a special token, or is not of whole characters.
    """
    special = _special_tokens(tokenizer)
    named = [(f"message {i} of the {m['role'][:40]!r}", m) for i, m in enumerate(messages, 1)]
    for name, content in [*named, ("what the row has beside its messages", values)]:
        for text in _texts(content):
            if SURROGATE.search(text):
                raise DataError(f"{name} {HALF_PAIR}. Remove it.")
            if mark := _special_in(tokenizer, special, text):
                raise DataError(
                    f"{name} spells out {mark}, which would be read as that token and not as text. "
                    f"Remove it, or write it with a blank after its first character."
                )


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of a message or a value, nested ones included."""
    rest: list[Any] = [value]  # no recursion: a file may nest to its limit
    while rest:
        match rest.pop():
            case str(text):
                yield text
            case dict(entries):
                rest += [*entries, *entries.values()]
            case list(entries):
                rest += entries


def _special_tokens(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    added = tokenizer.description().get("tokenizer", {}).get("added_tokens", [])
    return [one for one in added if one.get("special")]


def _special_in(tokenizer: Tokenizer, special: list[dict[str, Any]], text: str) -> str:
    """Return the special token that is read in a text, or nothing."""
    found = [one["content"] for one in special if one["content"] in text]
    # Such tokens are found in any spelling that the tokenizer's normalizer makes equal.
    possible = found or any(one.get("normalized") for one in special)
    if not possible or np.array_equal(tokenizer.encode(text), tokenizer.encode(text, special=True)):
        return ""
    return f"the special token {max(found, key=len)}" if found else "a special token"


class ChatRows(Packed):
    """Rows of `Packed` with `answer` (bool, b t+1): which tokens are of an answer."""

    def __init__(self, conversations: Sequence[Encoded], *, context: int):
        both = [2 * one.tokens + one.answers for one in conversations]  # one array, one packing
        ends = np.cumsum([0, *map(len, both)])
        super().__init__(np.concatenate(both), context=context, documents=ends)
        self.conversations = conversations

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        rows = super().__getitem__(indices)
        return {**rows, "tokens": rows["tokens"] >> 1, "answer": (rows["tokens"] & 1).astype(bool)}


@configclass
class Chat:
    """Conversations, of which a model learns the answers."""

    kind: Literal["chat"] = "chat"
    path: str | list[str]
    """JSON lines or Parquet files, a pattern or a list of them; relative to the working folder."""
    field: str = FIELD
    """The field with a conversation's messages, each with a `role` and a `content`. By default also
    rows of ShareGPT (`conversations`) and of Alpaca (`instruction`, `output`) are read."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share of the conversations, the last ones, that is held out for validation."""
    context: int = Field(default=256, gt=0)
    """Context length in tokens."""
    truncate: Literal["refuse", "cut"] = "refuse"
    """Policy for a conversation longer than the context: an error that counts them, or its first
    tokens, as long as they have some of an answer."""
    tokenizer: str = ""
    """A tokenizer.json or a GGUF file; empty: bytes, or that of the GGUF file in model.from."""
    template: str = ""
    """A file with a template of jinja2, or a tokenizer_config.json or GGUF file that has one;
    empty: ChatML, or that of the GGUF file in model.from."""
    day: str = Field(default="", pattern=r"^(\d{4}-\d\d-\d\d)?$")
    """Date for a template that writes that of today by `strftime_now`, as 2026-11-27."""
    ignore: list[str] = Field(default_factory=list)
    """Fields of messages and rows, such as `name` or `tools`, that the text may leave out. Any
    other that the template does not write is an error."""

    def with_gguf(self, path: str) -> Self:
        """Return the data with the tokenizer and the template of a GGUF file, where none is named.

        Another path changes nothing.
        """
        if not path.endswith(GGUF) or (self.tokenizer and not Path(path).exists()):
            return self  # a stored config outlives the file
        known = "tokenizer.chat_template" in read_header(Path(path))
        template = self.template or (path if known else "")
        return dataclasses.replace(self, tokenizer=self.tokenizer or path, template=template)

    def build(self) -> Corpus:
        """Read and encode the conversations, and split them in two.

        Raises:
            DataError: if a file has none or one of another form, one has no answer, or one is
                longer than the context.
        """
        tokenizer = read_tokenizer(self.tokenizer) if self.tokenizer else ByteTokenizer()
        template = self._template()
        if "strftime_now" in template.source and not self.day:
            today = datetime.date.today()
            raise DataError(
                f"{self.template} writes the date of today, so a run that is resumed tomorrow "
                f"would read other texts. Set the date: data.day={today}"
            )
        found = [
            encode_conversation(tokenizer, template, *one, optional=self.ignore)
            for one in read_conversations(self.path, self.field)
        ]
        fit = self._truncated(found)
        parts = hold_out_last(fit, self.validation, where=self.path, noun="conversation")
        train, validation = (ChatRows(part, context=self.context) for part in parts)
        return Corpus(train, validation, tokenizer)

    def encode_prompt(self, tokenizer: Tokenizer, text: str) -> np.ndarray:  # n
        """Return the tokens that a model reads before its answer to a user's message.

        Raises:
            DataError: if the text spells out a special token, or the template refuses it.
        """
        messages = [{"role": "user", "content": text}]
        check_plain(tokenizer, messages)
        return tokenizer.encode(self._template().render(messages, prompt=True), special=True)

    def end_of_turn(self, tokenizer: Tokenizer) -> np.ndarray:  # n
        """Return the tokens that end an answer; none if the template has no mark for it."""
        return end_of_turn(tokenizer, self._template())

    def _template(self) -> ChatTemplate:
        return read_template(self.template, self.day)

    def _truncated(self, found: list[Encoded]) -> list[Encoded]:
        room = self.context + 1
        cut = [Encoded(one.where, one.tokens[:room], one.answers[:room]) for one in found]
        long = [one for one in found if len(one.tokens) > room]
        unanswered = [one for one in cut if not one.answers[1:].any()]
        if not long or (self.truncate == "cut" and not unanswered):
            return cut
        longest = max(long, key=lambda one: len(one.tokens))
        every, rest = (sum(int(one.answers.sum()) for one in of) for of in (found, cut))
        advice = (
            f"data.truncate=cut, which leaves out {every - rest:,} of {every:,} tokens of answers"
        )
        if unanswered:
            advice = f"leave out those with no answer in the context, such as {unanswered[0].where}"
        raise DataError(
            f"{len(long)} of {len(found)} conversations are longer than data.context="
            f"{self.context}, the longest {len(longest.tokens)} tokens ({longest.where}). Set "
            f"data.context={len(longest.tokens) - 1}, or {advice}."
        )


def read_conversations(path: str | list[str], field: str) -> Iterator[Conversation]:
    """Yield each conversation of files, with its place, `FILE:LINE`.

    Raises:
        DataError: if one has another form.
    """
    for where, row in iterate_rows(path, noun="conversation"):
        yield read_conversation(where, row, field)
