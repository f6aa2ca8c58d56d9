"""A temporary directory of a run, beside the others, in which its experiment is found."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jtrain.config.top import RUNS
from jtrain.errors import ConfigError


@contextlib.contextmanager
def temporary_directory(name: str, purpose: str) -> Iterator[Path]:
    """Yield a new directory beside the runs, and delete it at the end."""
    runs = RUNS
    existed = runs.is_dir()
    try:
        runs.mkdir(exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f".{name}-{purpose}-", dir=runs))
    except OSError as error:
        raise ConfigError(
            f"{runs}: cannot be written ({error.strerror}), and the run's directory is in it. "
            f"Free space, or run in a writable directory."
        ) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):  # another process uses it
                runs.rmdir()
