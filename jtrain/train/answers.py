"""Generated answers: text completion, and the share of questions that a verifier accepts."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.types import Extra, Key, Params
from jtrain.data.text.conversations import Encoded, split_last_answer
from jtrain.data.text.tokenizers import Tokenizer, decode_known
from jtrain.errors import ConfigError, DataError
from jtrain.models.generate import IncrementalModel, generate, generate_answers
from jtrain.models.transformer import LanguageModel
from jtrain.train.experiment import Prompt

Verifier: TypeAlias = Callable[[str, str], float]
"""From the answer that was written and the expected one to a score, usually 0 or 1."""
_NUMBER = re.compile(
    r"""
    (?:(?<![\w.)%])[-\u2212])?  # a minus, also of typeset texts; that of 5-7 or n-7 is an operator
    (?:
        (?:(?<![\d,])\d{1,3}(?:,\d{3})+(?![\d]|,\d)|\d+)(?:\.\d+)?  # with or without commas
        | (?<![\w.)])\.\d+  # digits behind a point alone
    )
    (?:[eE][-+]?\d+(?!\w))?  # an exponent
    """,
    re.VERBOSE,
)


class Question(NamedTuple):
    """Tokens that a model reads, and the text that it is expected to answer."""

    prompt: np.ndarray  # n
    answer: str


def make_question(
    conversation: Encoded, tokenizer: Tokenizer, stop: tuple[int, ...] = ()
) -> Question:
    """Return the last question of a conversation, and its answer without the mark at its end."""
    prompt, answer = split_last_answer(conversation)
    mark = np.asarray(stop, answer.dtype)
    return Question(prompt, tokenizer.decode(_strip_mark(until_mark(answer, mark), mark)[0]))


def check_fits(questions: Sequence[Question], tokens: int, context: int) -> None:
    """Raise unless every question and an answer of `tokens` fit a model's context.

    Raises:
        ConfigError: with the numbers that would do.
    """
    longest = max(len(question.prompt) for question in questions)
    if longest + tokens > context:
        shorter = f"answers.tokens={context - longest} or less, or " if context > longest else ""
        raise ConfigError(
            f"a held-out question of {longest} tokens does not fit model.context={context} with an "
            f"answer of {tokens}. Set {shorter}model.context={longest + tokens}."
        )


def same_text(answer: str, expected: str) -> float:
    """Return 1 if the texts are equal but for white space around them, else 0."""
    return float(answer.strip() == expected.strip())


def same_number(answer: str, expected: str) -> float:
    """Return 1 if the last numbers in both texts are equal, else 0; also if one has none.

    Commas in a number separate groups of three digits; a minus after a number subtracts.
    """
    one, other = (_last_number(text) for text in (answer, expected))
    return float(one is not None and one == other)


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerEvaluation:
    """Answers of a model to questions, and their scores.

    Metrics are `correct`, the mean score, and `finished`, the share of answers that end with
    `stop`: the others were cut after `tokens` tokens.
    """

    build: Callable[[], IncrementalModel]
    """Makes the model for rows of text, without a sharding; called at the first use."""
    tokenizer: Tokenizer
    questions: Sequence[Question]
    verify: Verifier
    stop: tuple[int, ...] = ()
    """Tokens in a row that end an answer."""
    rows: int = 16
    """Questions answered at once."""
    tokens: int = 64
    """Most tokens of an answer."""

    def __post_init__(self):
        if not self.questions:
            raise ConfigError(
                "there is no question to answer. Give a set that has one, or leave "
                "answers.verifier out."
            )

    @property
    def metrics(self) -> Sequence[str]:
        """Names of the metrics."""
        return "correct", "finished"

    def __call__(self, params: Params, extra: Extra) -> dict[str, float]:
        """Return the metrics of a model over all questions; the likeliest tokens are taken."""
        params = with_bias(self._model, params, extra)
        sizes = [len(question.prompt) for question in self.questions]
        mark = np.asarray(self.stop, np.int32)
        # Prompts of like lengths together: a batch takes the steps of its longest text.
        ordered = sorted(self.questions, key=lambda question: len(question.prompt))
        scores, finished = [], 0
        for first in range(0, len(ordered), self.rows):
            some = ordered[first : first + self.rows]
            # The rows that fill up the last batch end at once: they repeat its first question.
            rows = [*some, *[some[0]] * (self.rows - len(some))]
            lengths = np.array([len(question.prompt) for question in rows], np.int32)
            prompts = np.zeros((self.rows, max(sizes)), np.int32)
            for row, question in zip(prompts, rows, strict=True):
                row[: len(question.prompt)] = question.prompt
            text, ends = jax.device_get(
                generate_answers(
                    self._model,
                    params,
                    jnp.asarray(prompts),
                    jnp.asarray(lengths),
                    start=min(sizes),  # of all questions: one program for all batches
                    steps=self.tokens,
                    stop=self.stop,
                )
            )
            for question, row, length, end in zip(some, text, lengths, ends, strict=False):
                tokens, ended = _strip_mark(row[length:end], mark)
                answer = decode_known(self.tokenizer, tokens)
                scores.append(float(self.verify(answer, question.answer)))
                finished += ended
        return {"correct": float(np.mean(scores)), "finished": finished / len(self.questions)}

    @functools.cached_property
    def _model(self) -> IncrementalModel:
        return self.build()


def _strip_mark(tokens: np.ndarray, mark: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return the tokens without a mark at their end, and whether they had one."""
    ended = len(mark) > 0 and bool(np.array_equal(tokens[-len(mark) :], mark))
    return (tokens[: -len(mark)] if ended else tokens), ended


@dataclasses.dataclass(frozen=True, eq=False)
class TextCompletion:
    """An experiment's `complete`: it returns a prompt and its continuation."""

    build: Callable[[], IncrementalModel]
    tokenizer: Tokenizer
    read: Callable[[str], Sequence[int] | np.ndarray]
    """Encodes a prompt; a run checks its prompt so before it trains."""
    stop: Sequence[int] | np.ndarray

    def __call__(self, params: Params, extra: Extra, key: Key, prompt: Prompt) -> str:
        """Return the text of a prompt and its continuation."""
        model = self.build()
        start = self.read(prompt.text) if prompt.text else empty_prompt(self.tokenizer)
        tokens = generate(
            model,
            with_bias(model, params, extra),
            jnp.asarray(start, jnp.int32)[None],
            key,
            steps=prompt.tokens,
            temperature=prompt.temperature,
            top_k=prompt.top_k,
            top_p=prompt.top_p,
        )
        row = until_mark(jax.device_get(tokens)[0], np.asarray(self.stop), len(start))
        return decode_known(self.tokenizer, row)


def with_bias(model: IncrementalModel, params: Params, extra: Extra) -> Params:
    """Return the parameters with the biases of experts, which `extra` carries, if it does."""
    return model.with_bias(params, extra) if isinstance(model, LanguageModel) else params


def make_complete(
    build: Callable[[], IncrementalModel],
    tokenizer: Tokenizer,
    *,
    encode: Callable[[str], np.ndarray] | None = None,
    stop: Sequence[int] | np.ndarray = (),
) -> TextCompletion:
    """Return an experiment's `complete`, which gives the prompt and its continuation.

    An empty prompt stands for the end of a document; if the tokenizer has no such token, for a new
    line, or else for its first token.

    Args:
        build: makes the model for one row of text, without a sharding; called at the first use.
        tokenizer: of the model's data; unknown tokens are omitted from the text.
        encode: returns the tokens that the model reads of a prompt; by default the prompt's own.
        stop: tokens in a row after which the continuation is left out; none: it is of full length.
    """
    return TextCompletion(functools.cache(build), tokenizer, encode or tokenizer.encode, stop)


def until_mark(row: np.ndarray, stop: np.ndarray, begin: int = 0) -> np.ndarray:
    """Return the tokens up to the first `stop` that lies after `begin`, included, or all."""
    if len(stop) and len(row) >= begin + len(stop):
        windows = np.lib.stride_tricks.sliding_window_view(row[begin:], len(stop))
        found = (windows == stop).all(axis=1)
        if found.any():
            return row[: begin + int(found.argmax()) + len(stop)]
    return row


def empty_prompt(tokenizer: Tokenizer) -> Sequence[int] | np.ndarray:
    """Return the tokens that stand for no prompt; see `make_complete`."""
    if tokenizer.end is not None:
        return [tokenizer.end]
    try:
        return tokenizer.encode("\n")
    except DataError:
        return [0]
