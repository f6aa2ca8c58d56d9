"""Chat templates: the text of transformers, files, tags, and what they may not do."""

import json
import re

import numpy as np
import pytest
from chat_texts import ANSWER, TOOL, TOOLS, USER, call

from jtrain.data.text.chat_template import CHATML, ChatTemplate, read_template
from jtrain.data.text.conversations import Chat, end_of_turn
from jtrain.data.text.tokenizers import ByteTokenizer
from jtrain.errors import DataError

TURNS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
CITY = {"unit": "°C", "if": "a < b & 'c'"}
USES = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": CITY}}]}
RESULT = {"role": "tool", "content": {"grad": ["<21>", None, 1.5]}}
# Small templates with the constructs of published ones, and what USES or RESULT is there.
JSON = {
    "Qwen, Hermes": (
        "{% for m in messages %}{% for call in m.tool_calls %}<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": '
        "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endfor %}",
        '<tool_call>\n{"name": "f", "arguments": '
        """{"unit": "°C", "if": "a < b & 'c'"}}\n</tool_call>""",
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


def test_tojson_writes_the_text_of_transformers():
    for source, text in JSON.values():
        talk = [USES, RESULT] if "m.role" in source else [USES]
        assert ChatTemplate(source).render(talk) == text


def test_transformers_writes_these_texts():
    theirs = pytest.importorskip("transformers.utils.chat_template_utils")
    for source, text in JSON.values():
        talk = [USES, RESULT] if "m.role" in source else [USES]
        assert theirs.render_jinja_template([talk], chat_template=source)[0] == [text]


def test_a_template_that_calls_what_it_may_not_is_refused():
    for source in ("''.__class__.__base__.__subclasses__()", "messages.append(1)"):
        with pytest.raises(DataError, match="calls what a template may not"):
            ChatTemplate(f"{{{{ {source} }}}}").render([USER])


def test_templates_come_from_files(tmp_path, config):
    (tmp_path / "t.jinja").write_text(CHATML)
    paths = str(tmp_path / "t.jinja"), config(chat_template=CHATML)
    for path in (*paths, config(chat_template=NAMED), ""):
        prompt = Chat(path="x", template=path).encode_prompt(ByteTokenizer(), "hi")
        text = bytes(prompt.astype(np.uint8)).decode()
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_tokens_of_a_config_are_written(tmp_path, config):
    eos = {"content": "</s>", "special": True}
    path = config(chat_template=TURNS, bos_token="<s>", eos_token=eos)
    (tmp_path / "t.jinja").write_text(TURNS)
    for file in (path, str(tmp_path / "t.jinja")):
        assert read_template(file).render([USER]) == "<s>2+2?</s>"


def test_a_token_that_no_file_names_is_refused(tmp_path, config):
    with pytest.raises(DataError, match=r'writes eos_token, and no file.*"eos_token": "</s>"'):
        read_template(config(chat_template=TURNS, bos_token="<s>"))
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "t.jinja").write_text(TURNS)
    with pytest.raises(DataError, match="writes bos_token, and no file"):
        read_template(str(tmp_path / "t.jinja"))


@pytest.mark.thorough
def test_generation_tags_say_what_is_learned():
    """In any place, also in a macro, and where earlier answers are written otherwise."""
    source = (
        "{% macro turn(m) %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content and loop.last %}{% generation %}<think>{{ m.reasoning_content }}"
        "</think>{% endgeneration %}{% endif %}{{ turn(m) }}{% else %}{{ m.content }}{% endif %};"
        "{% endfor %}"
    )
    talk = [USER, ANSWER, USER, {**ANSWER, "content": "5", "reasoning_content": "so"}]
    pieces = ChatTemplate(source).pieces(talk)
    want = "user:2+2?;assistant:[4</s>];user:2+2?;assistant:[<think>so</think>][5</s>];"
    assert "".join(f"[{p.text}]" if p.is_answer else p.text for p in pieces) == want
    assert end_of_turn(ByteTokenizer(), ChatTemplate(source)).tolist() == list(b"</s>;")
    assert ChatTemplate(source).render(talk[:2]) == "user:2+2?;assistant:4</s>;"
    with pytest.raises(DataError, match=r"message 2 of the 'assistant' has 'weight'.*ignore"):
        ChatTemplate(source).pieces([USER, {**ANSWER, "weight": 0}])


def test_the_date_of_a_run_is_set_once(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    assert ChatTemplate(template, day="2026-11-07").render([USER]).startswith("07 Nov 2026<")
    (tmp_path / "t.jinja").write_text(template)
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"messages": [USER, ANSWER]})] * 3))
    chat = {"path": f"{tmp_path}/a.jsonl", "template": f"{tmp_path}/t.jinja"}
    with pytest.raises(DataError) as refused:
        Chat(**chat).build()
    typed = re.search(r"data.day=(\S+)", str(refused.value))
    assert typed
    Chat(**chat, day=typed[1]).build()


def test_transformers_marks_and_writes_the_same():
    theirs = pytest.importorskip("transformers.utils.chat_template_utils")
    marked = CHATML.replace(
        "{{ message.content }}<|im_end|>",
        "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}",
    )
    talk = [USER, ANSWER, USER, ANSWER]
    (text,), (spans,) = theirs.render_jinja_template(
        [talk], chat_template=marked, return_assistant_tokens_mask=True
    )
    pieces = ChatTemplate(marked).pieces(talk)
    assert "".join(piece.text for piece in pieces) == text
    assert [p.text for p in pieces if p.is_answer] == [text[a:b] for a, b in spans]
    talk = [USER, {"role": "assistant", "content": "", "tool_calls": [call({"°": "<"})]}]
    row = {"conversations": [talk], "tools": [TOOL], "chat_template": TOOLS}
    assert theirs.render_jinja_template(**row)[0] == [
        ChatTemplate(TOOLS).render(talk, {"tools": [TOOL]})
    ]
