"""Image files of a folder with one subfolder a class."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jtrain.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png")


class ImageListing(NamedTuple):
    """The files of a folder, in the order of their names."""

    paths: list[str]
    """Relative to the folder."""
    label: np.ndarray
    """The index of each file's class, int32, n."""
    classes: tuple[str, ...]
    """Names of the folders, sorted."""


def find_images(root: Path, classes: tuple[str, ...] = ()) -> ImageListing:
    """List the images of `root`/CLASS/, at any depth; files of other suffixes are skipped.

    Args:
        classes: the allowed classes; empty: all.

    Raises:
        DataError: no such folder, no class, a class without an image or not among `classes`, a
            folder that cannot be read, or a link that leads out of `root`.
    """
    if not root.is_dir():
        raise DataError(
            f"There is no folder {root} (working folder: {Path.cwd()}). Set data.folder= to one "
            "that has a folder for each class, with its images."
        )
    inside, folders = root.resolve(), [entry for entry in _entries(root) if entry.is_dir()]
    for entry in folders:
        if entry.is_symlink():
            _check_link(Path(entry.path), inside)
    names = [entry.name for entry in folders]
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
        files = list(_images(root / name, name, inside))
        if not files:
            raise DataError(
                f"{root / name} should hold images of the class {name} and holds none that ends in "
                f"{', '.join(SUFFIXES)}. Remove the folder, or put its images there."
            )
        paths += files
        label += [known.index(name)] * len(files)
    return ImageListing(paths, np.array(label, np.int32), known)


def _images(folder: Path, name: str, inside: Path) -> Iterator[str]:
    """Yield the images below a folder, by their paths below the folder of all classes."""
    for entry in _entries(folder):
        if entry.is_symlink():
            _check_link(Path(entry.path), inside)
        below = f"{name}/{entry.name}"
        if entry.is_dir():
            yield from _images(folder / entry.name, below, inside)
        elif entry.name.lower().endswith(SUFFIXES):
            yield below


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder without hidden files, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(
            f"{folder} cannot be listed ({error.strerror}). Make it readable (chmod u+rx)."
        ) from error
    return sorted(visible, key=lambda entry: entry.name)


def _check_link(link: Path, inside: Path) -> None:
    """Raise DataError if a link leads out of the folder, nowhere, or round in a circle."""
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{link} is a link to {os.readlink(link)}, which does not exist. Remove the link."
        ) from error
    if not target.is_relative_to(inside) or link.parent.resolve().is_relative_to(target):
        raise DataError(
            f"{link} should stay within {inside} and is a link to {target}. Copy its target (cp "
            "-rL), or remove the link."
        )


def _few(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
