"""The cause of a difference: a name, and a sentence for the person who wrote the loss."""

from typing import NamedTuple


class Cause(NamedTuple):
    """A name, a sentence, and whether it is a fault or only to be known."""

    name: str
    why: str
    fault: bool = True
