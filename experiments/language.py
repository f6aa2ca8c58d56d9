"""Next-token prediction over token files, for models whose logits are too many to hold at once."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

import jtrain as jt
from jtrain.data import HubTexts, Mixture, TextLines, Tokens, UniformTokens, fingerprint
from jtrain.losses import (
    chunked_next_token,
    inputs_and_targets,
    max_violation,
    multi_token,
    segments_of,
    with_router,
)
from jtrain.models import NoExperts, Transformer, check_vocabulary, depth
from jtrain.train import make_complete
from jtrain.types import Batch, Extra, Key, LossValue, Metrics, Params, Placement


@jt.configclass
class Config(jt.RunConfig):
    """A transformer and its tokens."""

    data: Annotated[
        Tokens | Mixture | TextLines | HubTexts | UniformTokens,
        jt.Registry("data", jt.Kind, "build"),
    ]
    """The tokens."""
    model: Transformer = Transformer(preset="gpt2", vocab=0)
    """The network; with vocab=0 it has the tokens of the data."""
    logits_chunk: int = Field(default=128, gt=0)
    """Positions of a row whose logits exist at once: more are faster on a GPU, and take memory."""

    implied_by = ("model.depth", "model.aspect")

    def implied(self, given: Callable[[str], Any]) -> Mapping[str, Any]:
        """Return the steps, batch and rates that the size of the model implies."""
        return depth.imply_training(self, given, depth.GPT2)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Return the values that conflict."""
        yield from super().problems()
        yield from self.model.context_problems(self.data.context)

    def build(self, place: Placement) -> jt.Experiment:
        """Build the tokens, the network and the loss."""
        corpus = self.data.build()
        check_vocabulary(self.model.pretrained, corpus.vocabulary)
        network = self.model.for_tokens(len(corpus.vocabulary))
        model, how = network.build(place), network.experts

        def loss(
            params: Params, extra: Extra, batch: Batch, rng: Key | None
        ) -> tuple[LossValue, Metrics, Extra]:
            inputs, targets, real = inputs_and_targets(batch)
            keys, segments = jt.row_keys(rng, batch), segments_of(batch)
            options = {"segments": segments, "rng": keys, "method": "multi_token"}
            (hidden, routed, further), _ = model.apply(params, extra, inputs, **options)
            cross_entropy = lambda hidden, targets, real: chunked_next_token(
                *(hidden, model.head(params), targets, real),
                chunk=self.logits_chunk,
                soft_cap=network.logit_cap,
                logits=self.precision.logits,
                placement=place,
            )
            value, metrics = cross_entropy(hidden, targets, real)
            terms: LossValue = value
            if further:
                weight = network.multi_token_weight
                terms, more = multi_token(cross_entropy, further, targets, real, weight=weight)
                terms, metrics = value + terms, {**metrics, **more, "cross_entropy": value}
            if isinstance(how, NoExperts):
                return terms, metrics, extra
            terms, more = with_router(
                terms, routed, real, top_k=how.top_k, group=how.group, uneven=how.uneven, z=how.z
            )
            metrics = {**metrics, **more, "cross_entropy": value}
            extra = model.update_bias(extra, routed, real)
            if rng is None and how.bias_update_rate is not None:
                metrics["max_violation"] = max_violation(extra["expert_bias"])
            return terms, metrics, extra

        plain = lambda params, batch, rng: loss(params, {}, batch, rng)[:2]
        return jt.Experiment(
            init=model.init,
            dims=model.dims,
            loss=plain if how.bias_update_rate is None else jt.stateful(loss),
            rows_interact=how.rows_interact,
            train=corpus.shuffled(size=self.batch, seed=self.seed),
            valid=corpus.in_order(size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer,
            model=model,
            tokens=self.data.context,
            tokenizer=fingerprint(corpus.vocabulary),
            complete=make_complete(network.build, corpus.vocabulary),
        )
