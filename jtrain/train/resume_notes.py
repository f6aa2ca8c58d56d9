"""Resume notes: advice if a run cannot be resumed, and lines of its log if it is."""

from collections.abc import Mapping
from typing import Any

from jtrain.checkpoint import CheckpointManager
from jtrain.distributed.compiler_flags import VARIABLES
from jtrain.train.code_digest import digest_code, find_edited
from jtrain.train.run_dir import RunDir


def resume_advice(run_dir: RunDir, name: str, another: str, again: str, settings: str) -> str:
    """Return what to type if the stored run has other values.

    Args:
        name: of the run, by its config.
        another: the command that starts another run.
        again: the command that resumes the run, if one was given.
        settings: typed after config.yaml to get the values of the run; mostly empty.
    """
    if again:
        command = f"{again}, with the values of that run"
    else:  # by its own name, since it may be a copy of another run
        command = f"{run_dir.resume_command} name={name} {settings}".rstrip()
    return f"Start a new run: {another}\nor resume that one: {command}"


def describe_copy(run_dir: RunDir, identity: Mapping[str, Any]) -> list[str]:
    """Return a line if the run's directory is a copy of another run's, or was moved."""
    known = run_dir.facts()
    if known.get("id", identity["id"]) == identity["id"]:
        return []
    return [
        f"{run_dir.path} was copied or moved from {known.get('place', 'another place')}: it is a "
        f"separate run from now on"
    ]


def describe_code(run_dir: RunDir, root: Any, another: str) -> list[str]:
    """Return a line if the code of a run, its `root`, was edited since its last start."""
    edited = find_edited(run_dir.facts().get("code"), digest_code(root))
    line = (
        f"the code of the run was edited since its last start: {', '.join(edited)}. Steps that "
        f"were taken are of the old code; to train the new code alone: {another}"
    )
    return [line] if edited else []


def describe_flags(run_dir: RunDir, environ: Mapping[str, str]) -> list[str]:
    """Return a line for each variable of the compiler that differs from the run's last start."""
    known = run_dir.facts().get("flags")
    if not isinstance(known, dict):  # a new run
        return []
    return [
        f"{name} was {known.get(name) or 'not set'}, and is {environ.get(name) or 'not set'}: the "
        f"last bits of results may differ"
        for name in VARIABLES
        if known.get(name, "") != environ.get(name, "")
    ]


def describe_missing_checkpoint(
    run_dir: RunDir, checkpoints: CheckpointManager, start: int | None
) -> list[str]:
    """Return a line if the checkpoint in run.json is missing and no other line mentions it."""
    facts = run_dir.facts()
    saved = facts.get("status") in {"running", "stopped", "done"}  # its step is a checkpoint's
    step = facts.get("step", 0) if saved else 0
    if step <= (start or 0) or any(f"checkpoint {step} " in line for line in checkpoints.notices):
        return []
    return [f"checkpoint {step}, which {run_dir.status} names, is missing"]
