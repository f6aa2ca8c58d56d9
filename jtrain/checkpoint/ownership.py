"""Checkpoint ownership: the run that a checkpoint belongs to, and the types in its record."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """Identity of a run: a random id from its start, sealed into its checkpoints."""

    run: str
    """The id."""
    ancestors: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Ids of the runs that this run was copied from, each with its last copied step."""

    def owns(self, run: str, step: int) -> bool:
        """Return whether a checkpoint of a step, sealed by the run `run`, belongs to this run."""
        return run == self.run or step <= self.ancestors.get(run, -1)

    def fault(self, run: str, step: int) -> str:
        """Describe a checkpoint of another run; empty if it belongs to this run."""
        if self.owns(run, step):
            return ""
        copied = " after the copy" if run in self.ancestors else ""
        other = f"{run or 'without an id'}{copied}"
        return f"is a checkpoint of another run ({other}), and this run is {self.run}"


def check_record(found: Any) -> None:
    """Raise ValueError unless about.json has its entries, each of its type."""
    types = {"step": int, "leaves": dict, "best": dict, "about": dict, "fingerprints": dict}
    record = found if isinstance(found, dict) else {}
    wrong = [name for name, type_ in types.items() if not isinstance(record.get(name), type_)]
    if wrong:
        raise ValueError(f"it has no valid {wrong[0]}")
    best = record["best"]
    texts = [*record["leaves"].values(), *record["fingerprints"].values(), best.get("name", "")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a leaf or a name is not text")
    if not isinstance(best.get("value"), int | float | None):
        raise ValueError(f"its best value is {best['value']!r}, not a number")


def configured_best(about: Mapping[str, Any]) -> str:
    """Return the `checkpoint.best` of the config in a checkpoint; empty if none."""
    config = about.get("config")
    section = config.get("checkpoint") if isinstance(config, dict) else None
    best = section.get("best") if isinstance(section, dict) else None
    return best if isinstance(best, str) else ""
