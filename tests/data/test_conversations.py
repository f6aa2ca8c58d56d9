"""Conversations and pairs of texts: tokens, answers and special marks, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_configs import write_pairs

from jtrain.data.text.chat_template import ChatTemplate
from jtrain.data.text.conversations import Chat, end_of_turn
from jtrain.data.text.conversations import encode_conversation as encode
from jtrain.data.text.corpora import TextPairs
from jtrain.data.text.tokenizers import BPE, ByteTokenizer, train_bpe
from jtrain.errors import DataError
from jtrain.models.embeddings import hard_negatives

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


MARKS = ["<|im_start|>", "<|im_end|>"]


def parsed(**changes) -> dict:
    """Return the content of a tokenizer.json with the marks of ChatML."""
    found = train_bpe(["a b"], vocab=257, end="<|endoftext|>").description()["tokenizer"]
    for number, mark in enumerate(MARKS, 257):
        first = found["added_tokens"][0]
        found["added_tokens"].append({**first, "id": number, "content": mark, **changes})
    return found


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer() -> BPE:
    return BPE(parsed(), end="<|endoftext|>")


def test_marks_are_the_tokens_that_the_package_reads(tokenizer):
    import tokenizers

    theirs = tokenizers.Tokenizer.from_str(json.dumps(parsed()))
    talk = [USER, ANSWER, USER, ANSWER]
    one = encode(tokenizer, ChatTemplate(), talk)
    text = ChatTemplate().render(talk)
    assert one.tokens.tolist() == theirs.encode(text, add_special_tokens=False).ids
    assert (one.tokens == theirs.token_to_id("<|im_start|>")).sum() == 4


def test_an_answer_ends_with_the_number_of_its_mark(tmp_path, tokenizer):
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed()))
    line = json.dumps({"messages": [USER, ANSWER]})
    (tmp_path / "a.jsonl").write_text("\n".join([line] * 4))
    tokens = str(tmp_path / "tokenizer.json")
    chat = Chat(path=str(tmp_path / "a.jsonl"), tokenizer=tokens, context=60)
    row = chat.build().validation[np.arange(1)]
    answer = row["tokens"][row["answer"]].tolist()
    assert answer == [*tokenizer.encode("4"), 258, *tokenizer.encode("\n")]


def test_a_message_that_spells_out_a_mark_is_refused(tokenizer):
    mark = MARKS[1]
    talk = [USER, {**ANSWER, "content": f"so {mark} then"}]
    with pytest.raises(DataError) as refused:
        encode(tokenizer, ChatTemplate(), talk, "a.jsonl:3")
    words = f"a.jsonl:3: message 2 of the 'assistant' spells out the special token {mark}, "
    assert str(refused.value).startswith(words)
    with pytest.raises(DataError, match="message 1 of the 'user' spells out"):
        Chat(path="").encode_prompt(tokenizer, f"what is {mark}?")
    with pytest.raises(DataError, match="spells out"):
        encode(tokenizer, ChatTemplate(), [{**USER, "tools": [{"name": mark}]}, ANSWER])
    blank = f"{mark[0]} {mark[1:]}"
    one = encode(tokenizer, ChatTemplate(), [USER, {**ANSWER, "content": blank}])
    assert (one.tokens > 255).sum() == 4


def test_a_prompt_has_the_tokens_of_training(tokenizer):
    prompt = Chat(path="").encode_prompt(tokenizer, USER["content"])
    one = encode(tokenizer, ChatTemplate(), [USER, ANSWER])
    np.testing.assert_array_equal(prompt, one.tokens[~one.answers])


def test_the_end_of_a_turn_is_what_follows_an_answer(tokenizer):
    assert end_of_turn(tokenizer, ChatTemplate()).tolist() == [258]
    assert end_of_turn(ByteTokenizer(), ChatTemplate()).tolist() == list(b"<|im_end|>")
    digits = ChatTemplate("{% for m in messages %}{{ m.content }}<unused7>{% endfor %}")
    assert end_of_turn(ByteTokenizer(), digits).tolist() == list(b"<unused7>")
    for source in (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
        "{{ raise_exception('a system message comes first') }}",
    ):
        assert len(end_of_turn(tokenizer, ChatTemplate(source))) == 0


def test_rows_are_the_texts_of_the_file(tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", 20)
    corpus = TextPairs(path=str(path), negatives=2, context=8).build()
    assert (len(corpus.train), len(corpus.validation)) == (18, 2)
    row = {name: array[0] for name, array in corpus.train[np.array([3])].items()}
    texts = [bytes(t[v].astype(np.uint8)).decode() for t, v in zip(*row.values(), strict=True)]
    assert texts == ["3", "after 3", "after 4", "at 3"]
    assert not row["tokens"][~row["visible"]].any()


def test_long_texts_are_cut_and_keep_their_marks(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "after": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["[CLS]", "[SEP]"])
    words.save(str(tmp_path / "tokenizer.json"))
    pair = {"anchor": "[SEP] " * 9, "positive": "after"}
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(pair)] * 4))
    data = TextPairs(
        path=str(tmp_path / "a.jsonl"),
        tokenizer=str(tmp_path / "tokenizer.json"),
        marks=("[CLS]", "[SEP]"),
        context=5,
    )
    tokens = data.build().train[np.array([0])]["tokens"][0]
    assert tokens.tolist() == [[2, 0, 0, 0, 3], [2, 1, 3, 0, 0]]  # a mark in a text is plain text


def test_hard_negatives_are_the_nearest_of_the_others():
    draw = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    anchors, texts = unit(draw.normal(size=(7, 5))), unit(draw.normal(size=(9, 5)))
    own = draw.integers(0, 9, 7)
    found = hard_negatives(anchors, texts, own, count=3, skip=1, block=2)
    for i, anchor in enumerate(anchors):
        ranked = sorted((j for j in range(9) if j != own[i]), key=lambda j: -(anchor @ texts[j]))
        assert found[i].tolist() == ranked[1:4]
    with pytest.raises(DataError, match="Set count=7 or less"):
        hard_negatives(anchors, texts, own, count=8, skip=1)
    assert hard_negatives(anchors, texts, own, count=7, skip=1).shape == (7, 7)


def test_a_text_equal_to_the_anchor_or_its_positive_is_no_negative():
    draw = np.random.default_rng(0)
    unit = lambda x: (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    texts, anchors = unit(draw.normal(size=(6, 5))), unit(draw.normal(size=(2, 5)))
    texts[4] = unit(texts[:1] * 1.7)[0]  # the positive of anchor 0 again
    texts[5] = anchors[1]
    found = hard_negatives(anchors, texts, np.array([0, 1]), count=4)
    assert [sorted(row) for row in found.tolist()] == [[1, 2, 3, 5], [0, 2, 3, 4]]
