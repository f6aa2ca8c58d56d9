"""Values of a config.json, or of a GGUF file, that a family computes, and the check of them."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from jtrain.errors import CheckpointError


class Condition(NamedTuple):
    """A condition on a value, in words and as a function."""

    words: str
    holds: Callable[[Any], bool]


Supported: TypeAlias = Mapping[str, "tuple[Any, ...] | Supported"]
"""What is computed of each entry: conditions or single values, or the table of an object."""

SIZE = Condition("a whole number above 0", lambda x: type(x) is int and 0 < x < 2**31)
# A model has a part for each: a count without a bound would be built for ever.
COUNT = Condition("a whole number from 1 to 9999", lambda x: type(x) is int and 0 < x < 10_000)
NUMBER = Condition("a number above 0", lambda x: type(x) in (int, float) and 0 < x < 1e300)
FLAG = Condition("true or false", lambda x: type(x) is bool)
TEXT = Condition("a text", lambda x: isinstance(x, str))
OBJECT = Condition("an object", lambda x: isinstance(x, Mapping))


def is_list_of(*supported: Any, length: int | None = None) -> Condition:
    """Return the condition of a list of such values; None: of any length."""
    return Condition(
        f"a list of {_words(supported)}",
        lambda x: (
            isinstance(x, list | tuple)
            and length in (None, len(x))
            and all(is_supported(value, supported) for value in x)
        ),
    )


def is_supported(value: Any, supported: tuple[Any, ...]) -> bool:
    """Return whether a value is one of these, or fulfils one of the conditions."""
    return any(
        one.holds(value)
        if isinstance(one, Condition)
        else value == one and isinstance(value, bool) == isinstance(one, bool)
        for one in supported
    )


def check_entries(
    entries: Mapping[str, Any],
    supported: Supported,
    *,
    file: str = "config.json",
    where: str = "",
    family: str = "",
) -> None:
    """Raise CheckpointError if an entry has a value that the model does not compute.

    Args:
        entries: those of a file; one that is missing has its default.
        supported: the table of the family.
        file: the name of the file.
        where: the objects around the entries, each with a dot behind it.
        family: the name of the family; empty: that in the entries.
    """
    family = family or entries.get("model_type") or entries.get("architecture", "")
    for key in [key for key in supported if key in entries]:
        values, found = supported[key], entries[key]
        if isinstance(values, Mapping):
            if isinstance(found, Mapping):
                check_entries(found, values, file=file, where=f"{where}{key}.", family=family)
                continue
            values = (OBJECT, None)
        if not is_supported(found, values):
            raise CheckpointError(
                f"{file} has {where}{key}={reprlib.repr(found)}, and for the family {family} "
                f"jtrain computes only {_words(values)}. Use a model with one of these; weights "
                f"read into another function give wrong outputs."
            )


def _words(supported: tuple[Any, ...]) -> str:
    return " or ".join(x.words if isinstance(x, Condition) else repr(x) for x in supported)
