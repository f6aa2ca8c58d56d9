"""Version of this package."""

from importlib import metadata


def jtrain_version() -> str:
    """Return the installed version; "0.0" if the source is on the path and not installed."""
    try:
        return metadata.version("jtrain")
    except metadata.PackageNotFoundError:
        return "0.0"
