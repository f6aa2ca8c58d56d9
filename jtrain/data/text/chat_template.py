"""Chat templates: conversations as text, in a sandbox, and which of the text is an answer."""

import datetime
import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeAlias

from jtrain.data.sources.source import import_optional
from jtrain.data.text.tokenizer_file import GGUF, model_file, read_header
from jtrain.errors import DataError
from jtrain.io.regular_files import parse_json, read_bytes

Message: TypeAlias = Mapping[str, Any]  # role, content and what else a turn says
Values: TypeAlias = Mapping[str, Any]  # what a template reads beside messages, such as `tools`
NO_VALUES = MappingProxyType[str, Any]({})
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWERS = "assistant"  # their role
TOKENS = ("bos_token", "eos_token")
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field
# Fields that only tell messages apart; the order does that, too.
IDENTIFIERS = ("id", "tool_call_id")
TOOLS = ("tool", "function")  # roles; a `name` there is that of the call
PARTS = [{"type": "text", "text": "seven"}]
CALLS, OPENAI_CALLS = (
    [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    for arguments in ({"a": "seven"}, '{"a": "seven"}')
)


class Piece(NamedTuple):
    """Part of a conversation's text."""

    text: str
    is_answer: bool


class ChatTemplate:
    """Template of conversations, in the language of jinja2, as tokenizer_config.json has it.

    It runs in jinja2's sandbox, without files, modules or the attributes of Python's objects, and
    has what transformers gives: `messages`, `tools`, `documents`, `add_generation_prompt`,
    `raise_exception`, `strftime_now`, and the tags `break`, `continue` and `generation`.

    Args:
        source: the template; by default ChatML.
        where: its name in messages.
        day: what `strftime_now` writes, as 2026-11-27; empty: today.
        tokens: `bos_token` and `eos_token`, the texts of the tokens that begin and end a text.

    Raises:
        DataError: if the template is not valid or writes a token that is not given, or jinja2 is
            missing.
    """

    def __init__(
        self,
        source: str = CHATML,
        where: str = "the chat template",
        *,
        day: str = "",
        **tokens: str,
    ):
        self.source, self._where, self._tokens = source, where, tokens
        self._written: dict[str, bool] = {}  # fields that were tried
        # Nobody can guess the marks, so no message has them.
        marks = [f"\0{secrets.token_hex(8)}{end}" for end in "<>"]
        self._mark = re.compile(f"({'|'.join(marks)})")
        environment = _make_environment(marks, day)
        import jinja2.meta

        try:
            self._template = environment.from_string(source)
            names = self._names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateSyntaxError, RecursionError, SyntaxError, MemoryError) as error:
            line = getattr(error, "lineno", 1)  # the others are of a template nested too deeply
            raise DataError(
                f"{where} is not a valid template: line {line}: {error or type(error).__name__}. "
                f"Correct it, or take the tokenizer's own."
            ) from None
        for name in TOKENS:
            if name in names and name not in tokens:
                raise DataError(
                    f"{where} writes {name}, and no file says which token that is. Set {name} in "
                    f"the tokenizer_config.json that has the template or is beside it, as in "
                    f'"{name}": "</s>", or write the token out in the template.'
                )

    def render(
        self, messages: Sequence[Message], values: Values = NO_VALUES, *, prompt: bool = False
    ) -> str:
        """Return the text of a conversation; with `prompt` also what comes before an answer.

        Raises:
            DataError: if the template calls what it may not, or refuses the messages.
        """
        return self._mark.sub("", self._render(self.adapt(messages), values, prompt=prompt))

    def _render(self, messages: Sequence[Message], values: Values, *, prompt: bool = False) -> str:
        given = {"tools": None, "documents": None, **values, **self._tokens}
        given |= {"messages": messages, "add_generation_prompt": prompt}
        try:
            return self._template.render(given)
        except Exception as error:  # a template computes, so any error of Python's can be its own
            name = type(error).__name__
            hows = {"SecurityError": "calls what a template may not", "RefusalError": "refuses"}
            raise DataError(
                f"{self._where} {hows.get(name, f'fails with {name}')}: {error}. Correct the "
                f"messages or the template, or take the tokenizer's own."
            ) from None

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the template reads them, without fields that are null.

        Parts of text are joined, and the arguments of a tool, a text of JSON at OpenAI, become an
        object, unless the template takes them as they are. Reasoning has each of its names.
        """
        return [self._adapted(message) for message in messages]

    def _adapted(self, message: Message) -> Message:
        found = {name: value for name, value in message.items() if value is not None}
        if reasons := [found[name] for name in REASONING if name in found]:
            found = found | {"reasoning_content": reasons[0]}
            found.setdefault("thinking", reasons[0])
        content, calls = found.get("content"), found.get("tool_calls")
        if isinstance(content, list) and not self._writes("content", PARTS):
            found["content"] = "".join(part["text"] for part in content)
        texts_alone = calls and self._writes("tool_calls", OPENAI_CALLS)
        if isinstance(calls, list) and (not texts_alone or self._writes("tool_calls", CALLS)):
            found["tool_calls"] = [_with_object(call) for call in calls]
        return found

    def _writes(self, field: str, value: Any) -> bool:
        """Return whether the template writes a field of an answer, and not as Python's own text."""
        key = json.dumps(value)
        if key not in self._written:
            answer = {"role": ANSWERS, "content": "", field: value}
            try:
                text = self._render([{"role": "user", "content": "3+4?"}, answer], {})
            except DataError:
                text = ""
            self._written[key] = "seven" in text and not re.search(r"['\"]text['\"]: ", text)
        return self._written[key]

    def pieces(
        self,
        messages: Sequence[Message],
        values: Values = NO_VALUES,
        *,
        optional: Collection[str] = (),
    ) -> list[Piece]:
        """Return the text of a conversation in parts, each an answer or not.

        Answers are what the template has between `generation` and `endgeneration`. Without these
        tags an answer ends where the text of the conversation up to it ends, so with the mark of
        the end of a turn, and one with the `weight` 0 counts as none. The text may leave out the
        fields that are `optional`.

        Raises:
            DataError: if there is no answer, later messages change the text before them, or the
                text leaves out another field.
        """
        messages = self.adapt(messages)
        if re.search(r"\{%-?\s*generation\s*-?%\}", self.source):
            pieces, weights = self._marked(messages, values), (1,)
        else:
            last = max((i for i, m in enumerate(messages) if m["role"] == ANSWERS), default=-1)
            messages = messages[: last + 1] or messages
            pieces, weights = self._added(messages, values), (0, 1)
        if not any(piece.is_answer for piece in pieces):
            roles = ", ".join(str(message["role"]) for message in messages) or "no message"
            raise DataError(
                f"a conversation has no turn of the {ANSWERS}, so nothing of it is learned (its "
                f"roles: {roles}). Remove it, or name the role of the answers {ANSWERS!r}."
            )
        if all(message.get("weight", 1) in weights for message in messages):
            optional = {"weight", *optional}
        self._check_complete(messages, values, {"role", *IDENTIFIERS, *optional})
        return pieces

    def _marked(self, messages: Sequence[Message], values: Values) -> list[Piece]:
        """Return the parts that a template's tags `generation` divide its text in."""
        pieces, depth = [], 0
        for part in self._mark.split(self._render(messages, values)):
            if self._mark.fullmatch(part):
                depth += 1 if part.endswith("<") else -1
            elif part:
                pieces.append(Piece(part, depth > 0))
        return pieces

    def _added(self, messages: Sequence[Message], values: Values) -> list[Piece]:
        """Return the parts that each answer adds to the text."""
        pieces, text = [], ""
        for turn, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            before = self._render(messages[:turn], values, prompt=True)
            after = self._render(messages[: turn + 1], values)
            for longer, shorter in ((before, text), (after, before)):
                if not longer.startswith(shorter):
                    raise DataError(
                        f"{self._where} rewrites earlier messages once message {turn + 1} is "
                        f"there, so no part of the text is the answer alone. Give conversations of "
                        f"one answer each, or take a template that only adds text."
                    )
            pieces += [
                Piece(before[len(text) :], False),
                Piece(after[len(before) :], message.get("weight") != 0),
            ]
            text = after
        return pieces

    def _check_complete(
        self, messages: Sequence[Message], values: Values, optional: Collection[str]
    ) -> None:
        """Raise DataError if the text is the same without a field of a message or a value."""
        text, lost = self._render(messages, values), dict[str, str]()
        for turn, message in enumerate(messages):
            for name, less in _shortened(message):
                changed = [*messages[:turn], less, *messages[turn + 1 :]]
                if name not in optional and self._is_text(text, changed, values):
                    lost.setdefault(name, f"message {turn + 1} of the {message['role']!r}")
        for name, less in _shortened(values):
            is_list = isinstance(values[name], list)  # another value may be the template's default
            unread = name not in self._names or (is_list and self._is_text(text, messages, less))
            if name not in optional and unread:
                lost[name] = "the row"
        if lost:
            name, place = next(iter(lost.items()))
            raise DataError(
                f"{place} has {name!r}, and {self._where} does not write all of it. Take the "
                f"template of a model that does (data.template=FOLDER/tokenizer_config.json), "
                f"remove what is not written, or train without it: "
                f"data.ignore=[{', '.join(lost)}]"
            )

    def _is_text(self, text: str, messages: Sequence[Message], values: Values) -> bool:
        try:
            return self._render(messages, values) == text
        except DataError:
            return False


def _with_object(call: Any) -> Any:
    """Return a call of a tool whose arguments are not text."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(text := function.get("arguments"), str):
        return call
    function = {**function, "arguments": json.loads(text or "{}")}
    return {**call, "function": function} if "function" in call else function


def _shortened(fields: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what says something: its name, and the fields without it or without a list's entry."""
    aliases = [name for name in fields if name in REASONING][1:]
    for name, value in fields.items():
        if isinstance(value, list) and len(value) > 1:
            for i, one in enumerate(value):
                if _says(one.get("text", one) if isinstance(one, dict) else one):
                    yield name, {**fields, name: value[:i] + value[i + 1 :]}
        elif name in aliases or (name == "name" and fields.get("role") in TOOLS):
            continue
        elif _says(value):
            gone = REASONING if name in REASONING else (name,)
            yield name, {n: other for n, other in fields.items() if n not in gone}


def _says(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else value not in (None, [], {})


def _make_environment(marks: Sequence[str], day: str) -> Any:
    """Return the sandbox of jinja2 with what transformers has; `generation` writes the marks."""
    sandbox = import_optional("jinja2.sandbox", "chat", "a chat template")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_tag(marks)],
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
    from jinja2 import ext, nodes

    class Generation(ext.Extension):
        tags: ClassVar = {"generation"}  # pyright: ignore[reportIncompatibleVariableOverride]

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in marks)
            return [begin, nodes.Scope(body, lineno=line), end]

    return Generation


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Return a value as JSON, as transformers' `tojson` does; jinja2's own escapes it for HTML."""
    options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators}
    return json.dumps(value, sort_keys=sort_keys, **options)


CONFIG = "tokenizer_config.json"
MOST = 1 << 26  # bytes


def read_template(path: str, day: str = "") -> ChatTemplate:
    """Return the template of a file; ChatML for an empty path. A date in it is that of `day`.

    The tokens that it may write come from the GGUF file or the tokenizer_config.json: the file
    itself, or the one beside it. `path` may be a folder, or a name on the Hub.

    Raises:
        DataError: if the file cannot be read, or has no template.
    """
    if not path:
        return ChatTemplate(CHATML)
    name, path = f"data.template={path}", model_file(path, "chat_template.jinja", CONFIG)
    text = "" if path.endswith(GGUF) else _read(Path(path), name)
    if path.endswith((GGUF, ".json")):
        config = _gguf_config(Path(path)) if path.endswith(GGUF) else _parsed(text, name)
        return ChatTemplate(_source(config, name), path, day=day, **_tokens(config, name))
    beside = Path(path).parent / CONFIG
    config = _parsed(_read(beside, str(beside)), str(beside)) if beside.is_file() else {}
    return ChatTemplate(text, path, day=day, **_tokens(config, str(beside)))


def _gguf_config(path: Path) -> dict[str, Any]:
    """Return what a tokenizer_config.json would have of a GGUF file."""
    header = read_header(path)
    tokens = header.get("tokenizer.ggml.tokens", [])
    numbers = {key: header.get(f"tokenizer.ggml.{key}_id") for key in TOKENS}
    known = {key: tokens[i] for key, i in numbers.items() if i is not None and i < len(tokens)}
    return {"chat_template": header.get("tokenizer.chat_template"), **known}


def _read(path: Path, name: str) -> str:
    try:
        return read_bytes(path, most=MOST).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{name} cannot be read: {error}. Name a file in UTF-8 that you may read."
        ) from None


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        return dict(parse_json(text))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{name} is not an object of JSON: {error}. Take the {CONFIG} of the model, or name a "
            f"template of jinja2 in a file that does not end in .json."
        ) from None


def _source(config: dict[str, Any], name: str) -> str:
    """Return the template of a tokenizer_config.json; of several the one named `default`."""
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise DataError(
            f"{name} has no chat_template, or several and none named `default`. Leave it out for "
            f"ChatML, or write the template to a file: data.template=FILE.jinja"
        )
    return source


def _tokens(config: dict[str, Any], name: str) -> dict[str, str]:
    """Return the tokens that a template may write; null means that the tokenizer has none."""
    found = {}
    for key in TOKENS:
        if key in config:
            entry = config[key]
            found[key] = entry.get("content") if isinstance(entry, dict) else (entry or "")
            if not isinstance(found[key], str):
                raise DataError(
                    f'{name}: {key} {str(entry)[:60]} is not text. Set it, as in "{key}": "</s>".'
                )
    return found
