"""Digests of the user's code that a run trains, by which a resumed run says what was edited."""

import ast
import contextlib
import dataclasses
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

MAX_OBJECTS = 10_000  # that a loss is made of
MAX_ENTRIES = 4096  # of an array or a container whose contents count
LOSS, PYTHON = "loss", "python"


def digest_code(root: Any) -> dict[str, str]:
    """Return a digest of each piece of code that `root` is made of, by its name.

    For a class, the config of an experiment, a piece is its module. For anything else it is `loss`:
    the operations of the functions that `root` uses of the user's modules, and the values in them.
    Each module of the user that is used there is a piece. Comments do not count.
    """
    code = _Code()
    if inspect.isclass(root):
        code.add_module(sys.modules.get(root.__module__))
    else:
        code.pieces[LOSS] = code.describe(root)
    hashed = lambda text: hashlib.sha256(text.encode("utf-8", "replace"))
    found = {name: hashed(text).hexdigest()[:12] for name, text in code.pieces.items()}
    return {PYTHON: f"{sys.version_info.major}.{sys.version_info.minor}", **found}


def find_edited(before: Any, after: Mapping[str, str]) -> list[str]:
    """Return the names of the pieces of code that differ; none for a run without digests.

    A module that was not imported yet does not count, nor does another version of Python, which
    has other operations for the same code.
    """
    known = before if isinstance(before, dict) else {}
    if known.get(PYTHON) != after[PYTHON]:
        return []
    return [name for name in known if name in after and known[name] != after[name]]


class _Code:
    """Text of the operations of a loss, and of the modules of the user that it uses."""

    def __init__(self) -> None:
        self.pieces, self._known = dict[str, str](), dict[int, Any]()  # by id: held, so not reused

    def describe(self, value: Any) -> str:
        """Return what a value is made of, as text that is the same in another process."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value)
        if id(value) in self._known or len(self._known) > MAX_OBJECTS:
            return ""
        if not isinstance(value, tuple | frozenset | CodeType):  # equal constants may be one object
            self._known[id(value)] = value
        try:
            parts = list(self._parts(value))
        except Exception:  # an object of the user may raise anything where it is read
            parts = []
        return f"{type(value).__qualname__}({', '.join(parts)})"

    def _parts(self, value: Any) -> Iterator[str]:
        each: Any = ()
        if isinstance(value, ModuleType):
            self.add_module(value)
            each = (value.__name__,)
        elif isinstance(value, CodeType):
            each = (value.co_code, *value.co_consts, *value.co_names)
        elif inspect.isfunction(value) or inspect.isclass(value):
            each = self._definition(value)
        elif isinstance(value, set | frozenset):  # in an order of its own in each process
            yield from sorted(map(self.describe, value))
        elif isinstance(value, list | tuple | Mapping):
            items = value.items() if isinstance(value, Mapping) else value
            each = items if len(value) <= MAX_ENTRIES else ()
        elif hasattr(value, "dtype") and hasattr(value, "tolist"):
            small = value.size <= MAX_ENTRIES
            each = (str(value.dtype), value.shape, value.tolist() if small else 0)
        elif dataclasses.is_dataclass(value):
            each = (type(value), *(getattr(value, x.name) for x in dataclasses.fields(value)))
        else:  # methods, properties, what jit, lru_cache and partial make; else its class alone
            inner = ("__func__", "__self__", "__wrapped__", "fget", "func", "args", "keywords")
            each = (type(value), *(getattr(value, name, None) for name in inner))
        yield from map(self.describe, each)

    def _definition(self, value: Any) -> Iterator[Any]:
        """Yield what a function or a class is made of; of a library it is the name."""
        module = value.__module__ or ""
        own = _is_own(sys.modules.get(module))
        yield f"{module}.{value.__qualname__}"
        if inspect.isclass(value):
            plain = lambda name: not name.startswith("__") or inspect.isfunction(vars(value)[name])
            yield from (value.__bases__, {n: x for n, x in vars(value).items() if plain(n)}) * own
        elif own or module.startswith("jtrain."):
            yield getattr(value, "__wrapped__", None)
            yield from (getattr(cell, "cell_contents", None) for cell in value.__closure__ or ())
            yield from (value.__defaults__, value.__kwdefaults__)
            if own and value.__globals__.get("__name__") == module:
                used = sorted(_names(value.__code__) & value.__globals__.keys())
                yield from (value.__code__, *((name, value.__globals__[name]) for name in used))

    def add_module(self, module: ModuleType | None) -> None:
        if module is None or not _is_own(module) or module.__name__ in self.pieces:
            return
        tree = ast.parse(_read(module))
        self.pieces[module.__name__] = ast.dump(tree)
        for node in (x for x in ast.walk(tree) if isinstance(x, ast.Import | ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                base = importlib.util.resolve_name(base, module.__package__)
                names = [base, *(f"{base}.{name}" for name in names)]
            for name in names:
                self.add_module(sys.modules.get(name))


def _is_own(module: ModuleType | None) -> bool:
    """Return whether a module is the user's: the script, or a file outside of the packages."""
    name, file = getattr(module, "__name__", ""), str(getattr(module, "__file__", None) or "")
    if name.partition(".")[0] in {"jtrain", *sys.stdlib_module_names}:
        return False
    installed = {"site-packages", "dist-packages"} & set(file.replace("\\", "/").split("/"))
    return name == "__main__" or (file.endswith(".py") and not installed)


def _read(module: ModuleType) -> str:
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(module)
    return ""  # of a notebook


def _names(code: CodeType) -> set[str]:
    return {*code.co_names}.union(*(_names(x) for x in code.co_consts if isinstance(x, CodeType)))
