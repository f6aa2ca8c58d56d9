"""Atomic file replacement: the old content or the new, whenever the process dies."""

import os
from pathlib import Path

from jtrain.io.private_files import create_private


def atomic_write(path: Path, content: bytes) -> None:
    """Replace the content of `path` by one rename of a flushed file."""
    temporary = path.with_name(path.name + ".new")
    with create_private(temporary) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # makes the rename durable
    finally:
        os.close(directory)
