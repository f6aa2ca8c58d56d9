"""Conversations as tokens: a template's marks are special tokens, and messages have none."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jtrain.data.text.chat_template import ANSWERS, NO_VALUES, ChatTemplate, Message, Values
from jtrain.data.text.tokenizer import HALF_PAIR, SURROGATE, Tokenizer
from jtrain.errors import DataError


class Encoded(NamedTuple):
    """A conversation as tokens."""

    where: str
    tokens: np.ndarray  # int64, n
    answers: np.ndarray  # bool, n


def encode(
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


def encode_prompt(tokenizer: Tokenizer, template: ChatTemplate, text: str) -> np.ndarray:  # n
    """Return the tokens that a model reads before its answer to a user's message.

    Raises:
        DataError: if the text spells out a special token, or the template refuses it.
    """
    messages = [{"role": "user", "content": text}]
    check_plain(tokenizer, messages)
    return tokenizer.encode(template.render(messages, prompt=True), special=True)


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
