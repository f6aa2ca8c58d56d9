"""What a row says beside role and content: it is written by the template, or refused by name."""

import json
import re

import pytest
from chat_texts import ANSWER, OTHER, TOOL, TOOLS, USER, call, learned

from jtrain.data.text.chat_template import CHATML
from jtrain.data.text.conversations import Chat
from jtrain.errors import DataError

THOUGHTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
@pytest.mark.parametrize("arguments", ['{"a":2,  "u": "\\u00b0"}', {"a": 2, "u": "°"}])
def test_calls_of_tools_are_learned(content, arguments):
    calls = [call(arguments), call({}, 2)]
    talk = [
        USER,
        {"role": "assistant", **content, "tool_calls": calls, "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "4"},
        {"role": "tool", "tool_call_id": "call_2", "content": "0"},
        ANSWER,
        USER,
    ]
    text, answers = learned(TOOLS, {"messages": talk, "tools": [TOOL, OTHER], "id": 7})
    assert answers == (
        '<call>{"name": "add", "arguments": {"a": 2, "u": "°"}}</call>'
        '<call>{"name": "add", "arguments": {}}</call></s>\n4</s>\n'
    )
    assert text == (
        f"<s>tools\n{json.dumps(TOOL, ensure_ascii=False)}\n{json.dumps(OTHER)}\n</s>\n"
        f"<s>user\n2+2?</s>\n<s>assistant\n{answers[:-6]}"
        "<s>user\n<result>4</result>\n<result>0</result></s>\n<s>assistant\n4</s>\n"
    )


@pytest.mark.parametrize(
    ("template", "name", "row"),
    [
        (CHATML, "tool_calls", [USER, {**ANSWER, "content": None, "tool_calls": [call({})]}]),
        (CHATML, "tool_calls", [USER, {"role": "assistant", "tool_calls": [call({})]}]),
        (CHATML, "function_call", [USER, {**ANSWER, "function_call": {"name": "f"}}]),
        (CHATML, "reasoning_content", [USER, {**ANSWER, "reasoning_content": "so"}]),
        (CHATML, "thinking", [USER, {**ANSWER, "thinking": "so"}]),
        (CHATML, "name", [{**USER, "name": "Ann"}, ANSWER]),
        (CHATML, "weight", [USER, {**ANSWER, "weight": 0.5}]),
        (CHATML, "prefix", [USER, {**ANSWER, "prefix": True}]),
        (CHATML, "tools", {"messages": [USER, ANSWER], "tools": [TOOL]}),
        (CHATML, "tools", {"messages": [USER, ANSWER], "tools": json.dumps([TOOL])}),
        (CHATML, "functions", {"messages": [USER, ANSWER], "functions": [{"name": "f"}]}),
        (CHATML, "images", {"messages": [USER, ANSWER], "images": ["a.png"]}),
        (TOOLS, "documents", {"messages": [USER, ANSWER], "documents": [{"text": "a"}]}),
        (TOOLS, "on", {"messages": [USER, ANSWER], "chat_template_kwargs": {"on": False}}),
        (TOOLS.replace("m.tool_calls", "(m.tool_calls or [])[:1]"), "tool_calls",
         [USER, {"role": "assistant", "tool_calls": [call({}), call({})]}]),
        (TOOLS.replace("in tools", "in tools[:1]"), "tools",
         {"messages": [USER, ANSWER], "tools": [TOOL, OTHER]}),
        (TOOLS.replace("{{ m.content }}{% for", "{{ '' if m.tool_calls else m.content }}{% for"),
         "content", [USER, {**ANSWER, "tool_calls": [call({})]}]),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "content",
         [{"role": "system", "content": "Be brief."}, USER, ANSWER]),
    ],
)  # fmt: skip
def test_what_the_template_does_not_write_is_refused_by_name(template, name, row):
    row = row if isinstance(row, dict) else {"messages": row}
    with pytest.raises(DataError) as refused:
        learned(template, row)
    message = str(refused.value)
    assert re.search(rf"^a.jsonl:1: .* has '{name}', and t.jinja does not write", message)
    typed = re.search(r"data.ignore=\[(.*)\]", message)
    assert typed
    assert typed[1] == name
    assert learned(template, row, optional=typed[1].split(", "))[1]


def test_one_refusal_names_all_and_the_option_takes_them(tmp_path):
    row = {"messages": [{**USER, "name": "Ann"}, {**ANSWER, "thinking": "so"}], "tools": [TOOL]}
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    path = str(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a.jsonl:1: .*data.ignore=\[name, thinking, tools\]"):
        Chat(path=path).build()
    Chat(path=path, ignore=["name", "thinking", "tools"]).build()


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_are_learned_under_each_of_their_names(name):
    row = {"messages": [USER, {**ANSWER, name: "so"}]}
    assert learned(THOUGHTS, row)[1] == "<think>so</think>4;"


def test_answers_of_weight_0_are_read_and_not_learned():
    talk = [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "content": "5", "weight": 1}]
    text, answers = learned(CHATML, {"messages": talk})
    assert answers == "5<|im_end|>\n"
    assert text.count("4<|im_end|>") == 1
    with pytest.raises(DataError, match="nothing of it is learned"):
        learned(CHATML, {"messages": talk[:2]})
