"""The image files of a folder that has a folder for each class."""

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
    """The place of each file's class among the classes, int32, n."""
    classes: tuple[str, ...]
    """Names of the folders, sorted."""


def find_images(root: Path, classes: tuple[str, ...] = ()) -> ImageListing:
    """List the images of `root`/CLASS/, at any depth; files of other suffixes are left out.

    Args:
        classes: those that there may be; empty: all that are found.

    Raises:
        DataError: no such folder, no class, a class without an image or not among `classes`, a
            folder that cannot be read, or a link that leads out of `root`.
    """
    if not root.is_dir():
        raise DataError(
            f"There is no folder {root}, seen from {Path.cwd()}. Set data.folder= to one that has "
            f"a folder for each class, with its images."
        )
    inside, folders = root.resolve(), [entry for entry in _entries(root) if entry.is_dir()]
    for entry in folders:
        if entry.is_symlink():
            _refuse_outside(Path(entry.path), inside)
    names = [entry.name for entry in folders]
    if not names:
        holds = ", ".join(entry.name for entry in _entries(root)[:5]) or "nothing"
        raise DataError(
            f"{root} was to have a folder for each class and has none; it holds {holds}. Put the "
            f"images into folders by class ({root}/cat/1.jpg), or set data.folder= to another."
        )
    if unknown := sorted(set(names) - set(classes)) if classes else []:
        raise DataError(
            f"{root} was to have the classes that are trained on ({_few(classes)}) and has "
            f"{_few(unknown)} besides. Remove the folder {root / unknown[0]}, or add images of it "
            f"to those that are trained on."
        )
    known = classes or tuple(names)
    paths, label = list[str](), list[int]()
    for name in names:
        files = list(_images(root / name, name, inside))
        if not files:
            raise DataError(
                f"{root / name} was to hold images of the class {name} and holds none that ends in "
                f"{', '.join(SUFFIXES)}. Remove the folder, or put its images there."
            )
        paths += files
        label += [known.index(name)] * len(files)
    return ImageListing(paths, np.array(label, np.int32), known)


def _images(folder: Path, name: str, inside: Path) -> Iterator[str]:
    """The images below a folder, by their paths below the folder of all classes."""
    for entry in _entries(folder):
        if entry.is_symlink():
            _refuse_outside(Path(entry.path), inside)
        below = f"{name}/{entry.name}"
        if entry.is_dir():
            yield from _images(folder / entry.name, below, inside)
        elif entry.name.lower().endswith(SUFFIXES):
            yield below


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What a folder holds, sorted by name; hidden files are left out."""
    try:
        with os.scandir(folder) as found:
            seen = [entry for entry in found if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(
            f"{folder} was to be listed and cannot be ({error.strerror}). Give yourself the right "
            f"to read it (chmod u+rx)."
        ) from error
    return sorted(seen, key=lambda entry: entry.name)


def _refuse_outside(link: Path, inside: Path) -> None:
    """Raise DataError if a link leads out of the folder, or nowhere, or round in a circle."""
    try:
        to = link.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{link} is a link to {os.readlink(link)}, which is not there. Remove the link."
        ) from error
    if not to.is_relative_to(inside) or link.parent.resolve().is_relative_to(to):
        raise DataError(
            f"{link} was to lie within {inside} and is a link that leads to {to}. Copy what it "
            f"leads to (cp -rL), or remove the link."
        )


def _few(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
