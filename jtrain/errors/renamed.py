"""Advice for imports of names that moved: the statement to write today."""

import ast
import linecache
import re
import textwrap
import traceback

from jtrain.errors.old_names import MODULES, NAMES

_ATTRIBUTE = re.compile(r"module '(jtrain[\w.]*)' has no attribute '(\w+)'")


def rename_advice(error: BaseException) -> str | None:
    """Return what to write for a name of jtrain that moved; None for every other error."""
    if isinstance(error, AttributeError):
        found = _ATTRIBUTE.search(str(error))
        path = f"{found[1]}.{found[2]}" if found else ""
        moved = NAMES.get(path) or MODULES.get(path)
        return f"{path} is called {moved} now." if moved else None
    if isinstance(error, ImportError):
        statement = _failed_import(error)
        lines = _rewritten(statement) if statement else _module_line(error.name)
        if lines:
            return "Names of jtrain have moved. Write:\n" + textwrap.indent(
                "\n".join(lines), "    "
            )
    return None


def new_path(path: str) -> str | None:
    """Return the path of a module or name today; None if it did not move."""
    module, _, name = path.rpartition(".")
    if path in NAMES or path in MODULES:
        return NAMES.get(path) or MODULES[path]
    return f"{MODULES[module]}.{name}" if module in MODULES else None


def _failed_import(error: BaseException) -> ast.Import | ast.ImportFrom | None:
    """Return the last import of jtrain in the traceback, parsed."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        first, last = frame.lineno or 1, frame.end_lineno or frame.lineno or 1
        source = "".join(linecache.getline(frame.filename, n) for n in range(first, last + 1))
        try:
            (statement,) = ast.parse(textwrap.dedent(source)).body
        except (SyntaxError, ValueError):
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom)) and "jtrain" in source:
            return statement
    return None


def _rewritten(statement: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the lines that import the same names from where they are today; [] if none moved."""
    if isinstance(statement, ast.Import):
        moved = [(alias, new_path(alias.name)) for alias in statement.names]
        lines = [f"import {path or alias.name}" + _bound(alias.asname) for alias, path in moved]
        return lines if any(path for _, path in moved) else []
    by_module: dict[str, list[str]] = {}
    changed = False
    for alias in statement.names:
        path = new_path(f"{statement.module}.{alias.name}")
        changed = changed or path is not None
        module, _, name = (path or f"{statement.module}.{alias.name}").rpartition(".")
        bound = alias.asname or alias.name
        by_module.setdefault(module, []).append(name + _bound(bound if bound != name else None))
    if not changed:
        return []
    return [f"from {module} import {', '.join(names)}" for module, names in by_module.items()]


def _bound(name: str | None) -> str:
    return f" as {name}" if name else ""


def _module_line(module: str | None) -> list[str]:
    path = new_path(module or "")
    return [f"import {path}  # was {module}"] if path else []
