"""`configclass`: the decorator of every config dataclass."""

from typing import TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field
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
