"""Config classes that take values of a published model, and the networks that configs build."""

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator
from pydantic_core import ArgsKwargs

from jtrain.config.configclass import configclass
from jtrain.config.schema import key_of
from jtrain.core.model import Model
from jtrain.core.placement import Placement
from jtrain.errors import ConfigError
from jtrain.errors.spelling import did_you_mean


@configclass
class Published:
    """Base of a config class with values of a published model: its `preset`, or a folder (`from`).

    Values given beside these win.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    dials: ClassVar[tuple[str, ...]] = ()
    """Keys that imply others, unless the first of them is 0."""
    kind: str = ""
    pretrained: str = Field(default="", validation_alias="from")
    """A folder as Hugging Face lays it out, `org/name@revision` on its Hub, or a GGUF file of a
    decoder: a new run takes its weights, and its values where none are given beside it. In Python:
    pretrained=PATH. Empty: none."""

    @classmethod
    def read_values(cls, path: str) -> Mapping[str, Any]:
        """Return the values of a published model; see `jtrain.models.pretrained.values`.

        Raises:
            CheckpointError: if the path has no model of this kind.
        """
        from jtrain.models.pretrained.values import read_values  # only where a model is named

        own = next(base for base in cls.__mro__ if "kind" in vars(base))
        return read_values(path, own)  # without the defaults of a subclass

    @classmethod
    def implied(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values that those given imply by `dials`."""
        del values
        return {}

    @model_validator(mode="before")
    @classmethod
    def _add_published(cls, given: Any) -> Any:
        called = isinstance(given, ArgsKwargs)
        values = given.kwargs or {} if called else given
        if not isinstance(values, Mapping):
            return given
        values = cls._with_pretrained(values)
        values = {**cls.implied(values), **values}
        if cls.presets:
            values = _with_preset(values, cls.presets, called=called)
        return ArgsKwargs(given.args, dict(values)) if called else values

    @classmethod
    def _with_pretrained(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values over those of the model that they name.

        Where all values are given nothing is read, so a stored config outlives the folder.

        Raises:
            CheckpointError: if the path has no model of this class.
        """
        path = values.get("from") or values.get("pretrained")
        names: Mapping[str, Any] = getattr(cls, "__pydantic_fields__")  # noqa: B009
        missing = {name for name in names if name not in values and key_of(cls, name) not in values}
        if not isinstance(path, str) or not path or not missing:
            return values
        found = cls.read_values(path)
        merged = {**found, **values}
        for key, theirs in found.items():  # one value of several beside the others of the folder
            nested = isinstance(theirs, dict) and "kind" not in theirs
            if nested and isinstance(merged[key], Mapping):
                merged[key] = {**theirs, **merged[key]}
        return merged


def _with_preset(
    values: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]], *, called: bool
) -> Mapping[str, Any]:
    """Return the values over those of the preset that they name.

    An unknown name in a config file is left to the check of its field, which knows the key and the
    source.

    Raises:
        ConfigError: with the nearest name, if a call names a preset that does not exist.
    """
    values = _with_tuples(values)  # JSON has only lists, and the check of a tuple field is strict
    name = values.get("preset", "none")
    if called and isinstance(name, str) and name not in {"none", *presets}:
        hint = did_you_mean(name.lower(), presets)
        raise ConfigError(f"there is no preset {name!r}, only {', '.join(presets)}{hint or '.'}")
    return {**(presets.get(name, {}) if isinstance(name, str) else {}), **values}


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with tuples for lists, those of the configs in it too."""

    def change(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _with_tuples(value)
        return tuple(value) if isinstance(value, list) else value

    return {key: change(value) for key, value in values.items()}


def build_network(config: Any, placement: Placement) -> Model:
    """Build the flax module that `network` of a config names, as two functions."""
    from jtrain.models.adapters.nnx import from_nnx  # flax: 0.6 s, only where a model is built

    file, name = config.network.split(":")
    module = importlib.import_module(f"jtrain.models.networks.{file}")
    return from_nnx(lambda rngs: getattr(module, name)(config, placement, rngs))
