"""Conversations: which tokens are answers, files of two kinds, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.text.chat_template import ChatTemplate
from jtrain.data.text.conversations import Chat, read_conversations
from jtrain.data.text.encode_chat import encode
from jtrain.data.text.template_file import read_template
from jtrain.data.text.tokenizer import ByteTokenizer
from jtrain.errors import DataError

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
END = "<|im_end|>\n"


def write(path: Path, *conversations) -> str:
    path.write_text("\n".join(json.dumps({"messages": list(one)}) for one in conversations))
    return str(path)


def test_answers_and_the_ends_of_their_turns_are_marked():
    again = {"role": "assistant", "content": "five"}
    one = encode(ByteTokenizer(), ChatTemplate(), [SYSTEM, USER, ANSWER, USER, again, USER])
    text = bytes(one.tokens.astype(np.uint8)).decode()
    answered = bytes(one.tokens[one.answers].astype(np.uint8)).decode()
    assert answered == f"4{END}five{END}"
    assert text == ChatTemplate().render([SYSTEM, USER, ANSWER, USER, again])


def test_rows_keep_marks_and_segments_of_each_conversation(tmp_path):
    path = write(tmp_path / "a.jsonl", *[[USER, ANSWER], [USER, ANSWER] * 2] * 5)
    corpus = Chat(path=path, context=200).build()
    rows = corpus.train[np.arange(len(corpus.train))]
    assert rows["answer"].sum() == sum(
        [12, 24][i % 2] for i in range(9)
    )  # the last is for validation
    segments = rows["segments"]
    assert segments.max() > 1
    assert not rows["answer"][segments == 0].any()
    shown = bytes(rows["tokens"][rows["answer"]].astype(np.uint8)).decode()
    assert set(shown.split(END)) == {"4", ""}


def test_a_large_share_for_validation_leaves_a_conversation_to_train_on(tmp_path):
    path = write(tmp_path / "a.jsonl", *[[USER, ANSWER]] * 3)
    corpus = Chat(path=path, context=80, validation=0.9).build()
    assert (len(corpus.train.conversations), len(corpus.validation.conversations)) == (1, 2)
    one = write(tmp_path / "b.jsonl", [USER, ANSWER])
    with pytest.raises(DataError, match="1 conversation, and training and validation need one"):
        Chat(path=one, context=80).build()


def test_parquet_has_the_rows_of_json_lines(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    talk = [[USER, ANSWER], [SYSTEM, USER, ANSWER]]
    parquet.write_table(pyarrow.table({"messages": talk}), tmp_path / "a.parquet")
    lines = write(tmp_path / "a.jsonl", *talk)
    read = lambda path: [one.messages for one in read_conversations(str(path), "messages")]
    assert read(tmp_path / "a.parquet") == read(lines) == talk


def test_a_byte_order_mark_is_no_text(tmp_path):
    line = json.dumps({"messages": [USER, ANSWER]})
    (tmp_path / "a.jsonl").write_text(f"\ufeff{line}\n\ufeff{line}\n\ufeff\n", encoding="utf-8")
    assert len(list(read_conversations(str(tmp_path / "a.jsonl"), "messages"))) == 2
    (tmp_path / "t.jinja").write_text("\ufeff{{ messages[0].content }}", encoding="utf-8")
    config = json.dumps({"chat_template": "{{ messages[0].content }}"})
    (tmp_path / "t.json").write_text(f"\ufeff{config}", encoding="utf-8")
    for name in ("t.jinja", "t.json"):
        assert read_template(str(tmp_path / name)).render([USER]) == "2+2?"


def test_a_template_that_rewrites_earlier_turns_is_refused():
    last = "{% for m in messages %}{{ m.content if loop.last else '-' }};{% endfor %}"
    with pytest.raises(DataError, match="only adds text"):
        ChatTemplate(last).pieces([USER, ANSWER, USER, ANSWER])


def test_a_conversation_without_an_answer_is_refused_with_its_line(tmp_path):
    path = write(tmp_path / "a.jsonl", [USER, ANSWER], [SYSTEM, USER])
    with pytest.raises(DataError, match=r"a.jsonl:2: .*no turn of the assistant.*system, user"):
        Chat(path=path).build()


def test_a_long_conversation_is_refused_or_cut_and_counted(tmp_path):
    long = [USER, {"role": "assistant", "content": "4" * 100}]
    path = write(tmp_path / "a.jsonl", *[[USER, ANSWER]] * 3, long)
    with pytest.raises(DataError) as caught:
        Chat(path=path, context=80).build()
    message = str(caught.value)
    assert "1 of 4 conversations are longer than data.context=80" in message
    assert "a.jsonl:4" in message
    context = int(message.split("Set data.context=")[1].split(",")[0])
    Chat(path=path, context=context).build()
    with pytest.raises(DataError):
        Chat(path=path, context=context - 1).build()
    cut = Chat(path=path, context=80, truncate="cut", validation=0.3).build()
    lost = int(message.split("leaves out ")[1].split(" of")[0])
    whole = Chat(path=path, context=context, validation=0.3).build()
    assert count_answers(whole) - count_answers(cut) == lost


def count_answers(corpus):
    parts = (corpus.train, corpus.validation)
    return sum(int(part[np.arange(len(part))]["answer"].sum()) for part in parts)


def test_a_conversation_cut_before_its_answer_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"role": "user", "content": "?" * 90}, ANSWER])
    with pytest.raises(DataError, match=r"no answer is left, such as .*a.jsonl:1"):
        Chat(path=path, context=40, truncate="cut").build()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is no JSON"),
        ('{"text": 1}', "it has text"),
        ('{"messages": [{"role": "user"}]}', "needs a `role` and a `content`"),
        (b'{"messages": "\xe9"}', "byte 0xe9 at 14.*iconv -f latin1 -t utf-8"),
        ("[" * 100_000, "nested too deeply"),
        ('{"messages": [' + "[" * 900 + "]" * 900 + "]}", "nested too deeply|needs a `role`"),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}]}',
            "message 1 of the 'user' has half of a surrogate pair",
        ),
    ],
)
def test_rows_of_another_form_are_refused(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_bytes(line if isinstance(line, bytes) else line.encode())
    with pytest.raises(DataError, match=rf"a.jsonl:1.*({words})"):
        Chat(path=str(tmp_path / "a.jsonl")).build()


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_files_without_a_conversation_are_refused(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"a.jsonl has no conversation. Give files"):
        Chat(path=str(tmp_path / "a.jsonl")).build()
