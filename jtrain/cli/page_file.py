"""Writing of an HTML page that a verb was asked for."""

from pathlib import Path

from jtrain.errors import ConfigError
from jtrain.io.regular_files import atomic_write


def write_page(verb: str, option: str, path: Path, page: str) -> str:
    """Write a page, and return a line with its path and size.

    Args:
        option: that named the file.

    Raises:
        ConfigError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, page.encode("utf-8", "replace"))
    except OSError as error:
        folder = "~" if path.absolute().is_relative_to("/tmp") else "/tmp"
        raise ConfigError(
            f"jtrain {verb}: {path} cannot be written ({error.strerror}); name a file elsewhere: "
            f"{option} {folder}/{verb}.html"
        ) from None
    return f"{path}  {path.stat().st_size:,} bytes; open it in a browser"
