"""A program from pieces: values filled in, their branches decided, unused definitions left out."""

import ast
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple, TypeAlias

PIECES = "jtrain.inspect.eject.pieces"
Values: TypeAlias = Mapping[str, Any]
Section: TypeAlias = tuple[str, Sequence[str]]  # head, and the names of its pieces
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
}
THEIRS = re.compile(r"(import|from) (jax|optax|numpy)")


class Definition(NamedTuple):
    """A statement of a piece, with the comments above it."""

    name: str  # what it defines, or adds to: `gelu` of gelu.defvjp(...); empty: it is always needed
    text: str
    uses: frozenset[str]


def assemble(sections: Sequence[Section], values: Values) -> tuple[str, str]:
    """Return the imports and the body of a program that is made of pieces: all that `main` uses.

    Raises:
        KeyError: if a piece has a value that `values` lacks.
    """
    imports, parts = set[str](), dict[str, list[Definition]]()
    for head, pieces in sections:
        parts[head] = []
        for piece in pieces:
            source = resources.files(PIECES).joinpath(f"{piece}.py").read_text("utf-8")
            source = fill(source, values)
            imports |= set(_imports(source))
            parts[head] += _definitions(source)
    reached = _reach([one for found in parts.values() for one in found])
    texts = {
        head: [one.text for one in found if one.name in reached] for head, found in parts.items()
    }
    body = "\n\n\n".join(_spaced([f"# {head}", *some]) for head, some in texts.items())
    names = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    used = sorted(line for line in imports if line.split()[-1].partition(".")[0] in names)
    used.sort(key=lambda line: line.startswith("from"))
    theirs = [line for line in used if THEIRS.match(line)]
    ours = [line for line in used if line not in theirs]
    return "\n".join([*ours, "", *theirs]), body


def fill(source: str, values: Values) -> str:
    """Return the source of a piece with its values, and without the branches they do not take."""
    while edit := next(_edits(source, values), None):
        first, last, text = edit
        source = source[:first] + text + source[last:]
    return source


def _edits(source: str, values: Values) -> Iterator[tuple[int, int, str]]:
    """Yield the first and last character of what is replaced, outermost first, and by what.

    Only the first is taken, as it moves the others. Pieces are ASCII.
    """
    lines = source.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    begin = lambda node: starts[node.lineno - 1] + node.col_offset
    end = lambda node: starts[node.end_lineno - 1] + node.end_col_offset
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.target.id.isupper():
                yield end(node.target), end(node.value), f" = {_literal(values[node.target.id])}"
        elif isinstance(node, ast.IfExp | ast.If):
            try:
                known = bool(_evaluate(node.test, values))
            except KeyError:  # it depends on more than values
                continue
            if isinstance(node, ast.IfExp):
                chosen = node.body if known else node.orelse
                yield begin(node), end(node), source[begin(chosen) : end(chosen)]
            else:
                text = "".join(_branch(node, lines, known))
                yield starts[node.lineno - 1], starts[node.end_lineno or 0], text


def _evaluate(test: ast.expr, values: Values) -> Any:
    """Return the value of an expression; raise KeyError if it has other names than those."""
    match test:
        case ast.Constant():
            return test.value
        case ast.Name():
            return values[test.id]
        case ast.UnaryOp(op=ast.Not()):
            return not _evaluate(test.operand, values)
        case ast.BoolOp():
            known = [_evaluate(each, values) for each in test.values]
            return all(known) if isinstance(test.op, ast.And) else any(known)
        case ast.Compare(ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return _COMPARE[type(op)](_evaluate(test.left, values), _evaluate(right, values))
    raise KeyError(ast.unparse(test))


def _branch(node: ast.If, lines: Sequence[str], known: bool) -> list[str]:
    """Return the lines of the branch that is taken, comments included, in the place of the `if`."""
    first, last = node.test.end_lineno or 0, node.body[-1].end_lineno or 0
    if not known:
        if not node.orelse:
            return []
        first, last = node.orelse[0].lineno - 1, node.end_lineno or 0
        if lines[first].lstrip().startswith("elif"):
            return [lines[first].replace("elif", "if", 1), *lines[first + 1 : last]]
        while lines[first - 1].strip() != "else:":
            first -= 1
    return [line.removeprefix("    ") for line in lines[first:last]]


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')


def _imports(source: str) -> Iterator[str]:
    """Yield the imports of a piece, a name each, without those of other pieces."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom) and PIECES not in ast.unparse(node):
            before, _, names = ast.unparse(node).rpartition("import ")
            yield from (f"{before}import {name}" for name in names.split(", "))


def _definitions(source: str) -> Iterator[Definition]:
    lines, end = source.splitlines(), 0
    for node in ast.parse(source).body:
        begin, end = end, node.end_lineno or 0
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Expr):
            name = ast.unparse(node).partition(".")[0]
        else:
            name = "" if isinstance(node, ast.If) else names[0]
        yield Definition(name, "\n".join(lines[begin:end]).strip("\n"), frozenset(names))


def _reach(found: Sequence[Definition]) -> set[str]:
    """Return the names that `main` uses, by way of others too."""
    reached, waiting = set[str](), ["", "main"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [other for one in found if one.name == name for other in one.uses]
    return reached


def _spaced(texts: Sequence[str]) -> str:
    """Join statements: two blank lines around functions and classes, none between constants."""
    joined = texts[0]
    for before, text in itertools.pairwise(texts):
        block = any(re.search(r"^(def |class |@)", each, re.MULTILINE) for each in (before, text))
        apart = "\n\n\n" if block else "\n\n" if text.startswith("#") or before[0] == "#" else "\n"
        joined += apart + text
    return joined
