"""What transformers adds to jinja2: tags that say what is learned, loops that end, the date."""

import json
import re
from pathlib import Path

import pytest
from chat_texts import ANSWER, TOOL, TOOLS, USER, call

from jtrain.config.resolve import resolve
from jtrain.data.text.chat_template import CHATML, ChatTemplate
from jtrain.data.text.encode_chat import end_of_turn
from jtrain.data.text.tokenizer import ByteTokenizer
from jtrain.errors import DataError


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


def test_loops_break_and_continue_and_the_date_is_written():
    source = (
        "{{ strftime_now('%Y') }};{% for m in messages %}{% if m.role == 'system' %}{% continue %}"
        "{% endif %}{{ m.content }};"
        "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}"
    )
    text = ChatTemplate(source).render([{"role": "system", "content": "x"}, USER, ANSWER, USER])
    assert re.fullmatch(r"20\d\d;2\+2\?;4;", text)


def test_the_date_of_a_run_is_set_once(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    assert ChatTemplate(template, day="2026-11-07").render([USER]).startswith("07 Nov 2026<")
    (tmp_path / "t.jinja").write_text(template)
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"messages": [USER, ANSWER]})] * 3))
    options = [f"data.path={tmp_path}/a.jsonl", f"data.template={tmp_path}/t.jinja"]
    root = Path(__file__).parents[2]
    with pytest.raises(DataError) as refused:
        resolve(root / "configs/chat.yaml", options).config.data.build()
    typed = re.search(r"data.day=\S+", str(refused.value))
    assert typed
    resolve(root / "configs/chat.yaml", [*options, typed[0]]).config.data.build()


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
