"""Shakespeare: the packaged plays (37 plays, 4.7 million characters of 63 kinds), by character.

PROVENANCE.md beside this file names their source and how they were cleaned.
"""

import lzma
import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.text.text import Corpus, build_corpus


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
