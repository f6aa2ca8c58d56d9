"""Next-character prediction: the plays of Shakespeare, or files of your own."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated

import jax
from pydantic import Field

import jtrain as jt
from jtrain.data import InOrder, Shuffled
from jtrain.data.shakespeare import Shakespeare
from jtrain.data.text import Text
from jtrain.losses.next_token import inputs_and_targets, next_token
from jtrain.models.transformer import Transformer
from jtrain.types import Batch, Key, LossFn, Mean, Metrics, Model, Params, Placement


def next_char(model: Model) -> LossFn:
    """Nats a character, and the share of characters that are guessed; dropout by row."""

    def loss(params: Params, batch: Batch, rng: Key | None) -> tuple[Mean, Metrics]:
        inputs, targets, real = inputs_and_targets(batch)
        keys = None if rng is None else jt.row_keys(rng, batch)
        logits, _ = model.apply(params, {}, None, rng is not None, inputs, keys)
        return next_token(logits, targets, real)

    return loss


@jt.values
class Config(jt.RunConfig):
    """A character transformer and its text."""

    data: Annotated[Shakespeare | Text, Field(discriminator="kind")] = Shakespeare()
    """The text."""
    model: Transformer = Transformer()
    """The network; its vocabulary is the characters of the text."""

    def misfits(self) -> Iterator[tuple[str, str]]:
        """Values that do not fit together."""
        yield from super().misfits()
        if self.data.context > self.model.context:
            context = self.data.context
            yield (
                "data.context",
                f"{context} characters are more than the model's context of {self.model.context}; "
                f"set model.context={context} or data.context={self.model.context}",
            )

    def build(self, place: Placement) -> jt.Experiment:
        """The text, the network and the loss."""
        corpus = self.data.build()
        network = dataclasses.replace(self.model, vocab=len(corpus.vocabulary))
        model = network.build(place)

        def sample(params: Params, extra: object, key: Key, length: int = 400) -> str:
            from jtrain.models.generate import generate

            plain = network.build()  # one row of text is laid out nowhere
            logits = lambda params, tokens: plain.apply(params, {}, None, False, tokens)[0]
            prompt = corpus.vocabulary.encode("\n")[None].astype("int32")
            tokens = generate(
                logits, params, prompt, key, steps=length, context=network.context, temperature=0.8
            )
            return corpus.vocabulary.decode(jax.device_get(tokens)[0]).strip()

        return jt.Experiment(
            init=model.init,
            loss=next_char(model),
            train=Shuffled(corpus.train, size=self.batch, seed=self.seed),
            valid=InOrder(corpus.validation, size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer.build(self.steps),
            tokens=self.data.context,
            sample=sample,
        )
