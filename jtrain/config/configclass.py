"""`configclass`, the decorator of every config dataclass, and types of keys that name files.

A config may be a stranger's, so that one which is read from a file or a command line writes below
the current directory, to the directories that the user names in JTRAIN_WRITABLE, and to the
services of a short list. A config made in Python is code of the user's, and writes anywhere.
"""

import os
import re
import shlex
from typing import Annotated, Any, TypeGuard, TypeVar, cast, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo
from pydantic.dataclasses import dataclass

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field,))
def configclass(cls: type[T]) -> type[T]:
    """Make a frozen dataclass that checks its fields; the docstring under a field is its help.

    ```python
    @configclass
    class Cosine:
        kind: Literal["cosine"] = "cosine"
        lr: float = Field(gt=0)
        \"""Peak learning rate.\"""
    ```
    """
    config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        validate_by_name=True,  # in Python; a config file has the keys
        validate_by_alias=True,
    )
    return cast(type[T], dataclass(frozen=True, kw_only=True, config=config)(cls))


def is_configclass(cls: Any) -> TypeGuard[type]:
    """Return whether a class is a dataclass made by `@configclass`."""
    return isinstance(cls, type) and "__pydantic_fields__" in cls.__dict__


WRITABLE = "JTRAIN_WRITABLE"
READ = {"read": True}
"""Pydantic context of a config that was read."""
STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
_STORE = re.compile(rf"({'|'.join(STORES)})://[^:]*")
_SERVER = re.compile(r"https?://\S+|databricks(://[\w.-]+)?|")
_LOCAL = re.compile(r"(?:(?:file|local)://(?=/)|file:(?!//)|sqlite:///)?([^:%?#]*)")
_HOW = f"set {WRITABLE}={{}} to allow it, or write a relative path"


def check_writable(path: str) -> None:
    """Raise ValueError unless files may be written at a path that a config names."""
    real = os.path.realpath(path)
    for root in (os.getcwd(), *os.environ.get(WRITABLE, "").split(os.pathsep)):
        below = os.path.relpath(real, os.path.realpath(root)).split(os.sep) if root else [".."]
        if not any(part.startswith(".") and part != "." for part in below):
            return
    outside = f"{path} leads to {real}, which is hidden or not below the current directory"
    raise ValueError(f"{outside}: {_HOW.format(shlex.quote(real))}")


def _path(path: str, info: ValidationInfo) -> str:
    if info.context == READ and path:
        check_writable(path)
    return path


def _tracking_uri(uri: str, info: ValidationInfo) -> str:
    if info.context == READ and not _SERVER.fullmatch(uri):
        _check_local(uri, "https://SERVER, file:DIRECTORY or sqlite:///FILE", "MLFLOW_TRACKING_URI")
    return uri


def _store(address: str, info: ValidationInfo) -> str:
    # Words without a scheme are refused with the other mistakes of the config.
    if info.context == READ and "://" in address and not _STORE.fullmatch(address):
        _check_local(address, ", ".join(f"{s}://" for s in STORES) + " or file://", "")
    return address


def _check_local(address: str, allowed: str, variable: str) -> None:
    match = _LOCAL.fullmatch(address)
    if not match:
        how = f"; set {variable}={shlex.quote(address)} in its place" if variable else ""
        raise ValueError(f"must be {allowed}, found {address!r}{how}")
    check_writable(match[1])


WrittenPath = Annotated[str, AfterValidator(_path)]
TrackingUri = Annotated[str, AfterValidator(_tracking_uri)]
StoreAddress = Annotated[str, AfterValidator(_store)]
