"""JPEG and PNG files in one folder a class: their config, and rows decoded on access."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from pydantic import Field

from jtrain.config.configclass import WrittenPath, configclass
from jtrain.config.registry import Kind
from jtrain.data.batches.fingerprint import FILE_BLOCK, fingerprint_arrays
from jtrain.data.batches.row_cache import cache_rows
from jtrain.data.images.augment import WindowDraws
from jtrain.data.images.decode import MOST_PIXELS, PIXELS, ImageSize, decode_image, decode_window
from jtrain.data.images.image_dataset import ImageDataset
from jtrain.data.sources.arrays import Arrays, hold_out
from jtrain.data.sources.records import Damaged
from jtrain.data.sources.source import Source
from jtrain.errors import DataError
from jtrain.io.disk_errors import may_pass
from jtrain.io.regular_files import open_regular

VALIDATION, TEST = ("validation", "valid", "val"), ("test",)


@configclass
class ResizedImages(Kind):
    """Fields of images that are decoded on access, and resized to one size."""

    height: int = Field(default=224, gt=0)
    """Height in pixels of all images after resizing."""
    width: int = Field(default=224, gt=0)
    """Width in pixels."""
    channels: Literal[1, 3] = 3
    """1: grey; 3: colours."""
    fit: Literal["crop", "pad", "squash"] = "crop"
    """Fit of an image of another shape: cut off the edges evenly (crop), add black edges (pad), or
    change the aspect ratio (squash)."""
    pixels: int = Field(default=PIXELS, gt=0, le=MOST_PIXELS)
    """Pixels above which a file is rejected before it is decoded, as a small file can fill the
    memory."""
    cache: WrittenPath = ""
    """Cache of the resized images: `memory`; or a folder, which later runs use too; empty: none.
    With a cache `augment.zoom` cuts its windows from the resized images, and not from the files."""

    @property
    def size(self) -> ImageSize:
        """The common size of all images."""
        return ImageSize(
            height=self.height,
            width=self.width,
            channels=self.channels,
            fit=self.fit,
            pixels=self.pixels,
        )


@configclass
class ImageFolder(ResizedImages):
    """JPEG and PNG files by class: FOLDER/CLASS/..., or FOLDER/train/CLASS/... and FOLDER/val/....

    Beside a folder `train`, the validation images are in `validation`, `valid` or `val`, and the
    test images in `test`; if one of these is missing, the other is used for both.
    """

    kind: Literal["image_folder"] = "image_folder"
    folder: str
    """The folder of the classes, or of `train` and the others; relative to the working folder."""
    damaged: Damaged = "stop"
    """Handling of a file that cannot be decoded: stop the run, or skip the file, log it, and use
    the next image in its place."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share that is held out for validation, if there is no folder for it."""

    def build(self) -> ImageDataset:
        """List the images, decoded on access, and number their classes by the order of their names.

        Raises:
            DataError: a folder without classes, a class without images, or a cache for which there
                is not a room.
        """
        root, shape = Path(self.folder), self.size.shape
        if not (root / "train").is_dir():
            rows, classes = self._rows(root, (), self.validation)
            train, held_out = hold_out(rows, self.validation)
            return ImageDataset(train, held_out, held_out, shape, len(classes))
        train, classes = self._rows(root / "train", ())
        parts = [
            next((root / name for name in names if (root / name).is_dir()), None)
            for names in (VALIDATION, TEST)
        ]
        read = {folder: self._rows(folder, classes)[0] for folder in parts if folder}
        if not read:
            raise DataError(
                f"{root} has a folder train and none to validate on. Add {root / 'val'} with "
                f"images by class, or set data.folder={root / 'train'}, of which data.validation "
                f"is held out."
            )
        chosen = (folder or other for folder, other in (parts, parts[::-1]))
        held_out, test = (read[folder] for folder in chosen if folder)
        return ImageDataset(train, held_out, test, shape, len(classes))

    def _rows(
        self, root: Path, classes: tuple[str, ...], validation: float = 0.0
    ) -> tuple[Source, tuple[str, ...]]:
        """Return the images of a folder, of which a share is then held out, and the classes."""
        paths, label, classes = find_images(root, classes)
        held_out = np.zeros(len(paths), bool)
        if validation:
            held_out[hold_out(Arrays(label=label), validation)[1].indices] = True
        files = ImageFiles(
            root, paths, label, size=self.size, damaged=self.damaged, held_out=held_out
        )
        return cache_rows(files, self.cache), classes


SAMPLED = 256  # files whose bytes are part of the fingerprint
_log = logging.getLogger(__name__)


class ImageFiles:
    """`image` (uint8, b h w c) and `label` (int32, b) of files, decoded on access.

    Args:
        root: the folder that the paths are relative to.
        paths: one for each row.
        label: the class of each row, int32, n.
        damaged: for a file that cannot be decoded `stop` raises; `skip` writes a line to the log
            `jtrain.data.images.image_folder` and returns the next valid image with its label, so
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
            row, image[place] = self._read(index, place, decode)
            label[place] = self.label[row]
        return {"image": image, "label": label}

    def _read(
        self, index: int, place: int, decode: Callable[[Path, int], np.ndarray]
    ) -> tuple[int, np.ndarray]:
        """Return the first row from `index` on that can be decoded, and its image."""
        for row in (*range(index, len(self)), *range(index)):
            if row not in self.skipped and self._held_out[row] == self._held_out[index]:
                try:
                    return row, decode(self.root / self.paths[row], place)
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


SUFFIXES = (".jpg", ".jpeg", ".png")


def find_images(
    root: Path, classes: tuple[str, ...] = ()
) -> tuple[list[str], np.ndarray, tuple[str, ...]]:
    """List the images of `root`/CLASS/, at any depth; files of other suffixes are skipped.

    Return their paths below `root` in the order of their names, the index of each one's class
    (int32, n), and the classes.

    Args:
        classes: the allowed classes; empty: all.

    Raises:
        DataError: no such folder, no class, a class without an image or not among `classes`, or a
            folder that cannot be read.
    """
    names = [entry.name for entry in _entries(root) if entry.is_dir()]
    if not names:
        contents = ", ".join(entry.name for entry in _entries(root)[:5]) or "nothing"
        raise DataError(
            f"{root} should have a folder for each class and has none; it holds {contents}. Put "
            f"the images into folders by class ({root}/cat/1.jpg), or set data.folder= to another."
        )
    if unknown := sorted(set(names) - set(classes)) if classes else []:
        raise DataError(
            f"{root} should have the training classes ({_few(classes)}) and also has "
            f"{_few(unknown)}. Remove the folder {root / unknown[0]}, or add images of it to the "
            f"training set."
        )
    known = classes or tuple(names)
    paths, label = list[str](), list[int]()
    for name in names:
        files = list(_images(root / name, name))
        if not files:
            raise DataError(
                f"{root / name} should hold images of the class {name} and holds none that ends in "
                f"{', '.join(SUFFIXES)}. Remove the folder, or put its images there."
            )
        paths += files
        label += [known.index(name)] * len(files)
    return paths, np.array(label, np.int32), known


def _images(folder: Path, name: str) -> Iterator[str]:
    """Yield the images below a folder, by their paths below the folder of all classes."""
    for entry in _entries(folder):
        below = f"{name}/{entry.name}"
        if entry.is_dir():
            yield from _images(folder / entry.name, below)
        elif entry.name.lower().endswith(SUFFIXES):
            yield below


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder without hidden files, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(
            f"{folder} cannot be listed ({error.strerror}; working folder: {Path.cwd()}). Make it "
            f"readable (chmod u+rx), or set data.folder= to one that has a folder for each class."
        ) from error
    return sorted(visible, key=lambda entry: entry.name)


def _few(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
