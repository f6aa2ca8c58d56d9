"""The sandbox of a chat template, with bounds of what it computes and of what it writes.

A template is a stranger's, and `{{ 'a' * 10 ** 10 }}` is a valid one.
"""

import datetime
import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from jtrain.data.sources.source import import_optional

MOST = 1 << 24  # characters of a value, and of all that is written
ITEM = 16  # characters that an item of a list and a round of a loop count for
WIDTH = 1 << 20  # the largest number that a filter or a method is given
GROWING = {"replace", "join", "indent", "format"}  # filters


class TemplateBoundError(Exception):
    """A template that computes more than it may."""


def make_environment(marks: Sequence[str], day: str) -> Any:
    """Return jinja2's environment for a template, bounded, with what transformers gives one.

    Args:
        marks: what stands before and after the text that `generation` encloses.
        day: what `strftime_now` writes, as 2026-11-27; empty: today.
    """
    sandbox = import_optional("jinja2.sandbox", "chat", "a chat template")
    extensions = import_optional("jinja2.ext", "chat", "a chat template")
    environment = bounded(sandbox.ImmutableSandboxedEnvironment)(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[extensions.loopcontrols, _generation_tag(marks)],
    )
    now = datetime.datetime.fromisoformat(day) if day else datetime.datetime.now()
    environment.globals |= {"raise_exception": _raise, "strftime_now": now.strftime}
    environment.filters["tojson"] = bounded_filter("tojson", _to_json)
    return environment


@functools.cache
def bounded(environment: type) -> Any:
    """Return a subclass of jinja2's sandboxed environment whose values are bounded."""
    jinja = import_optional("jinja2", "chat", "a chat template")
    nodes = import_optional("jinja2.nodes", "chat", "a chat template")

    class Rewriter(import_optional("jinja2.visitor", "chat", "a chat template").NodeTransformer):
        def visit_Concat(self, node: Any) -> Any:  # noqa: N802  # jinja2's name
            node = self.generic_visit(node)
            node.nodes = [self._filter(each, "string") for each in node.nodes]
            return self._filter(node, "string")

        def visit_For(self, node: Any) -> Any:  # noqa: N802
            node = self.generic_visit(node)
            node.iter = self._filter(node.iter, "rounds")
            return node

        def _filter(self, node: Any, name: str) -> Any:
            return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    write = jinja.pass_context(lambda context, value: _spend(context, value, _size(value)))
    rounds = jinja.pass_context(_loop_over)

    class Bounded(environment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})
        concat = staticmethod(lambda pieces: "".join(_take(pieces)))

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, finalize=write, **kwargs)
            self.filters = {name: bounded_filter(name, f) for name, f in self.filters.items()}
            self.filters["rounds"] = rounds
            self.globals.pop("lipsum", None)

        def _parse(self, *args: Any) -> Any:
            tree = Rewriter().visit(super()._parse(*args))
            return tree.set_environment(self)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operator(operator, left, right)
            return _checked(super().call_binop(context, operator, left, right))

        def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
            _take((*args, *kwargs.values()))
            owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
            if isinstance(owner, str):
                _check_growth(owner, *args, *kwargs.values())
            return _checked(super().call(context, obj, *args, **kwargs))

    return Bounded


def _check_operator(operator: str, left: Any, right: Any) -> None:
    factor = max(x if isinstance(x, int) else 1 for x in (left, right))
    sized = [x for x in (left, right) if hasattr(x, "__len__")]
    _bound(_size(sized[0]) * factor if operator == "*" and sized else 0)
    _bound(factor if operator == "**" else 0, WIDTH)
    if operator == "%" and isinstance(left, str):
        _check_growth(left)
        _checked(right)


def _checked(value: Any, before: int = 0) -> Any:
    _bound(before + _size(value))
    return value


def _bound(size: int, most: int = MOST) -> None:
    if size > most:
        raise TemplateBoundError(f"it makes, writes or loops over more than {most:,} characters")


def _loop_over(context: Any, values: Any) -> Any:
    values = _take(values) if hasattr(values, "__next__") else values
    return _spend(context, values, ITEM * len(values) if hasattr(values, "__len__") else 0)


def _spend(context: Any, value: Any, size: int) -> Any:
    """Return the value if what a rendering has written and looped over is within `MOST`."""
    context.spent = getattr(context, "spent", 0) + size
    _bound(context.spent)
    return value


def _take(values: Iterable[Any]) -> list[Any]:
    taken, size = [], 0
    for value in values:
        taken.append(_checked(value, size))
        size += _size(value)
    return taken


def bounded_filter(name: str, function: Any) -> Any:
    """Return a filter whose arguments and result are bounded."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # An iterator is of another filter, such as map.
        given = [_take(x) if hasattr(x, "__next__") else _checked(x) for x in args]
        words = (*given, *kwargs.values())
        _check_growth(*(words if name in GROWING else [x for x in words if isinstance(x, int)]))
        return _checked(function(*given, **kwargs))

    return call


def _check_growth(*values: Any) -> None:
    """Raise if two of the values can make a text of more than some `MOST`, or a number can."""
    sizes = sorted(_size(x) for x in values if not isinstance(x, int))[-2:]
    texts = [x for x in values if isinstance(x, str)]
    widths = [int(n) for x in texts for n in re.findall(r"(?<=[%:<>=^0*.-])\d{6,18}", x[:MOST])]
    for x in (*values, *widths):
        _bound(x if isinstance(x, int) else 0, WIDTH)
    _bound(sizes[0] * sizes[1] if len(sizes) > 1 else 0, 64 * MOST)
    _bound(max(sizes, default=0))


def _size(value: Any) -> int:
    """Return the characters of a value as text, roughly; counting ends above `MOST`."""
    size, waiting = 0, [value]
    while waiting and size <= MOST:
        one = waiting.pop()
        size += len(one) if isinstance(one, str | bytes) else ITEM
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
    return size


class RefusalError(Exception):
    """A template's own words about messages that it does not take."""


def _raise(message: str) -> None:
    raise RefusalError(message)


def _generation_tag(marks: Sequence[str]) -> type:
    """Return the extension of jinja2 that puts marks around what `generation` encloses."""
    jinja = import_optional("jinja2", "chat", "a chat template")
    nodes = jinja.nodes

    class Generation(jinja.ext.Extension):
        tags: ClassVar = {"generation"}

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in marks)
            return [begin, nodes.Scope(body, lineno=line), end]

    return Generation


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, as transformers' `tojson` does; jinja2's own escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
