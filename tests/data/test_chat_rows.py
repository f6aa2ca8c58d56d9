"""Rows of the formats in use, and the forms that their messages have."""

import json

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
        ({"conversations": SHAREGPT, "id": "a"}, ""),
        ({"conversation": SHAREGPT, "system": "Be brief."}, SYSTEM),
        ({"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT]}, SYSTEM),
        ({"messages": [USER, ANSWER], "system": "Be brief.", "prompt_id": "a"}, SYSTEM),
        ({"instruction": "2+2?", "input": "", "output": "4", "text": "2+2?4"}, ""),
        ({"instruction": "2+", "input": "2?", "output": "4", "system": "Be brief."}, SYSTEM),
    ],
)
def test_rows_of_each_format_are_one_conversation(row, before):
    question = "2+\n2?" if row.get("input") else "2+2?"
    turns = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert learned(CHATML, row) == (before + turns, "4<|im_end|>\n")


def test_sharegpt_has_calls_of_tools_and_alpaca_a_history():
    used = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}
    talk = [SHAREGPT[0], used, {"from": "observation", "value": "4"}, SHAREGPT[1]]
    row = {"conversations": talk, "tools": json.dumps([TOOL])}
    same = [USER, {"role": "assistant", "tool_calls": [call({"a": 2})]},
            {"role": "tool", "content": "4"}, ANSWER]  # fmt: skip
    assert learned(TOOLS, row) == learned(TOOLS, {"messages": same, "tools": [TOOL]})
    row = {"instruction": "2+2?", "output": "4", "history": [["1?", "one"]]}
    text, answers = learned(CHATML, row)
    assert text.index("1?") < text.index("one") < text.index("2+2?")
    assert answers == "one<|im_end|>\n4<|im_end|>\n"


def test_fields_that_parquet_fills_with_null_are_not_there(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [call({"a": 2})]},
                        {"role": "tool", "content": "4"}, ANSWER], "tools": [TOOL]}  # fmt: skip
    other = {"messages": [USER, {**ANSWER, "tool_calls": [call({"b": 1})]}], "tools": [OTHER]}
    parquet.write_table(arrow.Table.from_pylist([row, other]), tmp_path / "a.parquet")
    found, _ = read_conversations(str(tmp_path / "a.parquet"), "messages")
    assert learned(TOOLS, {"messages": found.messages, **found.values}) == learned(TOOLS, row)


def test_parts_of_text_are_read():
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    row = {"messages": [{**USER, "content": parts}, ANSWER]}
    assert learned(CHATML, row) == learned(CHATML, {"messages": [USER, ANSWER]})
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    assert learned(template, row)[0] == "[2+][2?]4"
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(DataError, match=r"a.jsonl:1 .*a model of text reads no part .*image_url"):
        learned(CHATML, {"messages": [{**USER, "content": [*parts, picture]}, ANSWER]})


def test_arguments_stay_text_where_a_template_joins_texts():
    joins = TOOLS.replace("{{ call.function.arguments | tojson }}", "{{ x + a }}").replace(
        "<call>", "<call>{% set x = '' %}{% set a = call.function.arguments %}"
    )
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [call('{"a":2}')]}]}
    assert learned(joins, row)[1] == '<call>{"name": "add", "arguments": {"a":2}}</call></s>\n'
    row["messages"][1]["tool_calls"] = [call('{"a": ')]
    with pytest.raises(DataError, match=r"a.jsonl:1 .*'arguments' is no dict"):
        learned(joins, row)


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": ["human"], "value": "2+2?"}]},
        {"conversations": [{"from": "function_call", "value": "add"}]},
        {"instruction": "2+2?", "input": 5, "output": "4"},
        {"instruction": "2+2?", "output": "4", "history": ["a"]},
        {"messages": [USER, ANSWER], "chat_template_kwargs": "on"},
        {"messages": [USER, ANSWER], "tools": {"name": "f"}},
        {"messages": [USER, {**ANSWER, "tool_calls": 5}]},
        {"messages": [USER, {**ANSWER, "tool_calls": ["f"]}]},
        {"messages": [USER, {**ANSWER, "tool_calls": [{"function": "f"}]}]},
        {"messages": [{**USER, "content": ["2+2?"]}, ANSWER]},
        {"messages": [{**USER, "content": [{"type": "image", "text": "a"}]}, ANSWER]},
        {"messages": [USER, {"role": "assistant", "content": 4}]},
    ],
)
def test_rows_of_another_form_are_refused(row):
    with pytest.raises(DataError, match=r"^a.jsonl:1 (is no row of OpenAI|has the message)"):
        learned(TOOLS, row)
