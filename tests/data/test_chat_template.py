"""Chat templates and rows of chats: the text of transformers, what is learned or refused."""

import json
import re

import numpy as np
import pytest

from jtrain.data.text.chat_template import CHATML, ChatTemplate, read_template
from jtrain.data.text.conversations import Chat, end_of_turn, read_conversation, read_conversations
from jtrain.data.text.conversations import encode_conversation as encode
from jtrain.data.text.tokenizers import ByteTokenizer
from jtrain.errors import DataError

# A small template with the constructs of Qwen's and Hermes's.
TOOLS = (
    "{%- if tools %}<s>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</s>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<s>user{% endif %}"
    "{{ '\n' }}<result>{{ m.content }}</result>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}</s>\n{% endif %}"
    "{% else %}<s>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}<call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</call>{% endfor %}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"if": "a<b", "°": 1}}}
OTHER = {"type": "function", "function": {"name": "sub"}}


def call(arguments, number: int = 1) -> dict:
    function = {"name": "add", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def learned(template: str, row: dict, field: str = "messages", **options) -> tuple[str, str]:
    """Return the text of a row, and its answers."""
    conversation = read_conversation("a.jsonl:1", row, field)
    one = encode(ByteTokenizer(), ChatTemplate(template, "t.jinja"), *conversation, **options)
    text = lambda tokens: bytes(tokens.astype(np.uint8)).decode()
    return text(one.tokens), text(one.tokens[one.answers])


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
    talks = [[USES, RESULT] if "m.role" in source else [USES] for source, _ in JSON.values()]
    for talk, (source, text) in zip(talks, JSON.values(), strict=True):
        assert ChatTemplate(source).render(talk) == text
    theirs = pytest.importorskip("transformers.utils.chat_template_utils")
    for talk, (source, text) in zip(talks, JSON.values(), strict=True):
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
    row = {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [call({"a": 2})]},
            {"role": "tool", "content": "4"},
            ANSWER,
        ],
        "tools": [TOOL],
    }
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
        (
            TOOLS.replace("m.tool_calls", "(m.tool_calls or [])[:1]"),
            "tool_calls",
            [USER, {"role": "assistant", "tool_calls": [call({}), call({})]}],
        ),
        (
            TOOLS.replace("{{ m.content }}{% for", "{{ '' if m.tool_calls else m.content }}{% for"),
            "content",
            [USER, {**ANSWER, "tool_calls": [call({})]}],
        ),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            "content",
            [{"role": "system", "content": "Be brief."}, USER, ANSWER],
        ),
    ],
)
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
