"""Rows of chats: the formats in use, and what is learned of them or refused by name."""

import json
import re

import pytest
from chat_texts import ANSWER, OTHER, TOOL, TOOLS, USER, call, learned

from jtrain.data.text.chat_template import CHATML
from jtrain.data.text.conversations import read_conversations
from jtrain.errors import DataError

SHAREGPT = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.mark.parametrize(
    ("row", "before"),
    [
        ({"conversation": SHAREGPT, "system": "Be brief."}, SYSTEM),
        ({"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT]}, SYSTEM),
        ({"messages": [USER, ANSWER], "system": "Be brief.", "prompt_id": "a"}, SYSTEM),
        ({"instruction": "2+", "input": "2?", "output": "4", "system": "Be brief."}, SYSTEM),
    ],
)
def test_rows_of_each_format_are_one_conversation(row, before):
    question = "2+\n2?" if row.get("input") else "2+2?"
    turns = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert learned(CHATML, row) == (before + turns, "4<|im_end|>\n")


def test_fields_that_parquet_fills_with_null_are_not_there(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [call({"a": 2})]},
                        {"role": "tool", "content": "4"}, ANSWER], "tools": [TOOL]}  # fmt: skip
    other = {"messages": [USER, {**ANSWER, "tool_calls": [call({"b": 1})]}], "tools": [OTHER]}
    parquet.write_table(arrow.Table.from_pylist([row, other]), tmp_path / "a.parquet")
    found, _ = read_conversations(str(tmp_path / "a.parquet"), "messages")
    assert learned(TOOLS, {"messages": found.messages, **found.values}) == learned(TOOLS, row)


THOUGHTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize(
    ("content", "arguments"),
    [({"content": None}, '{"a":2,  "u": "\\u00b0"}'), ({}, {"a": 2, "u": "°"})],
)
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
        (CHATML, "reasoning_content", [USER, {**ANSWER, "reasoning_content": "so"}]),
        (CHATML, "tools", {"messages": [USER, ANSWER], "tools": [TOOL]}),
        (TOOLS.replace("m.tool_calls", "(m.tool_calls or [])[:1]"), "tool_calls",
         [USER, {"role": "assistant", "tool_calls": [call({}), call({})]}]),
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


def test_thoughts_are_learned_under_each_of_their_names():
    for name in ("reasoning_content", "thinking", "reasoning"):
        row = {"messages": [USER, {**ANSWER, name: "so"}]}
        assert learned(THOUGHTS, row)[1] == "<think>so</think>4;"


def test_answers_of_weight_0_are_read_and_not_learned():
    talk = [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "content": "5", "weight": 1}]
    text, answers = learned(CHATML, {"messages": talk})
    assert answers == "5<|im_end|>\n"
    assert text.count("4<|im_end|>") == 1
    with pytest.raises(DataError, match="nothing of it is learned"):
        learned(CHATML, {"messages": talk[:2]})
