"""Writes the pictures that an experiment makes of a state into the run's directory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.core.loop import Hook
from jtrain.core.types import Metrics
from jtrain.errors import DataError
from jtrain.io.atomic_write import atomic_write
from jtrain.io.png import encode_png, grid


class Pictures(Hook):
    """Draws the state after steps `every`, 2 `every`, ... and where it is told to.

    Args:
        folder: of the files.
        every: steps.
        draw: a state -> its pictures, of each name images b h w c; it does not keep the state.
    """

    def __init__(self, folder: Path, *, every: int, draw: Callable[[Any], Mapping[str, Any]]):
        self.every, self._folder, self._draw = every, folder, draw
        self._drawn = 0

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Draws it."""
        self.at(step, state)

    def at(self, step: int, state: Any) -> None:
        """Draws the state after a step, unless it just did."""
        if step != self._drawn:
            write_pictures(self._folder, step, self._draw(state))
        self._drawn = step


def write_pictures(folder: Path, step: int, pictures: Mapping[str, Any]) -> list[Path]:
    """Each name's images b h w c as one grid, `NAME-STEP.png`; the files.

    Raises:
        DataError: if a name is no file's, or what it names are no images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, images in pictures.items():
        if not name or set(name) & set('/\\:*?"<>|') or name.startswith("."):
            raise DataError(f"a picture is called {name!r}; call it what a file may be: samples")
        try:
            picture = encode_png(grid(np.asarray(images)))
        except DataError as error:
            raise DataError(f"picture {name}: {error}") from None
        files.append(folder / f"{name}-{step}.png")
        atomic_write(files[-1], picture)
    return files
