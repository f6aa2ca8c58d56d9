"""YAML in blocks, as people write manifests: a line a key, lists of plain values on one line."""

import io
from collections.abc import Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import LiteralScalarString

_WIDTH = 96  # characters of a list on one line; ruamel counts without the indent


def format_blocks(documents: Sequence[Any], header: str = "") -> str:
    """Return documents as YAML, texts of several lines as they are.

    Args:
        documents: JSON values; the keys of mappings stay in their order.
        header: lines of a comment above.
    """
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 4096  # a command stays on one line
    stream = io.StringIO()
    stream.writelines(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    for i, document in enumerate(documents):
        stream.write("---\n" if i else "")
        yaml.dump(_blocks(document), stream)
    return stream.getvalue().rstrip("\n") + "\n"  # none after a text at the end


def _blocks(value: Any) -> Any:
    """Return the value with the style of each part."""
    if isinstance(value, dict):
        return CommentedMap((key, _blocks(child)) for key, child in value.items())
    if isinstance(value, list | tuple):
        items = CommentedSeq(map(_blocks, value))
        scalars = not any(isinstance(item, dict | list | tuple) for item in value)
        if scalars and sum(len(str(item)) + 2 for item in value) <= _WIDTH:
            items.fa.set_flow_style()
        return items
    return LiteralScalarString(value) if isinstance(value, str) and "\n" in value else value
