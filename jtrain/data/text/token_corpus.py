"""The configs of prepared text: a folder of token files, or a mixture of folders."""

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
    """A folder of token files written by `jtrain data prepare`."""

    kind: Literal["tokens"] = "tokens"
    path: str
    """The folder; relative to the working folder."""
    context: int = Field(default=64, gt=0)
    """Context length in tokens."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share of the tokens, at their end, that is held out for validation."""
    pack: bool = False
    """Pack complete documents into rows, separated by `segments`; else rows begin at any token and
    continue over the end of a document."""
    tokenizer: str = ""
    """The fingerprint that the tokenizer must have, as `jtrain data show` prints it; empty: any."""

    def build(self) -> Corpus:
        """Open the tokens and split them in two."""
        files = TokenFiles(self.path, tokenizer=self.tokenizer)
        train, validation = files.split(self.validation)
        if self.pack:
            return Corpus(
                Packed(train, context=self.context),
                Packed(validation, context=self.context),
                files.tokenizer,
            )
        for part in (train, validation):
            self._check_length(part)
        return Corpus(
            Windows(train, context=self.context),
            Windows(validation, context=self.context, stride=self.context),
            files.tokenizer,
        )

    def _check_length(self, part: TokenRange) -> None:
        longest = len(part) - 1
        if longest < self.context:
            advice = f"data.context={longest} or less" if longest > 0 else "data.validation=0.5"
            raise DataError(
                f"context {self.context} does not fit validation {self.validation} of {self.path}: "
                f"a part of it has {len(part)} tokens. Set {advice}, or prepare more text."
            )
