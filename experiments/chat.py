"""Fine-tuning on conversations: a language model learns the answers and reads the rest."""

import functools
from collections.abc import Iterator, Mapping

from pydantic import Field, ValidationInfo, field_validator

import jtrain as jt
from jtrain.data import Chat, ChatRows, Corpus, fingerprint
from jtrain.errors import did_you_mean
from jtrain.losses import chunked_next_token, inputs_and_targets, segments_of
from jtrain.models import Transformer, check_vocabulary
from jtrain.train import (
    AnswerEvaluation,
    Verifier,
    check_fits,
    make_complete,
    make_question,
    same_number,
    same_text,
)
from jtrain.types import Batch, Key, Metrics, Params, Placement

# Plain functions of the answer that was written and the expected one. Add yours here.
VERIFIERS: Mapping[str, Verifier] = {"same_text": same_text, "same_number": same_number}


@jt.configclass
class Answers:
    """Answers to held-out questions, the last ones of their conversations, at each evaluation."""

    verifier: str = ""
    """Function of VERIFIERS that scores an answer; empty: none is written. The metric `correct` is
    the mean score, and `finished` the share of answers that end with the mark of a turn."""
    tokens: int = Field(default=32, gt=0)
    """Most tokens of an answer."""
    rows: int = Field(default=16, gt=0)
    """Questions answered at once."""
    questions: int = Field(default=0, ge=0)
    """Number of held-out conversations, the first ones; 0: all."""


@jt.configclass
class Config(jt.RunConfig):
    """A transformer and its conversations."""

    model: Transformer = Transformer()
    """The network; with vocab=0 it has the tokens of the data."""
    data: Chat
    """The conversations."""
    answers: Answers = Answers()
    """Evaluation by generation."""

    @field_validator("data")
    @classmethod
    def _with_gguf(cls, data: Chat, info: ValidationInfo) -> Chat:
        """Return the data with what the model's GGUF file brings; `model` is validated before."""
        model = info.data.get("model")
        return data.with_gguf(model.pretrained) if model else data

    def problems(self) -> Iterator[tuple[str, str]]:
        """Return the values that conflict."""
        yield from super().problems()
        yield from self.model.context_problems(self.data.context)
        yield from self.model.next_token_problems()
        if self.answers.verifier and self.answers.verifier not in VERIFIERS:
            yield (
                "answers.verifier",
                f"is {self.answers.verifier!r}, which is none of {', '.join(VERIFIERS)}"
                f"{did_you_mean(self.answers.verifier, VERIFIERS)}; set one, or leave it out",
            )

    def build(self, place: Placement) -> jt.Experiment:
        """Build the conversations, the network and the loss."""
        corpus = self.data.build()
        check_vocabulary(self.model.pretrained, corpus.vocabulary, option="data.tokenizer")
        network = self.model.for_tokens(len(corpus.vocabulary))
        model, stop = network.build(place), self.data.end_of_turn(corpus.vocabulary)

        def loss(params: Params, batch: Batch, rng: Key | None) -> tuple[jt.Mean, Metrics]:
            inputs, targets, real = inputs_and_targets(batch)
            keys, segments = jt.row_keys(rng, batch), segments_of(batch)
            hidden, _ = model.hidden(params, {}, inputs, segments, rng=keys)
            answers = real & batch["answer"][:, 1:]
            return chunked_next_token(
                hidden,
                model.head(params),
                targets,
                answers,
                soft_cap=network.logit_cap,
                logits=self.precision.logits,
                placement=place,
            )

        return jt.Experiment(
            init=model.init,
            dims=model.dims,
            loss=loss,
            train=corpus.shuffled(size=self.batch, seed=self.seed),
            valid=corpus.in_order(size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer,
            model=model,
            tokens=self.data.context,
            tokenizer=fingerprint(corpus.vocabulary),
            complete=make_complete(
                network.build,
                corpus.vocabulary,
                encode=functools.partial(self.data.encode_prompt, corpus.vocabulary),
                stop=stop,
            ),
            generated=self._generated(network, corpus, tuple(stop.tolist())),
        )

    def _generated(
        self, network: Transformer, corpus: Corpus, stop: tuple[int, ...]
    ) -> dict[str, AnswerEvaluation]:
        """Return the evaluation of answers, where there is a verifier."""
        values, rows = self.answers, corpus.validation
        if not values.verifier:
            return {}
        assert isinstance(rows, ChatRows), "Chat builds them"
        chosen = rows.conversations[: values.questions or None]
        questions = [make_question(one, corpus.vocabulary, stop) for one in chosen]
        check_fits(questions, values.tokens, network.context)
        return {
            "valid": AnswerEvaluation(
                build=network.build,
                tokenizer=corpus.vocabulary,
                questions=questions,
                verify=VERIFIERS[values.verifier],
                stop=stop,
                rows=values.rows,
                tokens=values.tokens,
            )
        }
