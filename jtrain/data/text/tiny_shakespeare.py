"""Tiny Shakespeare: the text on which small character models are compared."""

import hashlib
from typing import Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.sources.known_sets import DataPackage, find_set
from jtrain.data.text.characters import read_text
from jtrain.data.text.text import Corpus, corpus
from jtrain.errors import DataError

NAME, FILE = "tinyshakespeare", "input.txt"
DIGEST = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SOURCE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
WEB = DataPackage(NAME, None, (f"curl --create-dirs -o {{data}}/{NAME}/{FILE} {SOURCE}/{FILE}",))


@configclass
class TinyShakespeare:
    """1,115,394 characters of 65 kinds; the last tenth is kept to judge by.

    Sources: https://github.com/karpathy/char-rnn (the text), https://github.com/karpathy/nanoGPT
    (where it is cut).
    """

    kind: Literal["tiny_shakespeare"] = "tiny_shakespeare"
    context: int = Field(default=64, gt=0)
    """Characters that the model sees at once."""

    def build(self) -> Corpus:
        """1,003,854 characters to train on, 111,540 to judge by.

        Raises:
            DataError: if the file is not there, or is another.
        """
        (path,) = find_set(NAME, [FILE], WEB)
        text = read_text(path)
        if (found := hashlib.sha256(text.encode()).hexdigest()) != DIGEST:
            raise DataError(
                f"{path} is another text than the one that results are compared on: its sha256 is "
                f"{found[:12]}..., not {DIGEST[:12]}.... Get it again, or train on it as it is: "
                f"data.kind=text data.path={path}"
            )
        cut = len(text) * 9 // 10
        return corpus(text[:cut], text[cut:], context=self.context)
