"""Schema of a config from the dataclasses of its values, and the wording of values and types."""

import ast
import functools
import inspect
import itertools
import json
import math
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from jtrain.config.configclass import is_configclass
from jtrain.config.node import Plain
from jtrain.config.registry import IMPORTED, Registry
from jtrain.errors import ConfigError

REQUIRED: Any = ...  # the default of a key that has none
LIMITS = {
    "gt": "above {}",
    "ge": "at least {}",
    "lt": "below {}",
    "le": "at most {}",
    "multiple_of": "a multiple of {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
    "pattern": "like {}",
}


@dataclass(frozen=True)
class FieldSchema:
    """Schema of a key."""

    annotation: Any
    limits: tuple[str, ...] = ()  # in words
    default: Any = REQUIRED
    field: tuple[type, str] | None = None
    """The dataclass that has it, and its name there."""
    registry: Registry | None = None
    """The registry that has further kinds."""

    @classmethod
    def of(cls, annotation: Any) -> "FieldSchema":
        """Return the schema of a type, such as `Optimizer`, that is not a field's."""
        return cls(annotation, registry=_registry(get_args(annotation)))

    @property
    def doc(self) -> str:
        """Help of the key: the docstring below its field, on one line."""
        if self.field is None:
            return ""
        cls, name = self.field
        # A class has the docstrings of the fields that it names itself.
        docs = (field_docs(base).get(name, "") for base in cls.__mro__ if is_configclass(base))
        return next(filter(None, docs), "")

    def members(self) -> list["FieldSchema"]:
        """Return the allowed types, with unions expanded."""
        return list(_members(self.annotation, self.limits))

    def classes(self) -> list[type]:
        """Return the allowed dataclasses."""
        return [w.annotation for w in self.members() if is_configclass(w.annotation)]

    def kinds(self) -> dict[str, type]:
        """Return the dataclass of each `kind`; empty if there is only one."""
        found: dict[str, type] = {}
        for cls in self.classes():
            if "kind" in cls.__pydantic_fields__:
                kinds = get_args(cls.__pydantic_fields__["kind"].annotation)
                found |= {kind: cls for kind in kinds if isinstance(kind, str)}
        return found

    def pick(self, value: Plain) -> type | None:
        """Return the dataclass of a mapping, chosen by its `kind` where there are several."""
        classes = self.classes()
        if len(classes) == 1:
            return classes[0]
        kind = value.get("kind") if isinstance(value, dict) else None
        return self.class_of(kind) if isinstance(kind, str) else None

    def kind_names(self) -> list[str]:
        """Return the names of all kinds, also of those that installed packages add."""
        return [*self.kinds(), *(self.registry.installed() if self.registry else ())]

    def class_of(self, kind: str) -> type | None:
        """Return the dataclass of a kind, which another package may have; None if there is none."""
        known = self.kinds().get(kind)
        if known or not self.registry:
            return known
        try:
            return self.registry.find(kind)
        except ConfigError:  # the check of the values says why
            return None

    def element(self) -> "FieldSchema":
        """Return the schema of the values in a list or in a mapping with free keys."""
        for member in self.members():
            arguments = [a for a in get_args(member.annotation) if a is not Ellipsis]
            if get_origin(member.annotation) in {list, tuple, dict} and arguments:
                return FieldSchema.of(arguments[-1])
        return FieldSchema(Any)


def field_schemas(cls: type) -> dict[str, FieldSchema]:
    """Return the schema of each key of a dataclass, in order, `kind` first."""
    names = sorted(cls.__pydantic_fields__, key=lambda name: name != "kind")
    return {key_of(cls, name): _want(cls, name) for name in names}


def key_of(cls: type, name: str) -> str:
    """Return the key of a field: its alias, where Python has no such name (`from`), or its name."""
    field = getattr(cls, "__pydantic_fields__", {}).get(name)
    alias = getattr(field, "validation_alias", None)
    return alias if isinstance(alias, str) else name


def _want(cls: type, name: str) -> FieldSchema:
    info = cls.__pydantic_fields__[name]
    default = REQUIRED if info.is_required() else info.get_default(call_default_factory=True)
    registry = _registry(info.metadata)
    return FieldSchema(info.annotation, _limits(info.metadata), default, (cls, name), registry)


def _registry(metadata: Sequence[Any]) -> Registry | None:
    return next((mark for mark in metadata if isinstance(mark, Registry)), None)


@functools.cache
def field_docs(cls: type) -> Mapping[str, str]:
    """Return the docstring under each field that a class itself defines, as one line.

    Read from the source when it is asked for: pydantic would read it of each class at import.
    """
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, SyntaxError, TypeError):  # a class typed in a shell has no source
        return {}
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, below in itertools.pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            doc = below.value if isinstance(below, ast.Expr) else None
            if isinstance(doc, ast.Constant) and isinstance(doc.value, str):
                docs[field.target.id] = " ".join(doc.value.split())
    return docs


def _members(annotation: Any, limits: tuple[str, ...]) -> Iterator[FieldSchema]:
    if hasattr(annotation, "__value__"):  # `type Optimizer = ...`
        annotation = annotation.__value__
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        # Field(gt=0) inside of Annotated keeps its limits in a list of its own.
        metadata = [n for m in metadata for n in (m, *getattr(m, "metadata", ()))]
        yield from _members(inner, limits + _limits(metadata))
    elif get_origin(annotation) in {Union, types.UnionType}:
        for member in get_args(annotation):
            yield from _members(member, limits)
    else:
        yield FieldSchema(annotation, limits)


def _limits(metadata: Any) -> tuple[str, ...]:
    return tuple(
        words.format(getattr(mark, name))
        for name, words in LIMITS.items()
        for mark in metadata
        if getattr(mark, name, None) is not None
    )


def literal_choices(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a `Literal`; none for any other type."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Path: "a path",
    dict: "a mapping",
    Any: "anything",
}
PLAIN = re.compile(r"[A-Za-z_/][\w./+-]*( [\w./+-]+)*", re.ASCII)
WORDS = {"true", "false", "null"}


def format_value(value: Plain) -> str:
    """Return a value as YAML on one line, as typed on a command line."""
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{format_value(k)}: {format_value(v)}" for k, v in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if isinstance(value, str):
        if PLAIN.fullmatch(value) and value.lower() not in WORDS:
            return value
        # JSON is YAML but for characters that are written as they are there.
        return "".join(
            c if c.isprintable() else _escape(c) for c in json.dumps(value, ensure_ascii=False)
        )
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[str(value)]
    return json.dumps(value) if isinstance(value, bool | int | float | None) else str(value)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def describe_allowed(want: FieldSchema) -> str:
    """Return the allowed values: `a whole number above 0`, `one of sgd, adamw`."""
    members = want.members()
    if any(member.annotation is float for member in members):
        members = [member for member in members if member.annotation is not int]
    kinds = list(want.kinds())
    wordings = [_one(m) for m in members if not (len(kinds) > 1 and is_configclass(m.annotation))]
    if len(kinds) > 1:
        wordings.insert(0, f"a mapping with a kind, {format_kinds(want)}")
    return " or ".join(dict.fromkeys(wordings))


def format_kinds(want: FieldSchema) -> str:
    """Return `one of sgd, adamw or package.module:Name`."""
    if not want.registry:
        return format_choices(list(want.kinds()))
    return f"one of {', '.join(want.kind_names())} or {IMPORTED}"


def _one(want: FieldSchema) -> str:
    limited = want.limits and want.annotation is not type(None)
    limits = f" {' and '.join(want.limits)}" if limited else ""
    if offered := literal_choices(want.annotation):
        return format_choices(offered)
    if is_configclass(want.annotation):
        return f"a mapping with {', '.join(field_schemas(want.annotation))}"
    if get_origin(want.annotation) in {list, tuple}:
        arguments = [a for a in get_args(want.annotation) if a is not Ellipsis]
        if len(arguments) == 1:
            return f"a list{limits}, of each {describe_allowed(FieldSchema(arguments[0]))}"
        return (
            f"a list of {len(arguments)}: "
            f"{', '.join(describe_allowed(FieldSchema(a)) for a in arguments)}"
        )
    name = NAMES.get(get_origin(want.annotation) or want.annotation)
    return (name or getattr(want.annotation, "__name__", str(want.annotation))) + limits


def format_choices(offered: Sequence[Plain]) -> str:
    """Return `sgd` for a single choice, and `one of sgd, adamw` for several."""
    spelt = ", ".join(map(format_value, offered))
    return spelt if len(offered) == 1 else f"one of {spelt}"


def describe_found(value: Plain) -> str:
    """Return the text, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = format_value(value)
    if isinstance(value, str):
        text = f"the text {text if text.startswith(chr(34)) else json.dumps(value)}"
    return text if len(text) < 80 else f"{text[:76]} ..."
