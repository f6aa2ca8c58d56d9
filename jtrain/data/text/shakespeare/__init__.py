"""Shakespeare by character: 37 plays in the package (4.7 million characters), Tiny Shakespeare."""

import hashlib
import lzma
import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.sources.known_sets import DataPackage, find_set
from jtrain.data.text.characters import read_text
from jtrain.data.text.text import Corpus, build_corpus
from jtrain.errors import DataError


def read_plays() -> dict[str, str]:
    """Return each play by its name, in the order of their names: `hamlet`, `henry-iv-part-1`.

    A speech is its speaker's name and a colon, its lines, and an empty line.
    """
    packed = Path(__file__).with_name("plays.txt.xz").read_bytes()
    _, *parts = re.split(r"^# (.*)\n", lzma.decompress(packed).decode("ascii"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def split_play(play: str) -> tuple[str, str]:
    """Split a play between two speeches: the first nine tenths and the rest."""
    cut = play.rindex("\n\n", 0, len(play) * 9 // 10) + 2
    return play[:cut], play[cut:]


@configclass
class Shakespeare:
    """The plays of Shakespeare, character by character. The last tenth of every play is held out
    for validation, so that both parts have the same speakers and the same kinds of play."""

    kind: Literal["shakespeare"] = "shakespeare"
    context: int = Field(default=64, gt=0)
    """Context length in characters."""

    def build(self) -> Corpus:
        """Return 4.2 million characters for training and 0.47 million for validation."""
        train, validation = zip(*map(split_play, read_plays().values()), strict=True)
        return build_corpus("".join(train), "".join(validation), context=self.context)


NAME, FILE = "tinyshakespeare", "input.txt"
DIGEST = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SOURCE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
WEB = DataPackage(NAME, None, (f"curl --create-dirs -o {{data}}/{NAME}/{FILE} {SOURCE}/{FILE}",))


@configclass
class TinyShakespeare:
    """1,115,394 characters of 65 kinds; the last tenth is held out for validation.

    Sources: https://github.com/karpathy/char-rnn (the text), https://github.com/karpathy/nanoGPT
    (the split).
    """

    kind: Literal["tiny_shakespeare"] = "tiny_shakespeare"
    context: int = Field(default=64, gt=0)
    """Context length in characters."""

    def build(self) -> Corpus:
        """Return 1,003,854 characters for training and 111,540 for validation.

        Raises:
            DataError: if the file does not exist, or is another text.
        """
        (path,) = find_set(NAME, [FILE], WEB)
        text = read_text(path)
        if (found := hashlib.sha256(text.encode()).hexdigest()) != DIGEST:
            raise DataError(
                f"{path} is not the text that published results are measured on: its sha256 is "
                f"{found[:12]}..., not {DIGEST[:12]}.... Get it again, or train on it as it is: "
                f"data.kind=text data.path={path}"
            )
        cut = len(text) * 9 // 10
        return build_corpus(text[:cut], text[cut:], context=self.context)
