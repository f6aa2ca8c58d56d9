"""Suggestions for misspelt names."""

import difflib
from collections.abc import Iterable

from jtrain.errors.synonyms import SYNONYMS


def nearest_choice(word: str, choices: Iterable[str]) -> str:
    """Return the choice most similar to `word`; empty if none is similar."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, 1)
    return by_lower[close[0]] if close else ""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean adamw?`, or nothing."""
    near = nearest_choice(word, choices)
    return f"; did you mean {near}?" if near else ""


def nearest_key(word: str, keys: Iterable[str]) -> str:
    """Return the key most like `word`, by its own name or by another library's; empty if none."""
    keys = list(keys)
    others = {other: key for other, key in SYNONYMS.items() if key in keys}
    found = nearest_choice(word, [*keys, *others])
    return others.get(found, found)
