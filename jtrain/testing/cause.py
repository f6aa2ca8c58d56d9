"""The cause of a difference: a name, and a sentence for the author of the loss."""

from typing import NamedTuple


class Cause(NamedTuple):
    """A cause with its explanation; `fault` is False if the cause is reported as no error."""

    name: str
    why: str
    fault: bool = True
