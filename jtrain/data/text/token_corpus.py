"""The values of prepared text, and what they build."""

from typing import Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.text.packed import Packed
from jtrain.data.text.text import Corpus
from jtrain.data.text.token_files import TokenFiles, TokenRange
from jtrain.data.text.windows import Windows
from jtrain.errors import DataError


@configclass
class Tokens:
    """A folder of token files, which `jtrain data prepare` wrote."""

    kind: Literal["tokens"] = "tokens"
    path: str
    """The folder; relative to where you are."""
    context: int = Field(default=64, gt=0)
    """Tokens that the model sees at once."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share of the tokens, at their end, that is kept to judge by."""
    pack: bool = False
    """Whether rows are whole documents, parted by `segments`; else they begin at any token, and go
    on over the end of a document."""
    tokenizer: str = ""
    """The fingerprint that the tokenizer must have, as `jtrain data show` prints it; empty: any."""

    def build(self) -> Corpus:
        """The tokens, cut in two."""
        files = TokenFiles(self.path, tokenizer=self.tokenizer)
        train, validation = files.split(self.validation)
        if self.pack:
            packed = lambda part: Packed(part, context=self.context)
            return Corpus(packed(train), packed(validation), files.tokenizer)
        for part in (train, validation):
            self._refuse_short(part)
        return Corpus(
            Windows(train, context=self.context),
            Windows(validation, context=self.context, stride=self.context),
            files.tokenizer,
        )

    def _refuse_short(self, part: TokenRange) -> None:
        longest = len(part) - 1
        if longest < self.context:
            advice = f"data.context={longest} or less" if longest > 0 else "data.validation=0.5"
            raise DataError(
                f"context {self.context} does not fit validation {self.validation} of {self.path}: "
                f"a part of it has {len(part)} tokens. Set {advice}, or prepare more text."
            )
