"""The batch script of docs/clusters.md, with other values."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
_SCRIPT = re.compile(r"^```bash\n(#!/bin/bash\n.*?)^```$", re.MULTILINE | re.DOTALL)


def published(page: Path = PAGE) -> str:
    """Return the first script of the page, as printed."""
    found = _SCRIPT.search(page.read_text())
    assert found, f"{page} has no script"
    return found[1]


def recipe(command: str, run: str, **options: str) -> str:
    """Return the script for another run: nothing but these values differs.

    Args:
        command: the words after `jtrain run`.
        run: name of the run.
        options: values of #SBATCH lines, by their names; empty: the line is left out.
    """
    script = _once(r"^run=.*$", f"run=runs/{run}", published())
    script = _once(r"(?<= jtrain run ).*$", command, script)
    for name, value in options.items():
        word = f"--{name.replace('_', '-')}="
        if value:
            script = _once(rf"(?<={word})\S+", value, script)
        else:
            script = _once(rf"^#SBATCH {word}.*\n", "", script)
    return script


def _once(pattern: str, new: str, text: str) -> str:
    changed, count = re.subn(pattern, lambda _: new, text, flags=re.MULTILINE)
    assert count == 1, f"{count} times {pattern} in the script"
    return changed
