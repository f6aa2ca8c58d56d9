"""What a tracker is: it opens a run in a service, and what it opened takes rows of numbers."""

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
    """Of the run, where a tracker may keep files of its own."""
    config: Mapping[str, Any]
    """Of each dotted key the value."""
    id: str = ""
    """Of the service's run to go on with; empty for a new one."""
    run: str = ""
    """The id of the run that jtrain has drawn; that of a copy is another."""


@runtime_checkable
class TrackerRun(Protocol):
    """A run in a service. Its methods are called in one thread, and may raise and take long."""

    id: str
    """What the service finds it by again."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds numbers of a step: `loss`, `valid/loss`, ... Steps do not fall."""
        ...

    def close(self, end: End) -> None:
        """Says how the run ended, and sends what is left."""
        ...


@runtime_checkable
class TrackerBackend(Protocol):
    """A tracker. `open` imports what it needs, and may raise and take long."""

    @property
    def kind(self) -> str:
        """What it is called in configs and in the log."""
        ...

    def open(self, about: TrackedRun) -> TrackerRun:
        """A new run in the service, or the one that `about.id` names."""
        ...


def check_installed(trackers: Sequence[TrackerBackend]) -> None:
    """Makes sure that their packages can be imported; imports none.

    Raises:
        ConfigError: with the line that installs what is missing.
    """
    for tracker in trackers:
        package = getattr(tracker, "package", None)
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"trackers: {tracker.kind} needs the package {package}, which is not installed. "
                f"Type: pip install 'jtrain[{tracker.kind}]', or leave it out: trackers=[]"
            )
