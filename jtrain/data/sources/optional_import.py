"""Imports of optional packages."""

import importlib
from types import ModuleType

from jtrain.errors import DataError


def import_optional(module: str, extra: str, what: str) -> ModuleType:
    """Import and return a module.

    Raises:
        DataError: if it is not installed; the message has the command that installs it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise DataError(
            f"{what} was requested, which needs {package}, and {package} is not installed. "
            f"Install it: pip install 'jtrain[{extra}]'"
        ) from error
