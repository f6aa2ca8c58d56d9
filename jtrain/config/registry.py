"""Registries: kinds that other packages add to, by an entry point or as package.module:Name.

A package names a class in the group `jtrain.optimizers` of its entry points, and a config takes it
by that name; `kind: package.module:Name` takes one that nobody registered. The class is a
`@configclass` over the base of its registry, from which it has the key `kind`.
"""

import inspect
import json
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import (
    dict_schema,
    str_schema,
    tagged_union_schema,
    with_info_plain_validator_function,
)

from jtrain.config.configclass import configclass, is_configclass
from jtrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

IMPORTED = "package.module:Name"
OTHER = "other package"
"""What pydantic's location of an error has in place of a kind that does not come with jtrain."""


@configclass
class Kind:
    """Base of what other packages may add to a registry."""

    kind: str = ""
    """The name of the class in its registry; empty: package.module:Name."""


def entry_points_of(name: str) -> "dict[str, EntryPoint]":
    """Return what installed packages add to the group `jtrain.NAME`; imports none of it."""
    from importlib.metadata import entry_points  # 30 ms, and most kinds come with jtrain

    return {entry.name: entry for entry in entry_points(group=f"jtrain.{name}")}


def load_address(address: str) -> Any:
    """Return what `package.module:Name` names; raise ConfigError if it cannot be imported."""
    try:
        return pkgutil.resolve_name(address)
    except Exception as error:  # a module may raise anything
        where = "install its package, or put the module beside experiments/"
        absent = isinstance(error, ModuleNotFoundError) and address.startswith(f"{error.name}")
        how = f"; {where}" if absent else ""
        raise ConfigError(f"{address} cannot be imported: {error}{how}") from error


@dataclass(frozen=True)
class Registry:
    """Mark of an open union: `Annotated[SGD | Adam, Registry("optimizers", OptimizerConfig)]`."""

    name: str
    """The group of entry points is `jtrain.NAME`."""
    base: type
    """What each class is a subclass of."""
    method: str = ""
    """What each class defines, with the arguments of the first class of the union; empty: nothing
    is checked."""

    def installed(self) -> list[str]:
        """Return the names that installed packages add."""
        return sorted(entry_points_of(self.name))

    def find(self, kind: str) -> type:
        """Return the class of a kind that does not come with jtrain.

        Raises:
            ConfigError: if there is none, or it cannot be imported or is of another registry.
        """
        address = kind
        if ":" not in kind:
            found = entry_points_of(self.name)
            if kind not in found:
                raise ConfigError(f"no package has {kind} among its {self.name}")
            address = found[kind].value
        cls = load_address(address)
        if not (is_configclass(cls) and issubclass(cls, self.base)):
            base = f"{self.base.__module__}.{self.base.__name__}"
            raise ConfigError(f"{address} is not a @configclass over {base}, as {self.name} are")
        named = get_args(cls.__pydantic_fields__["kind"].annotation)
        if named and kind not in named:
            raise ConfigError(f"{address} has a `kind` of its own: leave that field out")
        return cls

    def _check_methods(self, cls: type, kind: str, own: Iterable[type]) -> None:
        """Raise ConfigError unless `cls` has the methods that are called, with their arguments."""
        base = dict(inspect.getmembers(self.base, inspect.isfunction))
        called = {name: base[name] for name in base.keys() & vars(cls) if name[0] != "_"}
        if self.method:
            called[self.method] = next(filter(None, (getattr(x, self.method, None) for x in own)))
        for name, method in called.items():
            wanted, found = _signature(method), getattr(cls, name, None)
            if not callable(found) or found is base.get(name):
                near = did_you_mean(name, [x for x in vars(cls) if x[0] != "_"])
                raise ConfigError(f"{kind} has no method {name}{wanted}, as {self.name} have{near}")
            required = [p for p in wanted.parameters.values() if p.default is p.empty]
            try:
                inspect.signature(found).bind(*required)
                inspect.signature(found).bind(*wanted.parameters)
            except TypeError as error:
                raise ConfigError(
                    f"{kind} has {name}{_signature(found)}, which is called with the arguments of "
                    f"{name}{wanted}: {error}; write `def {name}{wanted}:`"
                ) from None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Choose by `kind` among the classes of the union, and others as they are found."""
        own = {
            kind: cls
            for cls in get_args(source)
            for kind in get_args(cls.__pydantic_fields__["kind"].annotation)
        }

        def choose(value: Any) -> str | None:
            kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
            if isinstance(value, self.base) and type(value) not in own.values():
                return OTHER
            if kind in own or not isinstance(kind, str):
                return kind
            return OTHER if ":" in kind or kind in self.installed() else kind

        def validate_other(value: Any, info: ValidationInfo) -> Any:
            if isinstance(value, self.base):
                return value
            try:
                cls = self.find(value["kind"])
                self._check_methods(cls, value["kind"], own.values())
            except ConfigError as error:
                raise PydanticCustomError("registry", "{why}", {"why": f"{error}"}) from error
            adapter = TypeAdapter(cls)
            if info.mode == "python":
                return adapter.validate_python(value, context=info.context)
            # Strict JSON takes a list for a tuple, and no text for a number.
            return adapter.validate_json(
                json.dumps(value), strict=True, context=info.context, by_alias=True, by_name=False
            )

        other = with_info_plain_validator_function(
            validate_other, json_schema_input_schema=dict_schema(str_schema())
        )
        choices = {kind: handler.generate_schema(cls) for kind, cls in own.items()}
        return tagged_union_schema({**choices, OTHER: other}, choose)

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        """Tell other kinds apart from those that come with jtrain: each config fits one schema."""
        schema = handler(core)
        own = [kind for kind in core["choices"] if kind != OTHER]
        kind = {"type": "string", "not": {"enum": own}}
        other = {"type": "object", "properties": {"kind": kind}, "required": ["kind"]}
        schema["oneOf"] = [each if "$ref" in each else other for each in schema["oneOf"]]
        return schema


def _signature(method: Callable) -> inspect.Signature:
    """Return the arguments of a method without their types."""
    bare = [p.replace(annotation=p.empty) for p in inspect.signature(method).parameters.values()]
    return inspect.Signature(bare)
