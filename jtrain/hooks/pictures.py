"""Writes the pictures that an experiment makes into the run's directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.errors import DataError
from jtrain.hooks.png import grid, png
from jtrain.hooks.rewrite import rewrite


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
            picture = png(grid(np.asarray(images)))
        except DataError as error:
            raise DataError(f"picture {name}: {error}") from None
        files.append(folder / f"{name}-{step}.png")
        rewrite(files[-1], picture)
    return files
