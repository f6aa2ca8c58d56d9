"""Lookup of a run's directory, by its path or its name."""

from pathlib import Path

from jtrain.config.suggestions import did_you_mean
from jtrain.config.top import RUNS
from jtrain.errors import ConfigError
from jtrain.io.object_store import check_local_run


def find_run(run: Path | str, asked: str) -> Path:
    """Return the directory of a run, by its path or by its name in runs/.

    Args:
        asked: name of the caller, for the message.

    Raises:
        ConfigError: if there is no such run, with the existing ones.
    """
    check_local_run(run, asked)
    for directory in (Path(run), RUNS / run):
        if (directory / "config.yaml").is_file():
            return directory
    names = sorted(path.parent.name for path in RUNS.glob("*/config.yaml"))
    raise ConfigError(
        f"{asked}: {run} is no directory of a run; in {RUNS}/ there is "
        f"{', '.join(names) or 'none: train one by jtrain run CONFIG'}"
        f"{did_you_mean(Path(run).name, names)}"
    )
