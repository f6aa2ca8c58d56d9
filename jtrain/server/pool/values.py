"""Values between processes: trees of plain values and arrays, and functions by their names.

A value is sent as JSON and raw arrays. A function is sent as the module and the name by which the
other process imports it, so that no code crosses a connection and nothing is unpickled.
"""

import functools
import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.errors import ConfigError
from jtrain.server.transport import wire

MOST_TEXT = wire.MOST_JSON // 2  # bytes of the JSON of a value; a frame has other fields besides
_SCRIPT = "__jtrain_script__"  # module of a script that is imported by its path


def encode(value: Any, what: str = "the value") -> tuple[Any, list[np.ndarray]]:
    """Return a value as JSON and arrays.

    Args:
        what: the value in words, for messages.

    Raises:
        ConfigError: if it holds anything else than arrays, plain values, lists, tuples and dicts.
    """
    arrays: list[np.ndarray] = []
    text = _Encoder(what, arrays).encode(value)
    if (size := len(json.dumps(text))) > MOST_TEXT:
        raise ConfigError(
            f"{what} holds {size:,} bytes of texts and single numbers, and at most {MOST_TEXT:,} "
            f"are sent. Put the numbers into an array: np.asarray(numbers)."
        )
    return text, arrays


def decode(text: Any, arrays: list[np.ndarray]) -> Any:
    """Return the value that `encode` has described; arrays are of numpy.

    Raises:
        ConfigError: if a function of it cannot be imported.
    """
    if not isinstance(text, dict):
        return text
    (kind, content), *_ = text.items()
    match kind:
        case "array":
            return arrays[content]
        case "key":
            return jax.random.wrap_key_data(arrays[content[0]], impl=content[1])
        case "list":
            return [decode(each, arrays) for each in content]
        case "tuple":
            return tuple(decode(each, arrays) for each in content)
        case "dict":
            return {name: decode(each, arrays) for name, each in content}
        case "function":
            return load_function(content)
        case "partial":
            function, args, kwargs = (decode(each, arrays) for each in content)
            return functools.partial(function, *args, **kwargs)
        case "object":
            name, state = content
            return load_function(name).from_plain(decode(state, arrays))
    raise ValueError(f"unknown kind of value {kind!r}")


class _Encoder:
    def __init__(self, what: str, arrays: list[np.ndarray]):
        self._what, self._arrays = what, arrays

    def encode(self, value: Any) -> Any:
        match value:
            case float() if not math.isfinite(value):
                return self._array(np.float64(value))
            case bool() | int() | float() | str() | None:
                return value
            case list():
                return {"list": [self.encode(each) for each in value]}
            case tuple() if type(value) is tuple:
                return {"tuple": [self.encode(each) for each in value]}
            case dict():
                return {"dict": [[self._key(key), self.encode(x)] for key, x in value.items()]}
            case functools.partial():
                parts = [value.func, list(value.args), value.keywords]
                return {"partial": [self.encode(part) for part in parts]}
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return self._array(value)
        if hasattr(value, "to_plain") and hasattr(value, "from_plain"):
            return {"object": [function_name(type(value)), self.encode(value.to_plain())]}
        if callable(value):
            return {"function": function_name(value)}
        raise ConfigError(
            f"{self._what} holds a {type(value).__module__}.{type(value).__qualname__}, and "
            f"arrays, numbers, texts, lists, tuples, dicts and functions of a module are sent. "
            f"Send its arrays, and make the rest in the function."
        )

    def _key(self, key: Any) -> Any:
        if isinstance(key, str | int) and not isinstance(key, bool):
            return key
        raise ConfigError(
            f"{self._what} holds a dict with the key {key!r}; texts and integers are sent as keys."
        )

    def _array(self, value: Any) -> Any:
        self._arrays.append(np.zeros(0))  # its place
        index = len(self._arrays) - 1
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            self._arrays[index] = np.asarray(jax.random.key_data(value))
            return {"key": [index, str(jax.random.key_impl(value))]}
        array = np.asarray(value)
        if array.dtype.name not in wire.DTYPES or array.dtype.byteorder == ">":
            raise ConfigError(
                f"{self._what} holds an array of {array.dtype}, and "
                f"{', '.join(wire.DTYPES)} are sent. Convert it: array.view or array.astype."
            )
        self._arrays[index] = array
        return {"array": index}


def function_name(function: Callable | str) -> str:
    """Return the name by which another process imports a function: `module:function`.

    A function of the script that runs has the path of the script in the place of the module.

    Raises:
        ConfigError: if no other process can import it.
    """
    if isinstance(function, str):
        if ":" not in function:
            raise ConfigError(
                f"{function!r} names no function: write module:function, such as "
                f"my_study.steps:gradient."
            )
        return function
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if not module or not name:
        raise ConfigError(
            f"{function!r} has no module and no name, by which another process would import it. "
            f"Write a function: def step(x): ..."
        )
    if "<lambda>" in name or "<locals>" in name:
        kind = "a lambda" if "<lambda>" in name else "defined in another function"
        raise ConfigError(
            f"{name} of {module} is {kind}, and other processes import a function by its name. "
            f"Define it at the top of a module, and pass what it closes over as arguments."
        )
    if not _is_named(function, sys.modules.get(module), name):
        raise ConfigError(
            f"{module}.{name} is another object than the function that is sent. Give the function "
            f"the name under which its module has it: {name} = ..."
        )
    if module in ("__main__", _SCRIPT):
        module = _main_module(sys.modules[module])
    return f"{module}:{name}"


def load_function(name: str) -> Any:
    """Import a function by its name.

    Raises:
        ConfigError: if there is none.
    """
    module, _, path = name.rpartition(":")
    try:
        found: Any = _load_script(module) if module.endswith(".py") else _import(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(
            f"{name} cannot be imported in this process ({error}). The module must be on "
            f"PYTHONPATH, or beside the script."
        ) from None
    return found


def _import(module: str) -> ModuleType:
    return importlib.import_module(module)


def _load_script(path: str) -> ModuleType:
    """Import a script under another name than `__main__`, so that it does not run its main part."""
    known = sys.modules.get(_SCRIPT)
    if known is not None and getattr(known, "__file__", None) == path:
        return known
    spec = importlib.util.spec_from_file_location(_SCRIPT, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_SCRIPT] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_SCRIPT]
        raise
    return module


def _main_module(main: ModuleType) -> str:
    """Return the module that runs, by its name (`python -m`) or by its path."""
    spec = getattr(main, "__spec__", None)
    if spec is not None and main.__name__ == "__main__":
        return spec.name
    path = getattr(main, "__file__", None)
    if not path or not path.endswith(".py"):
        raise ConfigError(
            "the function is defined in a notebook or at a prompt, where no other process can "
            "import it. Write it into a file, such as steps.py, and import it from there."
        )
    return str(Path(path).resolve())


def _is_named(function: Any, module: ModuleType | None, name: str) -> bool:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function
