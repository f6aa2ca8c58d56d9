"""Chat templates: what they may not do, the files they come from, and the tokens they write."""
# ruff: noqa: E501  (a template reads best on a line)

import json

import numpy as np
import pytest

from jtrain.data.text.chat_template import CHATML, ChatTemplate
from jtrain.data.text.conversations import Chat
from jtrain.data.text.template_file import read_template
from jtrain.data.text.tokenizer import ByteTokenizer
from jtrain.errors import DataError

USER, SYSTEM = {"role": "user", "content": "2+2?"}, {"role": "system", "content": "Be brief."}
TURNS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
CITY = {"unit": "°C", "if": "a < b & 'c'"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": CITY}}]}
TOOL = {"role": "tool", "content": {"grad": ["<21>", None, 1.5]}}
# Small templates with the constructs of published ones, and what CALL or TOOL is there.
JSON = {
    "Qwen, Hermes": (
        "{% for m in messages %}{% for call in m.tool_calls %}<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": '
        "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endfor %}",
        '<tool_call>\n{"name": "f", "arguments": '
        """{"unit": "°C", "if": "a < b & 'c'"}}\n</tool_call>""",
    ),
    "Llama 3.1": (
        "{%- for m in messages %}{% for call in m.tool_calls %}{{ call | tojson(indent=4) }}"
        "{% endfor %}{% endfor %}",
        """{
    "function": {
        "name": "f",
        "arguments": {
            "unit": "°C",
            "if": "a < b & 'c'"
        }
    }
}""",
    ),
    "GLM": (
        "{% for m in messages %}{% for call in m.tool_calls %}{{ call.function.name }}\n"
        "{% for k, v in call.function.arguments.items() %}<arg>{{ k }}={{ v if v is string else "
        "v | tojson(ensure_ascii=False) }}</arg>\n{% endfor %}{% endfor %}{% if m.role == 'tool' %}"
        "{{ m.content | tojson(ensure_ascii=False) }}{% endif %}{% endfor %}",
        "f\n<arg>unit=°C</arg>\n<arg>if=a < b & 'c'</arg>\n"
        """{"grad": ["<21>", null, 1.5]}""",
    ),
    "all arguments": (
        "{{ messages[0].tool_calls[0].function.arguments | tojson(ensure_ascii=True, "
        "separators=(',', ':'), sort_keys=true) }}{{ [1, {}] | tojson(true, '\t') }}",
        """{"if":"a < b & 'c'","unit":"\\u00b0C"}[\n\t1,\n\t{}\n]""",
    ),
}
NAMED = [{"name": "tool", "template": "x"}, {"name": "default", "template": CHATML}]


@pytest.fixture(name="config")
def _config(tmp_path):
    """Return a function that writes a tokenizer_config.json and returns its path."""

    def write(**entries) -> str:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
        return str(tmp_path / "tokenizer_config.json")

    return write


@pytest.mark.parametrize(("source", "text"), JSON.values(), ids=JSON)
def test_tojson_writes_the_text_of_transformers(source, text):
    talk = [CALL, TOOL] if "m.role" in source else [CALL]
    assert ChatTemplate(source).render(talk) == text


def test_transformers_writes_these_texts():
    theirs = pytest.importorskip("transformers.utils.chat_template_utils")
    for source, text in JSON.values():
        talk = [CALL, TOOL] if "m.role" in source else [CALL]
        assert theirs.render_jinja_template([talk], chat_template=source)[0] == [text]


@pytest.mark.parametrize(
    "call",
    ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}"],
)
def test_a_template_that_calls_what_it_may_not_is_refused(call):
    with pytest.raises(DataError, match="calls what a template may not"):
        ChatTemplate(call).render([USER])


def test_a_template_may_change_no_message():
    with pytest.raises(DataError, match="may not"):
        ChatTemplate("{{ messages.append(1) }}").render([USER])


def test_a_template_refuses_in_its_own_words():
    template = ChatTemplate("{{ raise_exception('no system message') }}")
    with pytest.raises(DataError, match="no system message"):
        template.render([SYSTEM])


def test_a_template_of_invalid_syntax_names_its_line():
    with pytest.raises(DataError, match="line 2"):
        ChatTemplate("\n{% for %}", "x.jinja")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 1 // 0 }}", "fails: ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "fails: TypeError"),
        ("{{ messages[9].content }}", "fails: UndefinedError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: RecursionError"),
    ],
)
def test_a_template_that_fails_is_refused(source, words):
    with pytest.raises(DataError, match=f"t.jinja {words}.*Correct the template"):
        ChatTemplate(source, "t.jinja").render([USER])


def test_a_template_of_deep_nesting_is_refused():
    with pytest.raises(DataError, match=r"t.jinja is no valid template: it is nested too deeply"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "t.jinja")


def test_templates_come_from_files(tmp_path, config):
    (tmp_path / "t.jinja").write_text(CHATML)
    paths = str(tmp_path / "t.jinja"), config(chat_template=CHATML)
    for path in (*paths, config(chat_template=NAMED), ""):
        prompt = Chat(path="x", template=path).encode_prompt(ByteTokenizer(), "hi")
        text = bytes(prompt.astype(np.uint8)).decode()
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{}", "has no chat_template"),
        (b"[]", "has no entries by name"),
        (b"{", "is no JSON"),
        (b"\xe9", "cannot be read.*Name a file in UTF-8"),
        (b"[" * 100_000, "is no JSON"),
        (
            b'{"chat_template": [{"name": "tool", "template": "x"}]}',
            r"has several chat templates \(tool\), and none has",
        ),
        (b'{"chat_template": "x", "eos_token": 7}', "has the eos_token 7, which is no text"),
    ],
)
def test_files_without_a_template_are_refused(tmp_path, text, words):
    path = tmp_path / "tokenizer_config.json"
    path.write_bytes(text)
    with pytest.raises(DataError, match=f"data.template={path} {words}"):
        read_template(str(path))


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "special": True}])
def test_the_tokens_of_a_config_are_written(tmp_path, config, eos):
    path = config(chat_template=TURNS, bos_token="<s>", eos_token=eos)
    (tmp_path / "t.jinja").write_text(TURNS)
    for file in (path, str(tmp_path / "t.jinja")):
        assert read_template(file).render([USER]) == "<s>2+2?</s>"


def test_a_token_that_is_null_is_none(config):
    path = config(chat_template=TURNS, bos_token=None, eos_token="</s>")
    assert read_template(path).render([USER]) == "2+2?</s>"


def test_a_token_that_no_file_names_is_refused(tmp_path, config):
    with pytest.raises(DataError, match=r'writes eos_token, and no file.*"eos_token": "</s>"'):
        read_template(config(chat_template=TURNS, bos_token="<s>"))
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "t.jinja").write_text(TURNS)
    with pytest.raises(DataError, match="writes bos_token, and no file"):
        read_template(str(tmp_path / "t.jinja"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ [messages] * 10 ** 9 }}",
        "{{ 10 ** 10 ** 8 }}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=['a' * 9999]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
        "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}",
        "{{ (('a' * 9999) | list) | join('b' * 999999) }}",
        "{{ range(9999) | map('string') | map('center', 99999) | join }}",
        "{{ lipsum(10 ** 9) }}",
        "{% for i in range(100000) %}{{ 'a' * 99999 }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% else %}{{ 'a' * 99999 }}{% endif %}{% endmacro %}{{ m(12) }}",
        "{% set x %}{% for i in range(100000) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}",
        "{{ 'a' | indent(10 ** 9) }}",
        "{% set n = namespace(x=['a']) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
        "{% set n = namespace(x=['a']) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ '%s' % n.x }}",
        "{% set n = namespace(x=['a']) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ '{}'.format(n.x) }}",
        "{% set n = namespace(x=['a']) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ 'a' ~ n.x }}",
    ],
)  # fmt: skip
def test_what_a_template_computes_is_bounded(source: str):
    with pytest.raises(DataError, match="the chat template fails"):
        ChatTemplate(source).render([USER])


def test_a_long_conversation_is_within_the_bounds():
    long = "a b\n" * 250_000
    text = ChatTemplate(
        "{% for m in messages %}{{ m.role ~ ': ' + m.content.replace('b', 'c') | trim ~ '\\n' }}"
        "{% endfor %}{{ 12345678 % 100 }}{{ 10 ** 3 * 2000000 }}{{ messages | length }}"
    ).render([{"role": "user", "content": long}] * 3)
    assert len(text) > 3_000_000
    assert text.endswith("7820000000003")
