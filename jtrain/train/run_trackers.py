"""A run, given to its trackers."""

from collections.abc import Callable
from pathlib import Path

from jtrain.config.dump import flatten, to_plain
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.speed import Speed
from jtrain.train.hooks.tracking import Tracking
from jtrain.train.trackers import TrackedRun


def tracking(
    config: RunConfig,
    path: Path,
    speed: Speed,
    *,
    run: str,
    tell: Callable[[str], None],
    resumed_at: int | None,
) -> Tracking:
    """The hook that tells the trackers of `config` how the run with the id `run` goes, in `path`,
    and how fast."""
    learning_rate = config.optimizer.learning_rate(config.steps)

    def more(step: int) -> dict[str, float]:
        pace, rate = speed.pace, f"{speed.unit}_per_second"
        known = {"learning_rate": float(learning_rate(step))}
        return known | ({rate: getattr(pace, rate), "waiting": pace.waiting} if pace else {})

    return Tracking(
        config.trackers,
        TrackedRun(config.name, path, flatten(to_plain(config)), run=run),
        every=min(config.log.every, config.steps),
        log=tell,
        resumed_at=resumed_at,
        more=more,
    )
