"""YAML 1.2 read into nodes with their line; data only, and every key once."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.nodes import Node as Yaml

from jtrain.config.lookup import shipped_configs
from jtrain.config.node import InvalidKey, Keys, Node, Plain, SourceLocation, dotted
from jtrain.errors import ConfigError
from jtrain.errors.spelling import nearest_choice
from jtrain.io.regular_files import open_regular

# Far beyond any config. An anchor can make a file grow without end, and the parser takes a second
# for so many values, or for half a megabyte.
DEPTH, VALUES, AGAIN, SIZE = 50, 5_000, 1_000, 1 << 19

# The parser's message, whether its start mark is the better place, and our words.
ADVICE = [
    ("mapping values are not", False, "a `:` too many, or a line that is indented wrongly, or a "
     "line above without a `:`; write `key: value`, and quote a value that has a colon"),
    ("could not find expected ':'", True, "a key without a `:`; write `key: value`"),
    ("found unexpected end of stream", True, "a quote is opened here and never closed"),
    ("or ']'", True, "a `[` is opened here and never closed, or a comma is missing"),
    ("or '}'", True, "a `{` is opened here and never closed, or a comma is missing"),
    ("found '<stream end>'", True, "a bracket is opened here and never closed"),
    ("expected <block end>", False, "this line does not fit the one above: give the keys of one "
     "mapping the same indentation"),
    ("sequence entries are not", False, "a list begins on a line of its own: put the `-` there"),
    ("that cannot start any token", False, "no value begins with this sign: put it in quotes"),
    ("found undefined alias", False, "no anchor has this name; quote a text that begins with `*`"),
    ("unknown escape", False, "unknown escape after a backslash: use 'single quotes'"),
    ("found another document", False, "a second document begins here: a config is one; "
     "delete the `---`"),
]  # fmt: skip


def read(path: Path, layer: int, *, inside: Path | None = None) -> tuple[Node, list[InvalidKey]]:
    """Return the mapping in a file, and the errors that did not stop the parser.

    Below the directory `inside`, if one is named, no link is followed.

    Raises:
        ConfigError: if there is no such file, or it holds no config.
    """
    node, mistakes = parse(_text(path, inside), lambda line: SourceLocation(layer, str(path), line))
    if node is None:
        raise ConfigError(f"{path}: is empty; a config has at least experiment, steps and batch")
    if not isinstance(node.value, dict):
        raise ConfigError(
            f"{node.origin.place('')}: a config is a mapping, lines of `key: value`, and this is "
            f"{'a list' if isinstance(node.value, list) else 'one value'}; write `steps: 100`"
        )
    return node, mistakes


def parse(
    text: str, origin: Callable[[int], SourceLocation], keys: Keys = ()
) -> tuple[Node | None, list[InvalidKey]]:
    """Parse YAML text for the value of `keys`; return its node, None if empty, and its errors."""
    if re.match(r"(\s*(#.*)?\n)*%", text):
        raise ConfigError(f"{origin(1).place('')}: a config is YAML 1.2; delete the line with `%`")
    if len(text) > SIZE:
        raise ConfigError(f"{origin(1).place(dotted(keys[:1]))}: {_TOO_LONG}")
    loader = YAML(typ="safe", pure=True)
    loader.Composer = _Bounded
    try:
        root = loader.compose(text)
        reading = _Reading(loader.constructor.construct_object, origin)
        if root is None:
            return None, []
        return reading.node(root, keys, root.start_mark.line), reading.mistakes
    except ConfigError:
        raise
    except MarkedYAMLError as error:
        line, words = _explain(error, text)
        raise ConfigError(f"{origin(line + 1).place('')}: {words}") from None
    except (RecursionError, _TooMuchError) as error:
        words = _TOO_DEEP if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{origin(1).place('')}: {words}") from None
    except (
        YAMLError,
        ValueError,
    ) as error:  # characters that no text may hold, such as control characters
        found = next((i for i, c in enumerate(text) if c not in "\n\t" and not c.isprintable()), 0)
        line = text.count("\n", 0, found) + 1
        words = f"not text that YAML may hold ({str(error).splitlines()[0]}); delete that character"
        raise ConfigError(f"{origin(line).place('')}: {words}") from None


_TOO_DEEP = f"values lie more than {DEPTH} deep in one another; a config has no use for that"
_TOO_MANY = f"more than {VALUES:,} values; keep data in files of its own, and name those"
_TOO_LARGE = f"has too many digits: a whole number is at most {2**63 - 1}; write less"
_TOO_LONG = f"more than {SIZE:,} bytes; keep data in files of its own, and name those"


class _TooMuchError(Exception):
    """Too many values, or values nested too deep."""


class _Bounded(Composer):
    """Composer that stops at a limit of depth and of values."""

    within = found = 0

    def __init__(self, loader: Any = None):
        super().__init__(loader=loader)
        self.warn_double_anchors = False  # the last one counts, by the YAML specification

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.found += 1
        self.within += 1
        if self.within > DEPTH + 5 or self.found > VALUES:
            raise _TooMuchError(_TOO_MANY if self.found > VALUES else _TOO_DEEP)
        node = super().compose_node(parent, index)
        self.within -= 1
        return node


class _Reading:
    """Conversion of parsed YAML to nodes, in one pass."""

    def __init__(self, construct: Callable, origin: Callable[[int], SourceLocation]):
        self.mistakes: list[InvalidKey] = []
        self._construct, self._origin = construct, origin
        self._visited: set[int] = set()
        self._again = 0  # values repeated by an anchor

    def node(self, yaml: Yaml, keys: Keys, line: int) -> Node:
        self._again += id(yaml) in self._visited
        self._visited.add(id(yaml))
        origin = self._origin(line + 1)
        if len(keys) > DEPTH or self._again > AGAIN:
            many = f"anchors bring more than {AGAIN:,} values again; write them once"
            words = _TOO_DEEP if len(keys) > DEPTH else many
            raise ConfigError(f"{origin.place(dotted(keys[:1]))}: {words}")
        if isinstance(yaml, MappingNode):
            return Node(self._mapping(yaml, keys), origin)
        if isinstance(yaml, SequenceNode):
            items = enumerate(yaml.value)
            return Node([self.node(v, (*keys, i), v.start_mark.line) for i, v in items], origin)
        assert isinstance(yaml, ScalarNode), f"the parser knows three kinds of node, not {yaml}"
        return Node(self._scalar(yaml, keys, origin), origin, None, yaml.value)

    def _mapping(self, yaml: MappingNode, keys: Keys) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for key, value in yaml.value:
            origin = self._origin(key.start_mark.line + 1)
            if not isinstance(key, ScalarNode):
                self._add_invalid_key(origin, keys, "a key is a word; write `key: value`")
                continue
            here = (*keys, key.value)
            if key.value in found:
                first = found[key.value].origin.line
                where = f" (first in line {first})" if first else ""
                self._add_invalid_key(origin, here, f"is given twice{where}; keep one")
            found[key.value] = self.node(value, here, key.start_mark.line)
        return found

    def _scalar(self, yaml: ScalarNode, keys: Keys, origin: SourceLocation) -> Plain:
        tag = str(yaml.tag).removeprefix("tag:yaml.org,2002:")
        try:
            if tag in {"int", "float"} and "_" in yaml.value:  # a number of YAML 1.1
                return yaml.value
            if tag in {"int", "float", "bool", "null"}:
                return self._counted(self._construct(yaml, deep=True), keys, origin)
            if tag in {"str", "timestamp", "value", "merge"}:  # a date is text
                yaml.value.encode()
                return yaml.value
            self._add_invalid_key(origin, keys, f"`!{tag}` is no data; write a number or a text")
        # `!!int x`, `!!int` of nothing, a number of 5000 digits, half a character
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            if tag == "int" and re.fullmatch("[-+]?[0-9]{19,}", yaml.value):
                self._add_invalid_key(origin, keys, _TOO_LARGE)
                return 1
            self._add_invalid_key(origin, keys, "cannot be stored; write a number or a text")
        return None

    def _counted(self, value: Plain, keys: Keys, origin: SourceLocation) -> Plain:
        """Return the value, or 1 for a whole number that does not fit 64 bits."""
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            self._add_invalid_key(origin, keys, _TOO_LARGE)
            return 1
        return value

    def _add_invalid_key(self, origin: SourceLocation, keys: Keys, words: str) -> None:
        self.mistakes.append(InvalidKey(origin, dotted(keys), words))


def _explain(error: MarkedYAMLError, text: str) -> tuple[int, str]:
    """Return the line of an error, from 0, and a message."""
    problem = error.problem or ""
    line = error.problem_mark.line if error.problem_mark else 0
    lines = text.splitlines()
    written = lines[line] if line < len(lines) else ""
    if "\t" in written[: len(written) - len(written.lstrip())] or "'\\t'" in problem:
        return line, "a tab; YAML indents with spaces: put two spaces in its place"
    for problem_text, begin, words in ADVICE:
        if problem_text in problem:
            mark = error.context_mark if begin and error.context_mark else error.problem_mark
            return mark.line if mark else line, words
    return line, f"this is not YAML ({problem}); write `key: value`"


def _text(path: Path, inside: Path | None = None) -> str:
    try:
        with _opened(path, inside) as file:
            data = file.read(SIZE + 1)
        return _check_length(path, data).decode("utf-8-sig")
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ConfigError(
            f"{path}:{line}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8"
        ) from None
    except IsADirectoryError:
        configs = sorted(p.name for p in path.glob("*.yaml"))
        listed = f"; it has {', '.join(configs[:8])}" if configs else ""
        raise ConfigError(f"{path}: is a directory, and a config is a file{listed}") from None
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise ConfigError(f"{path}: no such file{_near_file(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _opened(path: Path, inside: Path | None) -> BinaryIO:
    """Open the file; a pipe where a shell gives one, as in `jtrain run <(sed s/a/b/ x.yaml)`."""
    given = str(path).startswith(("/dev/fd/", "/proc/self/fd/")) or str(path) == "/dev/stdin"
    return path.open("rb") if given else open_regular(path, inside=inside)


def _check_length(path: Path, data: bytes) -> bytes:
    if len(data) > SIZE:
        raise ConfigError(f"{path}: {_TOO_LONG}")
    return data


def _near_file(path: Path) -> str:
    own = nearest_choice(path.stem, shipped_configs())
    comes = f"; did you mean {own}, which comes with jtrain?" if own else ""
    try:
        present = sorted(p.name for p in path.parent.iterdir())
    except (OSError, ValueError):
        return comes or f"; there is no directory {path.parent}"
    configs = [name for name in present if name.endswith((".yaml", ".yml"))]
    near = nearest_choice(path.name, configs) or nearest_choice(f"{path.name}.yaml", configs)
    if near:
        return f"; did you mean {path.parent / near}?"
    listed = f"; {path.parent}/ has {', '.join(configs[:8])}" if configs else ""
    return comes or listed or f"; these come with jtrain: {', '.join(shipped_configs())}"
