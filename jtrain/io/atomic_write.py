"""A file that changes whole or not at all, whenever the process dies."""

import os
from pathlib import Path

from jtrain.io.private_files import create_private


def atomic_write(path: Path, content: bytes) -> None:
    """Puts `content` in place of what `path` held, by one rename of a file that was flushed."""
    new = path.with_name(path.name + ".new")
    with create_private(new) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename too
    finally:
        os.close(directory)
