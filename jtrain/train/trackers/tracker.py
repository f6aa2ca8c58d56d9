"""Tracker protocols: a tracker opens a run in a service, and the run takes rows of numbers."""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from jtrain.errors import ConfigError

End: TypeAlias = Literal["done", "stopped", "failed"]


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """The run that is tracked."""

    name: str
    directory: Path
    """Directory of the run, where a tracker may keep its files."""
    config: Mapping[str, Any]
    """Values by dotted key."""
    id: str = ""
    """Id of the service's run to resume; empty for a new one."""
    run: str = ""
    """Id that jtrain gave the run; a copy of the run has another."""


@runtime_checkable
class TrackerRun(Protocol):
    """Run in a service. Its methods are called in one thread, and may raise and take long."""

    id: str
    """Id of the run in the service."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add numbers of a step: `loss`, `valid/loss`, ... Steps never decrease."""
        ...

    def close(self, end: End) -> None:
        """Report how the run ended, and send the remaining rows."""
        ...


@runtime_checkable
class TrackerBackend(Protocol):
    """Tracker. `open` imports its package, and may raise and take long."""

    @property
    def kind(self) -> str:
        """Name in configs and in the log."""
        ...

    def open(self, about: TrackedRun) -> TrackerRun:
        """Open a new run in the service, or the one with the id `about.id`."""
        ...


def check_installed(trackers: Sequence[TrackerBackend]) -> None:
    """Raise unless the packages of the trackers are installed; imports none.

    Raises:
        ConfigError: with the command that installs the missing package.
    """
    for tracker in trackers:
        package = getattr(tracker, "package", None)
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"trackers: {tracker.kind} needs the package {package}, which is not installed. "
                f"Type: pip install 'jtrain[{tracker.kind}]', or run without it: trackers=[]"
            )
