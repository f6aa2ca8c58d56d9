"""Tracking hook of a run, built from its config."""

from collections.abc import Callable
from pathlib import Path

from jtrain.config.dump import flatten, to_plain
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.speed import Speed
from jtrain.train.hooks.tracking import Tracking
from jtrain.train.trackers import TrackedRun


def build_tracking(
    config: RunConfig,
    path: Path,
    speed: Speed,
    *,
    run: str,
    log: Callable[[str], None],
    resumed_at: int | None,
) -> Tracking:
    """Return the hook that sends metrics, learning rate and speed to the trackers of `config`.

    Args:
        path: the run's directory.
        run: the run's id.
    """
    learning_rate = config.optimizer.learning_rate(config.steps)

    def more(step: int) -> dict[str, float]:
        pace, rate = speed.pace, f"{speed.unit}_per_second"
        numbers = {"learning_rate": float(learning_rate(step))}
        return numbers | ({rate: getattr(pace, rate), "waiting": pace.waiting} if pace else {})

    return Tracking(
        config.trackers,
        TrackedRun(config.name, path, flatten(to_plain(config)), run=run),
        every=min(config.log.every, config.steps),
        log=log,
        resumed_at=resumed_at,
        more=more,
    )
