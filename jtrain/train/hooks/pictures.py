"""Pictures that a model draws, as PNG files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.core.loop import Hook
from jtrain.errors import DataError
from jtrain.io.png import encode_png, tile_images
from jtrain.io.regular_files import atomic_write


class Pictures(Hook):
    """Hook that draws the state after steps `every`, 2 `every`, ...

    Args:
        folder: of the files.
        every: steps.
        draw: `state -> pictures`, images b h w c by name; must not keep the state.
    """

    def __init__(self, folder: Path, *, every: int, draw: Callable[[Any], Mapping[str, Any]]):
        self.every, self._folder, self._draw = every, folder, draw
        self._drawn = 0

    def on_state(self, step: int, state: Any) -> None:
        """Draw the state."""
        self.at(step, state)

    def at(self, step: int, state: Any) -> None:
        """Draw the state after a step, unless it was drawn already."""
        if step != self._drawn:
            write_pictures(self._folder, step, self._draw(state))
        self._drawn = step


def write_pictures(folder: Path, step: int, pictures: Mapping[str, Any]) -> list[Path]:
    """Write the images b h w c of each name as one grid, `NAME-STEP.png`; return the files.

    Raises:
        DataError: if a name cannot be a file name, or its value is no array of images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, images in pictures.items():
        if not name or set(name) & set('/\\:*?"<>|') or name.startswith("."):
            raise DataError(f"a picture is called {name!r}; give it a valid file name: samples")
        try:
            picture = encode_png(tile_images(np.asarray(images)))
        except DataError as error:
            raise DataError(f"picture {name}: {error}") from None
        files.append(folder / f"{name}-{step}.png")
        atomic_write(files[-1], picture)
    return files
