"""The values of a config: frozen, checked, and nothing unknown among them."""

from typing import TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field,))
def values(cls: type[T]) -> type[T]:
    """Makes a dataclass whose fields are checked; the docstring under a field is its help.

    ```python
    @values
    class Cosine:
        kind: Literal["cosine"] = "cosine"
        lr: float = Field(gt=0)
        \"""Peak learning rate.\"""
    ```
    """
    config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
    return cast(type[T], dataclass(frozen=True, kw_only=True, config=config)(cls))
