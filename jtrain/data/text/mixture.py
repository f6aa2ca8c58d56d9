"""The values of a mixture of prepared texts, and what they build."""

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field

from jtrain.config.configclass import configclass
from jtrain.data.batches.by_step import InOrder
from jtrain.data.batches.mixed import MixedBatches
from jtrain.data.sources.source import Source
from jtrain.data.text.token_corpus import Tokens
from jtrain.data.text.tokenizer import Tokenizer, refuse_mismatch


class MixedCorpus(NamedTuple):
    """Texts to train on with their weights, those to judge by, and what the numbers mean."""

    train: Mapping[str, tuple[Source, float]]
    validation: Mapping[str, Source]
    vocabulary: Tokenizer

    def shuffled(self, *, size: int, seed: int) -> MixedBatches:
        """What to train on, as batches: after any number of rows each text has its share."""
        return MixedBatches(self.train, size=size, seed=seed)

    def in_order(self, *, size: int) -> dict[str, InOrder]:
        """What to judge by, as batches: each text by itself."""
        return {name: InOrder(source, size=size) for name, source in self.validation.items()}


@configclass
class MixturePart:
    """One text of a mixture."""

    path: str
    """Its folder of token files; relative to where you are."""
    weight: float = Field(gt=0)
    """Its share of the rows, against the weights of the others: 0.7 and 0.3 are 7 and 3."""


def _some(parts: dict[str, MixturePart]) -> dict[str, MixturePart]:
    if parts:
        return parts
    raise ValueError("must name a text at least, found none; write {NAME: {path: ..., weight: 1}}")


@configclass
class Mixture:
    """Folders of token files by weight, each a set of its own to judge by."""

    kind: Literal["mixture"] = "mixture"
    parts: Annotated[dict[str, MixturePart], AfterValidator(_some)]
    """The texts, by a name of yours."""
    context: int = Field(default=64, gt=0)
    """Tokens that the model sees at once."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share of each text, at its end, that is kept to judge by."""
    pack: bool = False
    """Whether rows are whole documents, parted by `segments`."""
    tokenizer: str = ""
    """The fingerprint that the tokenizer must have, as `jtrain data show` prints it; empty: any,
    and one for all texts."""

    def build(self) -> MixedCorpus:
        """The texts, each cut in two.

        Raises:
            DataError: a folder that is not whole, is too short or is of another tokenizer.
        """
        found = {name: self._tokens(part).build() for name, part in self.parts.items()}
        read = [corpus.vocabulary for corpus in found.values()]
        paths = [part.path for part in self.parts.values()]
        refuse_mismatch(dict(zip(paths, read, strict=True)))
        return MixedCorpus(
            {name: (corpus.train, self.parts[name].weight) for name, corpus in found.items()},
            {name: corpus.validation for name, corpus in found.items()},
            read[0],
        )

    def _tokens(self, part: MixturePart) -> Tokens:
        return Tokens(
            path=part.path,
            context=self.context,
            validation=self.validation,
            pack=self.pack,
            tokenizer=self.tokenizer,
        )
