"""TensorBoard's event files, written without TensorFlow."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from jtrain.config.configclass import configclass
from jtrain.train.trackers.tracker import End, TrackedRun


@configclass
class TensorBoard:
    """Event files that `tensorboard --logdir runs` shows; `pip install 'jtrain[tensorboard]'`."""

    kind: Literal["tensorboard"] = "tensorboard"
    directory: str = ""
    """Where they lie, in a directory by the name of the run; empty: runs/NAME/tensorboard."""

    package: ClassVar[str] = "tensorboardX"

    def open(self, about: TrackedRun) -> "_Events":
        """Goes on after the files that are there; a new run hides what they say."""
        where = Path(self.directory) / about.name if self.directory else about.directory
        return _Events(where if self.directory else where / "tensorboard", about)


class _Events:
    id = "events"

    def __init__(self, where: Path, about: TrackedRun):
        package = importlib.import_module("tensorboardX")
        old = len(list(where.glob("events.out.tfevents.*")))
        self._writer = package.SummaryWriter(
            str(where),
            # A session that starts at step 0 hides all that was written there before it.
            purge_step=0 if old and not about.id else None,
            filename_suffix=f".{old}",  # two of one second would write over one another
        )
        if not about.id:
            table = "\n".join(f"    {key}: {value}" for key, value in about.config.items())
            self._writer.add_text("config", table, 0)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, end: End) -> None:
        del end
        self._writer.close()
