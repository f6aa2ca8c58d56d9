"""Records of checkpoints: what about.json holds, checked for its types."""

from collections.abc import Mapping
from typing import Any


def check_record(found: Any) -> None:
    """Raise ValueError unless about.json has its parts, each of its type."""
    types = {"step": int, "leaves": dict, "best": dict, "about": dict, "fingerprints": dict}
    parts = {"fingerprints": {}, **found} if isinstance(found, dict) else {}
    wrong = [name for name, of in types.items() if not isinstance(parts.get(name), of)]
    if wrong:
        raise ValueError(f"it has no {wrong[0]}")
    best = parts["best"]
    texts = [*parts["leaves"].values(), *parts["fingerprints"].values(), best.get("name", "")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a leaf or a name is no text")
    if not isinstance(best.get("value"), int | float | None):
        raise ValueError(f"its best value is {best['value']!r}, and no number")


def asked_best(about: Mapping[str, Any]) -> str:
    """Return the `checkpoint.best` of the config that is kept with a checkpoint; empty if none."""
    config = about.get("config")
    asked = config.get("checkpoint") if isinstance(config, dict) else None
    best = asked.get("best") if isinstance(asked, dict) else None
    return best if isinstance(best, str) else ""
