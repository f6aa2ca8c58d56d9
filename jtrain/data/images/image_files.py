"""Rows of image files, each decoded when it is read."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jtrain.data.batches.fingerprint import FILE_BLOCK, fingerprint_arrays
from jtrain.data.images.decode import ImageSize, decode_image, decode_window
from jtrain.data.images.windows import WindowDraws
from jtrain.data.sources.records import Damaged
from jtrain.errors import DataError
from jtrain.io.regular_files import open_regular
from jtrain.io.transient import may_pass

SAMPLED = 256  # files whose bytes are part of the fingerprint
_log = logging.getLogger(__name__)


class ImageFiles:
    """`image` (uint8, b h w c) and `label` (int32, b) of files, decoded on access.

    Args:
        root: the folder that the paths are relative to.
        paths: one for each row.
        label: the class of each row, int32, n.
        size: the common size of all images.
        damaged: for a file that cannot be decoded `stop` raises; `skip` writes a line to the log
            `jtrain.data.images.image_files` and returns the next valid image with its label, so
            that every index still has a row, and always the same row.
        held_out: the rows of the validation (bool, n), if they are among these: an image that is
            skipped is replaced by one on its own side.

    Raises:
        DataError: on access, if a file cannot be decoded; see `decode_image`.
    """

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        label: np.ndarray,
        *,
        size: ImageSize,
        damaged: Damaged = "stop",
        held_out: np.ndarray | None = None,
    ):
        self.root, self.paths, self.label = root, list(paths), np.asarray(label, np.int32)
        self.size = size
        self.damaged: Damaged = damaged
        self._held_out = np.zeros(len(self.paths), bool) if held_out is None else held_out
        self.skipped: dict[int, str] = {}
        """The damaged files that were read, and the error of each."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        return self._read_rows(indices, lambda path, row: decode_image(path, self.size))

    def read_windows(self, indices: np.ndarray, draws: WindowDraws, /) -> dict[str, np.ndarray]:
        """Return the rows at `indices`, of each image a random window; see `decode_window`."""
        return self._read_rows(
            indices, lambda path, row: decode_window(path, self.size, draws.row(row))
        )

    def fingerprint(self) -> str:
        """Return the fingerprint: names, sizes, labels, and the first bytes of some files."""
        return self._digest(dates=False)

    def version(self) -> str:
        """Return the version for a cache: the fingerprint with the dates of all files."""
        found = self._digest(dates=True)
        if self.damaged == "stop" or not self._held_out.any():
            return found
        return f"{found} held out {fingerprint_arrays(len(self), {'': self._held_out})}"

    def _read_rows(
        self, indices: np.ndarray, decode: Callable[[Path, int], np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the rows at `indices`; `decode` is given the file and its place in the batch."""
        size = self.size
        image = np.empty((len(indices), size.height, size.width, size.channels), np.uint8)
        label = np.empty(len(indices), np.int32)
        for place, index in enumerate(indices.tolist()):
            row, image[place] = self._read(index, lambda path, place=place: decode(path, place))
            label[place] = self.label[row]
        return {"image": image, "label": label}

    def _read(self, index: int, decode: Callable[[Path], np.ndarray]) -> tuple[int, np.ndarray]:
        """Return the first row from `index` on that can be decoded, and its image."""
        for row in (*range(index, len(self)), *range(index)):
            if row not in self.skipped and self._held_out[row] == self._held_out[index]:
                try:
                    return row, decode(self.root / self.paths[row])
                except DataError as error:
                    if self.damaged == "stop" or may_pass(error):
                        raise
                    self.skipped[row] = str(error)
                    _log.warning("skipped: %s", error)
        raise DataError(
            f"None of the {len(self)} images in {self.root} can be decoded; the first: "
            f"{next(iter(self.skipped.values()))}"
        )

    def _digest(self, *, dates: bool) -> str:
        import xxhash

        digest, total = xxhash.xxh3_64(), 0
        digest.update(f"{self.size} {self.damaged}".encode())
        digest.update(self.label.tobytes())
        for path in self.paths:
            found = os.stat(self.root / path)
            total += found.st_size
            date = found.st_mtime_ns if dates else ""
            digest.update(os.fsencode(f"{path}\0{found.st_size}\0{date}\n"))
        rows = len(self)
        for row in sorted({k * rows // SAMPLED for k in range(SAMPLED)}):
            with open_regular(self.root / self.paths[row], buffering=0) as file:
                digest.update(file.read(FILE_BLOCK))
        return f"{rows} images of {total} bytes {digest.hexdigest()}"
