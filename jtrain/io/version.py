"""Versions of packages."""

from importlib import metadata


def jtrain_version() -> str:
    """Return the installed version; "0.0" if the source is on the path and not installed."""
    return installed_version("jtrain") or "0.0"


def installed_version(package: str) -> str:
    """Return the installed version of a package; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
