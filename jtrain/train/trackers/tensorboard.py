"""TensorBoard tracker: event files, written without TensorFlow."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from jtrain.config.configclass import configclass
from jtrain.config.write_paths import WrittenPath
from jtrain.train.trackers.tracker import End, TrackedRun


@configclass
class TensorBoard:
    """Event files that `tensorboard --logdir runs` shows; `pip install 'jtrain[tensorboard]'`."""

    kind: Literal["tensorboard"] = "tensorboard"
    directory: WrittenPath = ""
    """Directory of the event files, in a folder named after the run; empty:
    runs/NAME/tensorboard."""

    package: ClassVar[str] = "tensorboardX"

    def open(self, about: TrackedRun) -> "_Events":
        """Start a file beside existing ones, which a new run hides."""
        if self.directory:
            return _Events(Path(self.directory) / about.name, about)
        return _Events(about.directory / "tensorboard", about)


class _Events:
    id = "events"

    def __init__(self, folder: Path, about: TrackedRun):
        package = importlib.import_module("tensorboardX")
        old = len(list(folder.glob("events.out.tfevents.*")))
        self._writer = package.SummaryWriter(
            str(folder),
            # A session that starts at step 0 hides everything that was written before it.
            purge_step=0 if old and not about.id else None,
            filename_suffix=f".{old}",  # files of the same second would overwrite each other
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
