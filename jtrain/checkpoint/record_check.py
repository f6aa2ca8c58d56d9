"""Record checks: the types in about.json."""

from collections.abc import Mapping
from typing import Any


def check_record(found: Any) -> None:
    """Raise ValueError unless about.json has its entries, each of its type."""
    types = {"step": int, "leaves": dict, "best": dict, "about": dict, "fingerprints": dict}
    record = {"fingerprints": {}, **found} if isinstance(found, dict) else {}
    wrong = [name for name, type_ in types.items() if not isinstance(record.get(name), type_)]
    if wrong:
        raise ValueError(f"it has no valid {wrong[0]}")
    best = record["best"]
    texts = [*record["leaves"].values(), *record["fingerprints"].values(), best.get("name", "")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a leaf or a name is no text")
    if not isinstance(best.get("value"), int | float | None):
        raise ValueError(f"its best value is {best['value']!r}, not a number")


def configured_best(about: Mapping[str, Any]) -> str:
    """Return the `checkpoint.best` of the config in a checkpoint; empty if none."""
    config = about.get("config")
    section = config.get("checkpoint") if isinstance(config, dict) else None
    best = section.get("best") if isinstance(section, dict) else None
    return best if isinstance(best, str) else ""
