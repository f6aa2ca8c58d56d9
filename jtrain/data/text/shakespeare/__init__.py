"""The plays of Shakespeare, which lie in the package: 37 plays, 4.7 million characters, 63 kinds.

Where they come from and how they were cleaned is told in PROVENANCE.md beside this file.
"""

import lzma
import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.text.text import Corpus, corpus


def plays() -> dict[str, str]:
    """Each play by its name, in the order of their names: `hamlet`, `henry-iv-part-1`.

    A speech is its speaker's name and a colon, its lines, and an empty line.
    """
    packed = Path(__file__).with_name("plays.txt.xz").read_bytes()
    _, *parts = re.split(r"^# (.*)\n", lzma.decompress(packed).decode("ascii"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def split(play: str) -> tuple[str, str]:
    """The first nine tenths of a play and the rest, parted between two speeches."""
    cut = play.rindex("\n\n", 0, len(play) * 9 // 10) + 2
    return play[:cut], play[cut:]


@configclass
class Shakespeare:
    """The plays of Shakespeare, character by character. The last tenth of every play is kept to
    judge by, so that both parts have the same speakers and the same kinds of play."""

    kind: Literal["shakespeare"] = "shakespeare"
    context: int = Field(default=64, gt=0)
    """Characters that the model sees at once."""

    def build(self) -> Corpus:
        """4.2 million characters to train on, 0.47 million to judge by."""
        train, validation = zip(*map(split, plays().values()), strict=True)
        return corpus("".join(train), "".join(validation), context=self.context)
