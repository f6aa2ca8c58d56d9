"""Packages that only some sources need."""

import importlib
from types import ModuleType

from jtrain.errors import DataError


def needed(module: str, extra: str, what: str) -> ModuleType:
    """The module, imported.

    Raises:
        DataError: if it is not installed; it says the line that installs it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise DataError(
            f"{what} was asked for, which needs {package}, and that is not installed. "
            f"Install it: pip install 'jtrain[{extra}]'"
        ) from error
