"""Next-character prediction: the plays of Shakespeare, or files of your own."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import jtrain as jt
from jtrain.data import Mixture, Shakespeare, Text, TinyShakespeare, Tokens, fingerprint
from jtrain.losses import inputs_and_targets, next_token, segments_of
from jtrain.models import Transformer, depth
from jtrain.train import make_complete
from jtrain.types import Batch, Key, LossFn, Metrics, Params, Placement


def next_char(model: jt.Model) -> LossFn:
    """Return nats a character and the share of correct predictions; dropout by row."""

    def loss(params: Params, batch: Batch, rng: Key | None) -> tuple[jt.Mean, Metrics]:
        inputs, targets, real = inputs_and_targets(batch)
        keys, segments = jt.row_keys(rng, batch), segments_of(batch)
        logits, _ = model.apply(params, {}, inputs, segments=segments, rng=keys)
        return next_token(logits, targets, real)

    return loss


@jt.configclass
class Config(jt.RunConfig):
    """A character transformer and its text."""

    data: Annotated[
        Shakespeare | TinyShakespeare | Text | Tokens | Mixture,
        jt.Registry("data", jt.Kind, "build"),
    ] = Shakespeare()
    """The text."""
    model: Transformer = Transformer()
    """The network; its vocabulary is the characters of the text."""

    implied_by = ("model.depth", "model.aspect")

    def implied(self, given: Callable[[str], Any]) -> Mapping[str, Any]:
        """Return the steps, batch and rates that the size of the model implies."""
        return depth.imply_training(self, given, depth.CHARACTERS)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Return the values that conflict."""
        yield from super().problems()
        if self.data.context > self.model.context:
            context = self.data.context
            yield (
                "data.context",
                f"{context} characters are more than the model's context of {self.model.context}; "
                f"set model.context={context} or data.context={self.model.context}",
            )
        yield from self.model.next_token_problems()

    def build(self, place: Placement) -> jt.Experiment:
        """Build the text, the network and the loss."""
        corpus = self.data.build()
        network = self.model.for_tokens(len(corpus.vocabulary))
        model = network.build(place)
        write = make_complete(network.build, corpus.vocabulary)

        @functools.wraps(write)
        def complete(params: Params, extra: object, key: Key, prompt: jt.Prompt) -> str:
            return write(params, extra, key, prompt).strip("\n")

        return jt.Experiment(
            init=model.init,
            dims=model.dims,
            loss=next_char(model),
            train=corpus.shuffled(size=self.batch, seed=self.seed),
            valid=corpus.in_order(size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer,
            model=model,
            tokens=self.data.context,
            tokenizer=fingerprint(corpus.vocabulary),
            sample=lambda params, extra, key: complete(params, extra, key, jt.Prompt()),
            complete=complete,
        )
