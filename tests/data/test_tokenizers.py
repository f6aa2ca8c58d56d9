"""Tokenizers: bytes, characters, BPE, and those of GGUF files."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.text.chat_template import CHATML
from jtrain.data.text.corpora import Text
from jtrain.data.text.documents import read_text
from jtrain.data.text.tokenizer_file import build_tokenizer, read_tokenizer
from jtrain.data.text.tokenizers import BPE, Tokenizer, fingerprint, train_bpe
from jtrain.data.text.tokenizing import (
    BytePairTokens,
    ByteTokens,
    CharacterTokens,
    PretrainedTokenizer,
)

VERSES = ["Shall I compare thee\nto a summer's day?", "Thou art more lovely", "été 🌹 rose\r\n\tO!"]
TEXT = "".join(VERSES)

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: ByteTokens().build(VERSES),
    "characters": lambda: CharacterTokens().build(VERSES),
    "bpe": lambda: BytePairTokens(vocab=270).build(VERSES),
}


@pytest.fixture(params=KINDS)
def build(request) -> Callable[[], Tokenizer]:
    return KINDS[request.param]


def test_decoding_gives_the_text_back(build):
    tokenizer = build()
    assert isinstance(tokenizer, Tokenizer)
    for text in [*VERSES, TEXT, ""]:
        numbers = tokenizer.encode(text)
        assert tokenizer.decode(numbers) == text
        assert numbers.dtype.kind == "u"
        assert len(numbers) == 0 or numbers.max() < len(tokenizer)
    together = tokenizer.encode_all(VERSES)
    assert [list(numbers) for numbers in together] == [
        list(map(int, tokenizer.encode(v))) for v in VERSES
    ]


def test_a_tokenizer_is_the_same_when_rebuilt_or_read_from_its_description(build):
    tokenizer = build()
    again = build_tokenizer(json.loads(json.dumps(tokenizer.description())))
    assert fingerprint(again) == fingerprint(tokenizer) == fingerprint(build())
    assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    assert (len(again), again.end) == (len(tokenizer), tokenizer.end)


def test_a_file_of_the_package_is_read(tmp_path: Path):
    import tokenizers

    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="<eos>")
    theirs = tokenizers.Tokenizer(model)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer = PretrainedTokenizer(path=str(tmp_path / "tokenizer.json"), end="<eos>").build([])
    assert tokenizer.encode("b a b").tolist() == [1, 0, 1]
    assert (len(tokenizer), tokenizer.end) == (3, 2)
    assert PretrainedTokenizer(path=str(tmp_path / "tokenizer.json")).build([]).end is None


def test_the_vocabulary_reaches_up_to_the_largest_number():
    """A file may leave numbers out: an embedding of as many rows as tokens would be too short."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 2, "z": 65_536}, "unk_token": "a"}
    tokenizer = BPE({"version": "1.0", "added_tokens": [], "model": model}, end="b")
    assert len(tokenizer) == 65_537
    assert tokenizer.encode("z").tolist() == [65_536]


def test_a_text_is_neither_cut_nor_padded_where_the_file_asks_for_a_length():
    plain = train_bpe(["to be or not to be"], vocab=260, end="<|end|>").description()["tokenizer"]
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    length, long = {"truncation": cut, "padding": pad}, "to be or not to be, or to be"
    want, got = BPE(plain, end="<|end|>"), BPE(plain | length, end="<|end|>")
    for text in ("to", long):
        for special in (False, True):
            np.testing.assert_array_equal(
                got.encode(text, special=special), want.encode(text, special=special)
            )


def test_files_are_read_in_the_order_they_are_named(tmp_path: Path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    assert read_text(tmp_path / "a.txt") == "a.txt"
    assert read_text(str(tmp_path / "*.txt")) == "a.txtb.txt"
    assert read_text([tmp_path / "c.md", tmp_path / "a.txt"]) == "c.mda.txt"


def test_the_end_of_a_text_is_held_out_for_validation(tmp_path: Path):
    share = 0.25
    text = "".join(chr(97 + i % 26) for i in range(1000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    corpus = Text(path=str(tmp_path / "a.txt"), context=16, validation=share).build()
    cut = round(1000 * (1 - share))
    assert corpus.vocabulary.decode(corpus.train.tokens) == text[:cut]
    assert corpus.vocabulary.decode(corpus.validation.tokens) == text[cut:]
    assert (corpus.train.stride, corpus.validation.stride) == (1, 16)


gguf = pytest.importorskip("gguf")
MARKS = ["<|im_start|>", "<|im_end|>", "<think>"]
WORDED = "It's 1234 wörds,  and\n\n <tag>"


@pytest.fixture(name="trained", scope="module")
def _trained():
    return train_bpe(["1234 1234 It's wörds words 12 23"] * 9, vocab=270, end="<|endoftext|>")


@pytest.fixture(name="write")
def _write(tmp_path, trained):
    """Return a function that writes a GGUF file with a tokenizer, and returns its path."""

    def write(pre: str = "gpt-2", model: str = "gpt2", template: str = CHATML) -> str:
        parsed = trained.description()["tokenizer"]["model"]
        tokens = [*sorted(parsed["vocab"], key=parsed["vocab"].get), *MARKS]
        kinds = [3, *[1] * (len(tokens) - 4), 3, 3, 4]
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(merge) for merge in parsed["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(len(tokens) - 2)
        writer.add_float32("llama.rope.freq_base", 1e4)
        writer.add_array("general.languages", ["en"])
        if template:
            writer.add_chat_template(template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return str(tmp_path / "a.gguf")

    return write


def test_is_the_tokenizer_that_was_written(write, trained):
    found = read_tokenizer(write())
    np.testing.assert_array_equal(found.encode(WORDED), trained.encode(WORDED))
    assert found.decode(found.encode(WORDED)) == WORDED
    text = f"{MARKS[0]}12{MARKS[1]}{MARKS[2]}"
    plain, marks = found.encode(text), found.encode(text, special=True)
    assert (marks >= len(trained)).tolist() == [True, *[False] * (len(marks) - 3), True, True]
    assert (plain >= len(trained)).sum() == 1  # <think> is not a special token


@pytest.mark.parametrize(
    ("pre", "numbers"),
    [("gpt-2", ["1234"]), ("smollm", [*"1234"]), ("llama-bpe", ["123", "4"]), ("qwen2", [*"1234"])],
)
def test_words_are_split_as_in_llama_cpp(write, pre, numbers):
    found = read_tokenizer(write(pre))
    assert found.decode(found.encode(WORDED)) == WORDED
    parsed = found.description()["tokenizer"]
    package = pytest.importorskip("tokenizers")
    parts = package.Tokenizer.from_str(json.dumps(parsed)).pre_tokenizer.pre_tokenize_str(WORDED)
    words = [word.strip("Ġ") for word, _ in parts]
    assert [word for word in words if word.isdecimal()] == numbers
