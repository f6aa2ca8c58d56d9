"""Reading of a config: YAML 1.2 as nodes with their line, over its bases, under typed settings."""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.nodes import Node as Yaml

from jtrain.config.lookup import shipped_configs
from jtrain.config.messages import find_schemas
from jtrain.config.node import (
    FILE,
    TYPED,
    InvalidKey,
    Keys,
    Node,
    Plain,
    SourceLocation,
    dotted,
    find_node,
    merge,
)
from jtrain.config.schema import describe_allowed
from jtrain.config.top import BaseConfig
from jtrain.errors import ConfigError
from jtrain.errors.spelling import nearest_choice
from jtrain.io.regular_files import open_regular

# Far beyond any config, and read in seconds. Anchors can make a file grow without end.
DEPTH, VALUES, SIZE = 50, 5_000, 1 << 16

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
_TOO_DEEP = f"values lie more than {DEPTH} deep in one another; a config has no use for that"
_TOO_MANY = f"more than {VALUES:,} values, with those of anchors; keep data in files of its own"
_TOO_LARGE = f"has too many digits: a whole number is at most {2**63 - 1}; write less"
_TOO_LONG = f"more than {SIZE:,} bytes; keep data in files of its own, and name those"


def merge_layers(path: Path, settings: Sequence[str]) -> tuple[Node, list[InvalidKey]]:
    """Merge the file over its bases and `a.b=value` over both; return the errors of all.

    Raises:
        ConfigError: if the file, or a config that it inherits from, cannot be read.
    """
    node, mistakes = _with_bases(path, FILE, ())
    for setting in settings:
        node, found = _set(node, setting)
        mistakes += found
    return node, mistakes


def _with_bases(path: Path, layer: int, above: tuple[Path, ...]) -> tuple[Node, list[InvalidKey]]:
    node, mistakes = read(path, layer)
    base = node.value.pop("base", None)
    if base is None:
        return node, mistakes
    chain, words = (*above, path.resolve()), ""
    below = path.parent / str(base.value)
    if not isinstance(base.value, str) or not base.value:
        words = "must be the name of a file, from this one's directory; write `base: other.yaml`"
    elif below.suffix not in {".yaml", ".yml"} or Path(str(base.value)).is_absolute():
        words = (
            f"must be a config (.yaml) by its place from this file's directory, found "
            f"{base.value!r}; write `base: other.yaml`"
        )
    elif below.is_symlink() or (below.exists() and not below.is_file()):
        what = "a link, and a base is named itself" if below.is_symlink() else "no file"
        words = f"{below} is {what}; write `base: other.yaml`"
    elif below.resolve() in chain:
        names = " -> ".join(p.name for p in (*chain, below))
        words = f"inherits from itself: {names}; delete one `base:`"
    else:
        try:
            inherited, found = _with_bases(below, layer - 1, chain)
            return merge(inherited, node), mistakes + found
        except ConfigError as error:
            words = str(error)
    raise ConfigError("\n".join(map(str, [*mistakes, InvalidKey(base.origin, "base", words)])))


def _set(root: Node, setting: str) -> tuple[Node, list[InvalidKey]]:
    key, equals, text = setting.partition("=")
    keys, origin = tuple(key.split(".")), SourceLocation(TYPED, setting=setting)
    if not equals or not all(keys):
        words = "is not a setting; write KEY=VALUE, such as optimizer.lr=1e-3"
    elif keys[0] == "base":
        words = f"only a file can inherit; write `base: {text}` in it"
    elif not text.strip():
        words = f"has no value; write {_value_of(key)}"
    elif refused := _blocked(root, keys):
        words = refused
    else:
        try:
            value, mistakes = parse(text, lambda _: origin, keys)
            return put(root, keys, value or Node(None, origin)), mistakes
        except ConfigError as error:
            found = str(error).removeprefix(f"{origin.place('')}: ")
            words = f"{found}; or quote it: {key}={shlex.quote(json.dumps(text))}"
    return root, [InvalidKey(origin, key, words)]


def _value_of(key: str) -> str:
    """Return how to type null or an empty text if it is allowed, and otherwise any value."""
    wants = find_schemas(BaseConfig, key)  # an experiment's own keys are not known yet
    types = {member.annotation for want in wants for member in want.members()}
    null = f"{key}=null for nothing" if type(None) in types else ""
    empty = f"{key}='\"\"' for empty text" if any(want.default == "" for want in wants) else ""
    allowed = f", {describe_allowed(wants[0])}" if wants else ""
    return " or ".join(filter(None, (null, empty))) or f"{key}=VALUE{allowed}"


def _blocked(root: Node, keys: Keys) -> str:
    """Return why `keys` can have no value: a key on the way is not a mapping."""
    for depth in range(1, len(keys)):
        node = find_node(root, keys[:depth])
        if node and not isinstance(node.value, dict):
            what = "is a list: say all of it" if isinstance(node.value, list) else "has no keys"
            return (
                f"{dotted(keys[:depth])} ({node.origin}) {what}; write {dotted(keys[:depth])}=VALUE"
            )
    return ""


def put(parent: Node | None, keys: Keys, node: Node) -> Node:
    """Return the parent with a node at `keys`, over the one that was there."""
    if not keys:
        return Node(node.value, node.origin, parent, node.text)
    parent = parent or Node({}, node.origin)
    child = put(parent.value.get(keys[0]), keys[1:], node)
    return Node({**parent.value, keys[0]: child}, parent.origin, parent.under)


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
    loader.composer.warn_double_anchors = False  # the last one counts, by the YAML specification
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
    except RecursionError:
        raise ConfigError(f"{origin(1).place('')}: {_TOO_DEEP}") from None
    except (YAMLError, ValueError) as error:  # control characters, which no text may hold
        found = next((i for i, c in enumerate(text) if c not in "\n\t" and not c.isprintable()), 0)
        line = text.count("\n", 0, found) + 1
        words = f"not text that YAML may hold ({str(error).splitlines()[0]}); delete that character"
        raise ConfigError(f"{origin(line).place('')}: {words}") from None


class _Reading:
    """Conversion of parsed YAML to nodes, in one pass."""

    def __init__(self, construct: Callable, origin: Callable[[int], SourceLocation]):
        self.mistakes: list[InvalidKey] = []
        self._construct, self._origin = construct, origin
        self._values = 0

    def node(self, yaml: Yaml, keys: Keys, line: int) -> Node:
        self._values += 1
        origin = self._origin(line + 1)
        if len(keys) > DEPTH or self._values > VALUES:
            words = _TOO_DEEP if len(keys) > DEPTH else _TOO_MANY
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
            self._add_invalid_key(origin, keys, f"`!{tag}` is not data; write a number or a text")
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
        if len(data) > SIZE:
            raise ConfigError(f"{path}: {_TOO_LONG}")
        return data.decode("utf-8-sig")
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
