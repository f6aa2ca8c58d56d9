"""The config of a mixture of prepared texts."""

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field

from jtrain.config.configclass import configclass
from jtrain.data.batches.by_step import InOrder
from jtrain.data.batches.mixed import MixedBatches
from jtrain.data.sources.source import Source
from jtrain.data.text.token_corpus import Tokens
from jtrain.data.text.tokenizer import Tokenizer, check_same_tokenizer


class MixedCorpus(NamedTuple):
    """Training texts with their weights, validation texts, and their common vocabulary."""

    train: Mapping[str, tuple[Source, float]]
    validation: Mapping[str, Source]
    vocabulary: Tokenizer

    def shuffled(self, *, size: int, seed: int) -> MixedBatches:
        """Return the batches to train on: each text has its share after any number of rows."""
        return MixedBatches(self.train, size=size, seed=seed)

    def in_order(self, *, size: int) -> dict[str, InOrder]:
        """Return the batches to validate on: each text by itself."""
        return {name: InOrder(source, size=size) for name, source in self.validation.items()}


@configclass
class MixturePart:
    """One text of a mixture."""

    path: str
    """Its folder of token files; relative to the working folder."""
    weight: float = Field(gt=0)
    """Its share of the rows, relative to the other weights: 0.7 and 0.3 equal 7 and 3."""


def _nonempty(parts: dict[str, MixturePart]) -> dict[str, MixturePart]:
    if parts:
        return parts
    raise ValueError(
        "must name at least one text, found none; write {NAME: {path: ..., weight: 1}}"
    )


@configclass
class Mixture:
    """Folders of token files by weight; each folder has a validation set of its own."""

    kind: Literal["mixture"] = "mixture"
    parts: Annotated[dict[str, MixturePart], AfterValidator(_nonempty)]
    """The texts, by names of your choice."""
    context: int = Field(default=64, gt=0)
    """Context length in tokens."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share of each text, at its end, that is held out for validation."""
    pack: bool = False
    """Pack complete documents into rows, separated by `segments`."""
    tokenizer: str = ""
    """The fingerprint that the tokenizer must have, as `jtrain data show` prints it; empty: any
    tokenizer, but the same for all texts."""

    def build(self) -> MixedCorpus:
        """Open the texts and split each in two.

        Raises:
            DataError: a folder that is incomplete, is too short or has another tokenizer.
        """
        corpora = {name: self._tokens(part).build() for name, part in self.parts.items()}
        tokenizers = [corpus.vocabulary for corpus in corpora.values()]
        paths = [part.path for part in self.parts.values()]
        check_same_tokenizer(dict(zip(paths, tokenizers, strict=True)))
        return MixedCorpus(
            {name: (corpus.train, self.parts[name].weight) for name, corpus in corpora.items()},
            {name: corpus.validation for name, corpus in corpora.items()},
            tokenizers[0],
        )

    def _tokens(self, part: MixturePart) -> Tokens:
        return Tokens(
            path=part.path,
            context=self.context,
            validation=self.validation,
            pack=self.pack,
            tokenizer=self.tokenizer,
        )
