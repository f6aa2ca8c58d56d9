"""Samples of a model: text in a readable file, and pictures as PNG files."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.core.loop import Hook
from jtrain.errors import DataError
from jtrain.io.png import encode_png, tile_images
from jtrain.io.regular_files import atomic_write, open_regular, read_bytes

MAX_BYTES = 1 << 30
_HEAD = re.compile(r"^=== step (\d+) ===$", re.MULTILINE)


class Samples(Hook):
    """Hook that appends a sample to a file after steps `every`, 2 `every`, ...

    Each sample has a heading: `=== step 300 ===`.

    Args:
        path: the file; recreated unless the run resumes.
        every: steps.
        sample: `state -> text`; must not keep the state.
        log: takes the step and the text too, to show it.
        resumed_at: step of the checkpoint that the run resumes from; later samples are removed,
            because the run makes them again. None for a new run.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        every: int,
        sample: Callable[[Any], str],
        log: Callable[[int, str], None] | None = None,
        resumed_at: int | None = None,
    ):
        self.every = every
        self._path, self._sample, self._log = Path(path), sample, log
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _truncate(self._path, resumed_at)

    def on_state(self, step: int, state: Any) -> None:
        """Write a sample."""
        text = self._sample(state)
        quoted = _HEAD.sub(r" \g<0>", text)  # a sample may contain a heading
        with open_regular(self._path, "ab") as file:
            file.write(f"=== step {step} ===\n{quoted}\n\n".encode("utf-8", "replace"))
        if self._log is not None:
            self._log(step, text)


def _truncate(path: Path, resumed_at: int | None) -> None:
    """Remove the samples after a step, and an incomplete last line."""
    found = read_bytes(path, most=MAX_BYTES, inside=path.parent) if path.exists() else b""
    text, end = found.decode("utf-8", "replace"), 0
    text = text[: text.rfind("\n") + 1]  # the last line may be incomplete
    if resumed_at is not None:
        later = (m.start() for m in _HEAD.finditer(text) if int(m[1]) > resumed_at)
        end = next(later, len(text))
    content = text[:end].encode()
    if content != found:
        atomic_write(path, content)


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
