"""The run that a verb is about, and which of its steps."""

from pathlib import Path
from typing import Literal

from jtrain.errors import CheckpointError, ConfigError


def config_of(run: str, verb: str) -> Path:
    """The config of a run, by its directory or its name in runs/."""
    for directory in (Path(run), Path("runs") / run):
        if (directory / "config.yaml").is_file():
            return directory / "config.yaml"
    there = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
    raise ConfigError(
        f"jtrain {verb}: {run} is no directory of a run; in runs/ there is "
        f"{', '.join(there) or 'none: train one by jtrain run CONFIG'}"
    )


def asked_step(step: str, verb: str) -> int | Literal["newest", "best"]:
    """The step that was asked for, by number or by word."""
    if step == "newest" or step == "best":
        return step
    if step.isdigit():
        return int(step)
    raise CheckpointError(
        f"jtrain {verb}: --step {step} is no step; write newest, best or a number"
    )
