"""A run that `jtrain eval --watch` follows: its evaluated rows, and its status."""

import json
from pathlib import Path

from jtrain.train.evaluation_rows import NAME

KEEP_ALL = ("checkpoint.every=4", "checkpoint.keep=9")


def rows(run: Path) -> list[dict]:
    """Return the rows of evaluations.jsonl that are complete."""
    path = run / NAME
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def set_status(run: Path, status: str) -> None:
    """Change the status of a run."""
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "status": status}))
