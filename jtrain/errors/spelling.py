"""Suggestions for misspelt names."""

import difflib
from collections.abc import Iterable

from jtrain.errors.synonyms import MEANINGS, SYNONYMS


def nearest_choice(word: str, choices: Iterable[str]) -> str:
    """Return the choice that `word` means in another library, or the most similar; else empty."""
    by_lower = {choice.lower(): choice for choice in choices}
    if (meant := MEANINGS.get(word.lower().replace("-", "_"))) in by_lower:
        return by_lower[meant]
    close = difflib.get_close_matches(word.lower(), by_lower, 1)
    return by_lower[close[0]] if close else ""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean adamw?`, or an empty text."""
    near = nearest_choice(word, choices)
    return f"; did you mean {near}?" if near else ""


def nearest_key(word: str, keys: Iterable[str]) -> str:
    """Return the key most like `word`, by its own name or by another library's; empty if none."""
    keys = list(keys)
    others = {other: key for other, key in SYNONYMS.items() if key in keys}
    found = nearest_choice(word, [*keys, *others])
    return others.get(found, found)
