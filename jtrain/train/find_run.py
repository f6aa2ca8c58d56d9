"""The directory of a run that was trained, by its path or its name."""

from pathlib import Path

from jtrain.config.suggestions import did_you_mean
from jtrain.errors import ConfigError
from jtrain.io.object_store import check_on_disk

RUNS = Path("runs")


def find_run(run: Path | str, asked: str) -> Path:
    """Return the directory of a run, by its path or by its name in runs/.

    Args:
        asked: who asked for it, for the message.

    Raises:
        ConfigError: if there is none, with those that there are.
    """
    check_on_disk(run, asked)
    for directory in (Path(run), RUNS / run):
        if (directory / "config.yaml").is_file():
            return directory
    there = sorted(path.parent.name for path in RUNS.glob("*/config.yaml"))
    raise ConfigError(
        f"{asked}: {run} is no directory of a run; in {RUNS}/ there is "
        f"{', '.join(there) or 'none: train one by jtrain run CONFIG'}"
        f"{did_you_mean(Path(run).name, there)}"
    )
