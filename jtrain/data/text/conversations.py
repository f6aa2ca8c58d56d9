"""Conversations in files, as rows of tokens with the answers marked."""

import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.sources.json_rows import read_rows
from jtrain.data.sources.subset import hold_out_last
from jtrain.data.text.chat_template import Message
from jtrain.data.text.encode_chat import Encoded, encode, encode_prompt, end_of_turn
from jtrain.data.text.packed import Packed
from jtrain.data.text.template_file import read_template
from jtrain.data.text.text import Corpus
from jtrain.data.text.tokenizer import ByteTokenizer, Tokenizer
from jtrain.data.text.tokenizer_file import read_tokenizer
from jtrain.errors import DataError


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
    field: str = "messages"
    """The field with a conversation's messages, each with a `role` and a `content`."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share of the conversations, the last ones, that is held out for validation."""
    context: int = Field(default=256, gt=0)
    """Context length in tokens."""
    truncate: Literal["refuse", "cut"] = "refuse"
    """Policy for a conversation longer than the context: an error that counts them, or its first
    tokens, as long as they have some of an answer."""
    tokenizer: str = ""
    """A tokenizer.json; empty: bytes."""
    template: str = ""
    """A file with a template of jinja2, or a tokenizer_config.json that has one; empty: ChatML."""

    def build(self) -> Corpus:
        """Read and encode the conversations, and split them in two.

        Raises:
            DataError: if a file has none or one of another form, one has no answer, or one is
                longer than the context.
        """
        tokenizer = read_tokenizer(self.tokenizer) if self.tokenizer else ByteTokenizer()
        template = read_template(self.template)
        found = [
            encode(tokenizer, template, messages, where)
            for where, messages in read_conversations(self.path, self.field)
        ]
        if not found:
            raise DataError(
                f"{self.path} has no conversation. Give files with one a line or a row: "
                f"data.path=FILES."
            )
        fit = self._truncated(found)
        parts = hold_out_last(fit, self.validation, where=self.path, noun="conversation")
        train, validation = (ChatRows(part, context=self.context) for part in parts)
        return Corpus(train, validation, tokenizer)

    def encode_prompt(self, tokenizer: Tokenizer, text: str) -> np.ndarray:  # n
        """Return the tokens that a model reads before its answer to a user's message.

        Raises:
            DataError: if the text spells out a special token, or the template refuses it.
        """
        return encode_prompt(tokenizer, read_template(self.template), text)

    def end_of_turn(self, tokenizer: Tokenizer) -> np.ndarray:  # n
        """Return the tokens that end an answer; none if the template has no mark for it."""
        return end_of_turn(tokenizer, read_template(self.template))

    def _truncated(self, found: list[Encoded]) -> list[Encoded]:
        room = self.context + 1
        cut = [Encoded(one.where, one.tokens[:room], one.answers[:room]) for one in found]
        long = [one for one in found if len(one.tokens) > room]
        unanswered = [one for one in cut if not one.answers[1:].any()]
        if not long or (self.truncate == "cut" and not unanswered):
            return cut
        longest = max(long, key=lambda one: len(one.tokens))
        every = sum(int(one.answers.sum()) for one in found)
        lost = every - sum(int(one.answers.sum()) for one in cut)
        enough = f"data.context={len(longest.tokens) - 1}"
        facts = (
            f"{len(long)} of {len(found)} conversations are longer than data.context="
            f"{self.context}, the longest {len(longest.tokens)} tokens ({longest.where})"
        )
        if unanswered:
            raise DataError(
                f"{facts}; of {len(unanswered)} no answer is left, such as {unanswered[0].where}. "
                f"Set {enough}, or leave them out of the file."
            )
        raise DataError(
            f"{facts}. Set {enough}, or data.truncate=cut, which leaves out {lost:,} of {every:,} "
            f"tokens of answers."
        )


def read_conversations(path: str | list[str], field: str) -> Iterator[tuple[str, list[Message]]]:
    """Yield where each conversation stands, `FILE:LINE`, and its messages.

    Raises:
        DataError: if one has another form.
    """
    form = "a list of messages, each with a `role` and a `content`"
    for where, row in read_rows(path, [field], noun="conversation", form=form):
        yield where, _checked(where, row, field)


def _checked(where: str, row: Any, field: str) -> list[Message]:
    messages = row.get(field) if isinstance(row, dict) else None
    if not isinstance(messages, list):
        names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(
            f"{where} has no list of messages in {field!r} (it has {names}). Name the field: "
            f"data.field=NAME."
        )
    for message in messages:
        texts = [message.get(n) for n in ("role", "content")] if isinstance(message, dict) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{where} has the message {reprlib.repr(message)}, and each needs a `role` and a "
                f"`content`, both text."
            )
    return messages
