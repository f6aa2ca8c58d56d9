"""What someone probably meant to type."""

import difflib
from collections.abc import Iterable


def nearest(word: str, choices: Iterable[str]) -> str:
    """The choice most like `word`; empty if none is."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, 1)
    return by_lower[close[0]] if close else ""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean adamw?`, or nothing."""
    near = nearest(word, choices)
    return f"; did you mean {near}?" if near else ""
