"""Suggestions for misspelt names."""

import difflib
import functools
from collections.abc import Iterable

from jtrain.errors.synonyms import MEANINGS, SYNONYMS

_SHORTEST = 6  # letters; a shorter name is one slip away from too many words


@functools.lru_cache(maxsize=4096)
def is_one_slip_from(name: str, known: tuple[str, ...]) -> bool:
    """Return whether the end of a name is one slip away from a known one.

    A slip is a letter too many, too few or another, or two neighbours swapped.

    Args:
        name: words joined by `_`, in lower case.
        known: the right names, in the same form.
    """
    words = name.split("_")
    ends = {"_".join(words[-count:]) for count in (1, 2, 3)}
    return any(_one_slip(end, right) for end in ends for right in _long(known))


def _long(known: Iterable[str]) -> list[str]:
    return [name for name in known if len(name) >= _SHORTEST]


def _one_slip(one: str, other: str) -> bool:
    if one == other or abs(len(one) - len(other)) > 1:
        return False
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if same is None:  # one is the other and a letter
        return True
    first, second = one[same:], other[same:]
    return (
        first[1:] == second[1:]
        or first[1:] == second
        or first == second[1:]
        or (first[:2] == second[1::-1] and first[2:] == second[2:])
    )


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
