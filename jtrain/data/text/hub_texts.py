"""Texts of a data set that is named as on the Hugging Face Hub (`jtrain[hf]`)."""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.sources.arrays import hold_out
from jtrain.data.sources.foreign import check_columns, load_hub_set
from jtrain.data.text.corpora import Corpus
from jtrain.data.text.lines import make_line_rows
from jtrain.data.text.tokenizer_file import read_tokenizer
from jtrain.data.text.tokenizers import ByteTokenizer, Tokenizer
from jtrain.errors import DataError


@configclass
class HubTexts:
    """Texts of a data set on the Hugging Face Hub, a row each, tokenized while training."""

    kind: Literal["hf"] = "hf"
    name: str
    """A data set as the package `datasets` names it: `org/set`, or a folder with files."""
    config: str = ""
    """The configuration of the data set; empty: its default one."""
    split: str = "train"
    """The split to train on, or a part of it: `train[:10%]`."""
    revision: str = ""
    """A branch, a tag or a commit; empty: the main branch."""
    column: str = "text"
    """The column of the texts."""
    validation: float | str = 0.1
    """The share of the rows, drawn by their number, that is held out for validation; or the name of
    another split."""
    context: int = Field(default=64, gt=0)
    """Context length in tokens; longer texts are cut off."""
    tokenizer: str = ""
    """A tokenizer.json or a name on the Hub; empty: bytes."""

    def build(self) -> Corpus:
        """Download the data set, unless it is in the cache of `datasets`.

        Raises:
            DataError: if there is no such data set, split or column.
        """
        tokenizer = read_tokenizer(self.tokenizer) if self.tokenizer else ByteTokenizer()
        rows = self._rows(self.split, tokenizer)
        if isinstance(self.validation, str):
            return Corpus(rows, self._rows(self.validation, tokenizer), tokenizer)
        return Corpus(*hold_out(rows, self.validation), tokenizer)

    def _rows(self, split: str, tokenizer: Tokenizer) -> "TextRows":
        found = load_hub_set(self.name, self.config, split, self.revision)
        check_columns([self.column], found.column_names, f"{self.name} ({split})")
        return TextRows(found, self.column, tokenizer, self.context)


class TextRows:
    """The texts of a column of a `datasets.Dataset` as rows: `tokens` (int32, b t+1), `length`."""

    def __init__(self, dataset: Any, column: str, tokenizer: Tokenizer, context: int):
        self._texts, self._column = dataset.select_columns([column]).with_format(None), column
        self._tokenizer, self._context = tokenizer, context

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        rows, make_row = [], make_line_rows(self._tokenizer, self._context)
        for index, text in zip(indices, self._texts[indices][self._column], strict=True):
            if not isinstance(text, str):
                raise DataError(
                    f"Row {index} of column {self._column!r} holds {type(text).__name__}, and "
                    f"texts are needed. Set data.column to a column of texts, or leave such rows "
                    f"out: dataset.filter(...).push_to_hub(...)."
                )
            rows.append(make_row(text))
        return {name: np.stack([row[name] for row in rows]) for name in ("tokens", "length")}
