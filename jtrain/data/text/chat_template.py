"""Chat templates: conversations as text, in a sandbox, and which of the text is an answer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jtrain.data.sources.source import import_optional
from jtrain.errors import DataError

Message = Mapping[str, Any]  # role and content
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWERS = "assistant"
TOKENS = ("bos_token", "eos_token")


class Piece(NamedTuple):
    """Part of a conversation's text."""

    text: str
    is_answer: bool


class ChatTemplate:
    """Template of conversations, in the language of jinja2, as tokenizer_config.json has it.

    It runs in jinja2's sandbox, without files, modules or the attributes of Python's objects, and
    has `messages`, `add_generation_prompt` and `raise_exception`.

    Args:
        source: the template; by default ChatML.
        where: its name in messages.
        tokens: `bos_token` and `eos_token`, the texts of the tokens that begin and end a text.

    Raises:
        DataError: if the template is not valid or writes a token that is not given, or jinja2 is
            missing.
    """

    def __init__(self, source: str = CHATML, where: str = "the chat template", **tokens: str):
        self.source, self._where, self._tokens = source, where, tokens
        sandbox = import_optional("jinja2.sandbox", "chat", "a chat template")
        self._jinja = import_optional("jinja2", "chat", "a chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
            used = import_optional("jinja2.meta", "chat", "a chat template")
            names = used.find_undeclared_variables(environment.parse(source))
        except self._jinja.TemplateSyntaxError as error:
            raise DataError(
                f"{where} is no valid template: line {error.lineno}: {error}."
            ) from None
        except (RecursionError, SyntaxError, MemoryError):  # of jinja2's and Python's compiler
            raise DataError(
                f"{where} is no valid template: it is nested too deeply. Take the tokenizer's own."
            ) from None
        for name in TOKENS:
            if name in names and name not in tokens:
                raise DataError(
                    f"{where} writes {name}, and no file says which token that is. Set {name} in "
                    f"the tokenizer_config.json that has the template or is beside it, as in "
                    f'"{name}": "</s>", or write the token out in the template.'
                )

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Return the text of a conversation; with `prompt` also what comes before an answer.

        Raises:
            DataError: if the template calls what it may not, or refuses the messages.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=prompt, **self._tokens
            )
        except self._jinja.exceptions.SecurityError as error:
            raise DataError(
                f"{self._where} calls what a template may not: {error}. A template only arranges "
                f"messages as text: take the tokenizer's own, or remove the call."
            ) from None
        except _RefusalError as error:
            raise DataError(
                f"{self._where} refuses the messages: {error}. Change the messages, or take "
                f"another template."
            ) from None
        except Exception as error:  # a template computes, so any error of Python's can be its own
            raise DataError(
                f"{self._where} fails: {type(error).__name__}: {error}. Correct the template or "
                f"what it reads of the messages, or take the tokenizer's own."
            ) from None

    def pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """Return the text of a conversation in parts, each an answer or not.

        An answer ends where the text of the conversation up to it ends, so with the mark of the end
        of a turn.

        Raises:
            DataError: if there is no answer, or later messages change the text before them.
        """
        pieces, text = [], ""
        for turn, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            before = self.render(messages[:turn], prompt=True)
            after = self.render(messages[: turn + 1])
            for longer, shorter in ((before, text), (after, before)):
                self._check_extends(longer, shorter, turn)
            pieces += [Piece(before[len(text) :], False), Piece(after[len(before) :], True)]
            text = after
        if not pieces:
            roles = ", ".join(str(message["role"]) for message in messages) or "no message"
            raise DataError(
                f"a conversation has no turn of the {ANSWERS}, so nothing of it is learned (its "
                f"roles: {roles}). Remove it, or name the role of the answers {ANSWERS!r}."
            )
        return pieces

    def _check_extends(self, longer: str, shorter: str, turn: int) -> None:
        if not longer.startswith(shorter):
            raise DataError(
                f"{self._where} writes the messages before message {turn + 1} otherwise once that "
                f"is there, so that no part of the text is the answer alone. Train on "
                f"conversations of one answer each, or take a template that only adds text."
            )


class _RefusalError(Exception):
    """A template's own words about messages that it does not take."""


def _raise(message: str) -> None:
    raise _RefusalError(message)


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
