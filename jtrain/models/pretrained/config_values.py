"""Values of a config class that names a published model."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import ArgsKwargs

from jtrain.config.schema import key_of


class Published:
    """Base of a config class whose key `from` names a published model."""

    kind: Any

    @classmethod
    def read_values(cls, path: str) -> Mapping[str, Any]:
        """Return the values of a published model; see `jtrain.models.pretrained`.

        Raises:
            CheckpointError: if the path has no model of this kind.
        """
        from jtrain.models.pretrained.source import read_values

        return read_values(path, cls.kind)


def with_pretrained(given: Any, cls: Any) -> Any:
    """Return the values given to a config class, over those of the model that they name.

    For a `@model_validator(mode="before")`: `given` is the argument of the validator, and `cls` a
    `Published` config class. Where all values are given nothing is read, so a
    stored config outlives the folder.

    Raises:
        CheckpointError: if the path has no model of this class.
    """
    called = isinstance(given, ArgsKwargs)
    values = given.kwargs or {} if called else given
    if not isinstance(values, Mapping):
        return given
    path = values.get("from") or values.get("pretrained")
    names: Mapping[str, Any] = cls.__pydantic_fields__
    missing = {name for name in names if name not in values and key_of(cls, name) not in values}
    if not isinstance(path, str) or not path or not missing:
        return given
    found = cls.read_values(path)
    merged = {**found, **values}
    for key, theirs in found.items():  # one value of several beside the others of the folder
        if isinstance(theirs, dict) and "kind" not in theirs and isinstance(merged[key], Mapping):
            merged[key] = {**theirs, **merged[key]}
    return ArgsKwargs(given.args, merged) if called else merged
