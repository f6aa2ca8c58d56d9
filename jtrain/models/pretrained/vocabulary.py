"""A published model's tokens and those of the data: one number must mean one token."""

from pathlib import Path

from jtrain.data.text.tokenizers import Tokenizer, describe_tokenizer
from jtrain.errors import DataError
from jtrain.models.pretrained.gguf_file import GGUF
from jtrain.models.pretrained.source import TOKENIZER, vocabulary_of, vocabulary_of_parsed


def check_vocabulary(pretrained: str, tokenizer: Tokenizer, *, option: str = "") -> None:
    """Raise DataError if a published model was trained with other tokens than the data has.

    Args:
        pretrained: the folder or GGUF file of the model; empty: nothing is compared.
        tokenizer: of the data. Plain numbers, without a text behind them, are not compared.
        option: the option that names the tokenizer; empty: the data is written with it.
    """
    if not pretrained or tokenizer.kind == "numbers":
        return
    path = Path(pretrained)
    theirs = vocabulary_of(path) if path.exists() else None
    if theirs is None:
        return
    parsed = tokenizer.description().get("tokenizer")
    ours = vocabulary_of_parsed(parsed) if isinstance(parsed, dict) else {}
    differ = [token for token, number in ours.items() if theirs.get(token) != number]
    if ours and not differ:
        return
    file = pretrained if path.suffix == GGUF else f"{pretrained}/{TOKENIZER}"
    found = (
        f"{len(differ):,} of its tokens have another number there, {differ[0]!r} among them"
        if differ
        else f"it is of another kind than {file}"
    )
    remedy = (
        f"Set {option}={file}."
        if option
        else f"Write the data with the model's: jtrain data prepare FILES --tokenizer {file} "
        f"--out DIR"
    )
    raise DataError(
        f"the data has the tokenizer {describe_tokenizer(tokenizer)}, and model.from={pretrained} "
        f"was trained with another one: {found}. {remedy}"
    )
