"""Additions written out in text: a transformer learns the answers to questions such as `12+34=`."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from pydantic import Field

import jtrain as jt
from jtrain.data import Arrays, InOrder, Shuffled, Tokenizer, Vocabulary, fingerprint
from jtrain.errors import DataError
from jtrain.finetune import sample_answers, until_end
from jtrain.losses import next_token
from jtrain.models import Transformer, check_vocabulary
from jtrain.train import make_complete
from jtrain.types import Batch, Key, Metrics, Params, Placement


class Questions(NamedTuple):
    """Questions with their answers, by tokens: `question` n q, `answer` n a, filled up by ends."""

    train: Arrays
    valid: Arrays
    vocabulary: Tokenizer
    end: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens of a question, and of the longest answer with its end."""
        arrays = self.train.arrays
        return arrays["question"].shape[1], arrays["answer"].shape[1]


@jt.configclass
class Additions:
    """Sums of two numbers that have equally many digits."""

    digits: int = Field(default=2, ge=1, le=3)
    """Digits of each number."""
    questions: int = Field(default=0, ge=0)
    """Questions to train on; 0: all that are not for validation."""
    validation: int = Field(default=1000, gt=0)
    """Questions to validate on, the same for any number of `questions`; none is trained on."""
    tokenizer: str = ""
    """A tokenizer.json; empty: one token a character."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the values that conflict."""
        count = (9 * 10 ** (self.digits - 1)) ** 2
        if self.questions + self.validation >= count:
            yield (
                "data.validation",
                f"{self.validation} questions and data.questions={self.questions} are all {count} "
                f"that there are, or more; set data.validation={count // 5} and data.questions=0",
            )

    def build(self) -> Questions:
        """Build the questions.

        Raises:
            DataError: if the tokenizer gives questions of several lengths.
        """
        ours = Vocabulary("0123456789+=\n")
        tokenizer = jt.data.read_tokenizer(self.tokenizer) if self.tokenizer else ours
        low, count = 10 ** (self.digits - 1), 9 * 10 ** (self.digits - 1)
        order = np.random.default_rng(0).permutation(count * count)
        valid, train = order[: self.validation], order[self.validation :]
        end = tokenizer.encode("\n")
        rows = lambda at: _rows(tokenizer, low + at // count, low + at % count, end)
        train = train[: self.questions or len(train)]
        return Questions(rows(train), rows(valid), tokenizer, int(end[0]))


def _rows(tokenizer: Tokenizer, a: np.ndarray, b: np.ndarray, end: np.ndarray) -> Arrays:
    ask = tokenizer.encode_all([f"{x}+{y}=" for x, y in zip(a, b, strict=True)])
    answers = tokenizer.encode_all([f"{x + y}\n" for x, y in zip(a, b, strict=True)])
    lengths = sorted({len(each) for each in ask})
    if len(lengths) > 1 or len(end) != 1 or any(each[-1] != end[0] for each in answers):
        raise DataError(
            f"data.tokenizer writes questions such as {int(a[0])}+{int(b[0])}= in "
            f"{' or '.join(map(str, lengths))} tokens and a new line in {len(end)}. Answers are "
            f"sampled to questions of one length, up to a token of a new line: take a tokenizer "
            f"that splits numbers into digits, or leave data.tokenizer out for characters."
        )
    # The longest answer has a digit more than the numbers, whatever rows these are.
    most = max(len(each) for each in tokenizer.encode_all([f"{2 * 10 ** len(str(a[0])) - 2}\n"]))
    filled = np.full((len(answers), most), end[0], np.int32)
    for row, each in zip(filled, answers, strict=True):
        row[: len(each)] = each
    return Arrays(question=np.stack(ask).astype(np.int32), answer=filled)


def right_answers(answers: Int[Array, "b g a"], batch: Batch, end: int) -> Float[Array, "b g"]:
    """Return 1 for each answer that is right up to its end, and 0 for the others."""
    real = until_end(answers, end)
    return jnp.where(real, answers == batch["answer"][:, None], True).all(-1).astype(jnp.float32)


@jt.configclass
class AdditionsConfig(jt.RunConfig):
    """A transformer and its additions."""

    data: Additions = Additions()
    """The additions."""
    model: Transformer = Transformer()
    """The network; with vocab=0 it has the tokens of the data."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Return the values that conflict."""
        yield from super().problems()
        yield from self.data.problems()
        text = 3 * self.data.digits + 4  # characters: two numbers, their sum, + and = and its end
        if self.model.context < text:
            yield (
                "model.context",
                f"{self.model.context} tokens are fewer than the {text} of a question and its "
                f"answer; set model.context={text}",
            )
        yield from self.model.next_token_problems()


@jt.configclass
class Config(AdditionsConfig):
    """A transformer that learns the answers to additions."""

    def build(self, place: Placement) -> jt.Experiment:
        """Build the questions, the network and the loss."""
        task = self.data.build()
        check_vocabulary(self.model.pretrained, task.vocabulary, option="data.tokenizer")
        network = self.model.for_tokens(len(task.vocabulary))
        model, (start, tokens) = network.build(place), task.sizes

        def loss(params: Params, batch: Batch, rng: Key | None) -> tuple[jt.Mean, Metrics]:
            answer, mask = batch["answer"], batch["mask"]
            text = jnp.concatenate([batch["question"], answer], axis=1)
            logits, _ = model.apply(params, {}, text[:, :-1], rng=jt.row_keys(rng, batch))
            real = until_end(answer[:, None], task.end)[:, 0] & mask[:, None]
            value, _ = next_token(logits[:, start - 1 :], answer, real)
            if rng is not None:
                return value, {}
            keys = jt.row_keys(jax.random.key(0), batch)  # the likeliest tokens need no draw
            found = sample_answers(
                model, params, batch["question"], keys, group=1, tokens=tokens, temperature=0.0
            )
            right = right_answers(found, batch, task.end)[:, 0]
            return value, {"accuracy": jt.Mean.of(right, mask)}

        return jt.Experiment(
            init=model.init,
            dims=model.dims,
            loss=loss,
            train=Shuffled(task.train, size=self.batch, seed=self.seed),
            valid=InOrder(task.valid, size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer,
            model=model,
            tokens=start + tokens,
            tokenizer=fingerprint(task.vocabulary),
            complete=make_complete(network.build, task.vocabulary, stop=[task.end]),
        )
