"""The sandbox of a chat template, with what transformers gives one."""

import datetime
import json
from collections.abc import Sequence
from typing import Any, ClassVar

from jtrain.data.sources.source import import_optional


def make_environment(marks: Sequence[str], day: str) -> Any:
    """Return jinja2's environment for a template.

    Args:
        marks: what stands before and after the text that `generation` encloses.
        day: what `strftime_now` writes, as 2026-11-27; empty: today.
    """
    sandbox = import_optional("jinja2.sandbox", "chat", "a chat template")
    extensions = import_optional("jinja2.ext", "chat", "a chat template")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[extensions.loopcontrols, _generation_tag(marks)],
    )
    now = datetime.datetime.fromisoformat(day) if day else datetime.datetime.now()
    environment.globals |= {"raise_exception": _raise, "strftime_now": now.strftime}
    environment.filters["tojson"] = _to_json
    return environment


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
