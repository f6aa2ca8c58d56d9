"""Notes on where a run goes on: what to type where it must not, and what a reader should know."""

from collections.abc import Mapping
from typing import Any

from jtrain.checkpoint import CheckpointManager
from jtrain.train.experiment import RunConfig
from jtrain.train.run_dir import RunDir


def ways_out(there: RunDir, config: RunConfig, another: str, again: str, settings: str) -> str:
    """Return what to type where the run in the directory is of other values.

    Args:
        again: what was given to go on with it, if anything.
        settings: what is typed after config.yaml to have the values of the run; mostly empty.
    """
    if again:
        that = f"{again}, with the values that are there"
    else:  # by its own name, for it may lie there as a copy of another
        that = f"{there.resume_command} name={config.name} {settings}".rstrip()
    return f"Start a new run: {another}\nor go on with that one: {that}"


def copied(directory: RunDir, identity: Mapping[str, Any]) -> list[str]:
    """Return a line where the run's directory is a copy of that of another run, or was moved."""
    known = directory.facts()
    if known.get("id", identity["id"]) == identity["id"]:
        return []
    return [
        f"{directory.path} was copied or moved from {known.get('place', 'another place')}: it is a "
        f"run of its own from now on"
    ]


def gone(directory: RunDir, checkpoints: CheckpointManager, start: int | None) -> list[str]:
    """Return a line about the checkpoint that run.json names, where nothing else was said of it."""
    stands = directory.facts()
    step = stands.get("step", 0) if stands.get("status") in {"running", "stopped"} else 0
    if step <= (start or 0) or any(f"checkpoint {step} " in line for line in checkpoints.notices):
        return []
    return [f"checkpoint {step}, which {directory.status} names, is gone"]
