"""Public names of a package: written once, as type checkers read them, and imported on first use.

```python
if TYPE_CHECKING:
    from jtrain.models.transformer import Transformer as Transformer
else:
    __getattr__, __dir__ = lazy_names(__name__)
```

Public is what type checkers take for public: names that are imported as themselves (`import
Transformer as Transformer`), and aliases with an annotation.
"""

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, which read its source when first called."""
    return functools.partial(import_name, package), functools.partial(list_names, package)


def import_name(package: str, name: str) -> object:
    """Return the value of a public name of the package, and set it there."""
    if name == "__all__":
        return list_names(package)
    module = _homes(package).get(name)
    if module is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    home = importlib.import_module(module)
    submodule = module == package or not hasattr(home, name)
    value = importlib.import_module(f"{module}.{name}") if submodule else getattr(home, name)
    setattr(sys.modules[package], name, value)
    return value


def list_names(package: str) -> list[str]:
    """Return the public names of the package."""
    return sorted(_homes(package))


@functools.cache
def _homes(package: str) -> dict[str, str]:
    homes: dict[str, str] = {}
    source = Path(sys.modules[package].__file__ or "").read_text("utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            homes |= {a.name: node.module or "" for a in node.names if a.name == a.asname}
        elif isinstance(node, ast.AnnAssign):
            homes[ast.unparse(node.target)] = package
    return homes
