"""Conversations in files, as rows of tokens with the answers marked."""

import dataclasses
import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.sources.json_rows import read_rows
from jtrain.data.sources.subset import hold_out_last
from jtrain.data.text.chat_rows import FIELD, Conversation, read_conversation
from jtrain.data.text.chat_template import ChatTemplate
from jtrain.data.text.encode_chat import Encoded, encode, encode_prompt, end_of_turn
from jtrain.data.text.gguf_tokenizer import GGUF, read_header
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
            encode(tokenizer, template, *one, optional=self.ignore)
            for one in read_conversations(self.path, self.field)
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
        return encode_prompt(tokenizer, self._template(), text)

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


def read_conversations(path: str | list[str], field: str) -> Iterator[Conversation]:
    """Yield each conversation of files, with its place, `FILE:LINE`.

    Raises:
        DataError: if one has another form.
    """
    form = "a list of messages, each with a `role` and a `content`"
    for where, row in read_rows(path, noun="conversation", form=form):
        yield read_conversation(where, row, field)
