"""Embeddings of texts: an anchor finds its positive among in-batch and hard negatives."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from pydantic import Field

import jtrain as jt
from jtrain.data import TextPairs, fingerprint
from jtrain.errors import ConfigError
from jtrain.losses import info_nce
from jtrain.models import Encoder, check_vocabulary, map_rows, mean_pool
from jtrain.types import Batch, Extra, Key, Metrics, Params, Placement


@jt.configclass
class Config(jt.RunConfig):
    """An encoder and pairs of texts."""

    data: TextPairs
    """The pairs, and how many hard negatives each has."""
    model: Encoder = Encoder()
    """The network; an embedding is the mean of its vectors at a text's tokens."""
    temperature: float = Field(default=0.05, gt=0)
    """Divisor of the cosines."""
    chunks: int = Field(default=1, gt=0)
    """Parts of the batch that are embedded one after the other, in the place of microbatches, which
    would compare rows within each alone. The backward pass computes them again. They change no
    result."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Return the values that conflict."""
        yield from super().problems()
        if self.model.pooler:
            yield (
                "model.pooler",
                "is true, and an embedding is the mean of all vectors, which a pooler has no part "
                "in; set model.pooler=false",
            )
        if self.data.context > self.model.context:
            yield (
                "data.context",
                f"is {self.data.context}, and the model reads {self.model.context} tokens; set "
                f"data.context={self.model.context} or less",
            )
        for name, rows in {"batch": self.batch, "evaluate.batch": self.evaluate.batch}.items():
            if rows % self.chunks:
                yield (
                    "chunks",
                    f"is {self.chunks} and does not divide {name}={rows}; set chunks=1, or "
                    f"{name}={-(-rows // self.chunks) * self.chunks}",
                )

    def build(self, place: Placement) -> jt.Experiment:
        """Build the pairs, the encoder and the loss, which couples all rows of a batch."""
        corpus = self.data.build()
        vocabulary = corpus.vocabulary
        check_vocabulary(self.model.pretrained, vocabulary, option="data.tokenizer")
        if len(vocabulary) > self.model.vocab:
            raise ConfigError(
                f"model.vocab={self.model.vocab} is less than the {len(vocabulary)} tokens of the "
                f"data. Set model.vocab={len(vocabulary)}."
            )
        model = self.model.build(place)

        def embed(params: Params, rows: dict[str, Any]) -> Array:
            """Return the embeddings of the texts of each row, b m d."""
            tokens, visible = rows["tokens"], rows["visible"]
            texts = tokens.shape[:2]
            flat = lambda x: x.reshape(-1, *x.shape[2:])
            keys = None if rows["keys"] is None else flat(rows["keys"])
            hidden, _ = model.apply(params, {}, flat(tokens), flat(visible), rng=keys)
            return mean_pool(hidden, flat(visible)).reshape(*texts, -1)

        def loss(params: Params, batch: Batch, rng: Key | None) -> tuple[jt.Mean, Metrics]:
            keys = jt.row_keys(rng, batch)
            each = jnp.arange(batch["tokens"].shape[1], dtype=jnp.int32)
            fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
            rows = {
                "tokens": batch["tokens"],
                "visible": batch["visible"],
                "keys": None if keys is None else fold(keys, each),
            }
            out = map_rows(lambda some: embed(params, some), rows, self.chunks)
            anchors, positives, negatives = out[:, 0], out[:, 1], out[:, 2:]
            return info_nce(
                anchors, positives, negatives, batch["mask"], temperature=self.temperature
            )

        def predict(params: Params, extra: Extra, batch: Batch) -> dict[str, Array]:
            del extra
            out = embed(params, {**batch, "keys": None})
            return {"anchor": out[:, 0], "positive": out[:, 1]}

        return jt.Experiment(
            init=model.init,
            dims=model.dims,
            loss=loss,
            rows_interact="batch",
            train=corpus.shuffled(size=self.batch, seed=self.seed),
            valid=corpus.in_order(size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer,
            model=model,
            predict=predict,
            tokenizer=fingerprint(vocabulary),
        )
