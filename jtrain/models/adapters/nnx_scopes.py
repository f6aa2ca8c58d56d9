"""Named scopes of nnx modules: traced operations carry the path of the module that computes them.

Linen and Haiku give such names themselves. `jtrain explain`, compiled programs and profiles show
them.
"""

import functools
from typing import Any

import jax
from flax import nnx

SCOPE = "scope_name"  # a static attribute of the module, so it survives split and merge


def name_scopes(module: nnx.Module) -> None:
    """Make each module inside `module` run in a named scope: its path from the module around it.

    The modules get a subclass of their class with the same name, whose `__call__` enters the scope.
    No array is touched.
    """
    paths = {path for path, part in nnx.iter_modules(module) if path and _can_scope(part)}
    for path, part in list(nnx.iter_modules(module)):
        if path not in paths:
            continue
        around = max((p for p in paths if p == path[: len(p)] and p != path), key=len, default=())
        part.__class__ = _scoped_class(type(part))
        setattr(part, SCOPE, "/".join(map(str, path[len(around) :])))


def _can_scope(module: nnx.Module) -> bool:
    return callable(module) and not hasattr(module, SCOPE)


@functools.cache
def _scoped_class(kind: type[nnx.Module]) -> type[nnx.Module]:
    plain_call: Any = kind.__call__

    @functools.wraps(plain_call)
    def call(self, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(getattr(self, SCOPE)):
            return plain_call(self, *args, **kwargs)

    names = {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__}
    scoped = type(kind.__name__, (kind,), names)
    scoped.__qualname__ = kind.__qualname__
    return scoped
