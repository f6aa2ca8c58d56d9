import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.text.bpe import BPE, train_bpe
from jtrain.data.text.characters import Vocabulary
from jtrain.data.text.tokenizer import ByteTokenizer, Tokenizer, check_same_tokenizer, fingerprint
from jtrain.data.text.tokenizer_file import build_tokenizer, read_tokenizer
from jtrain.data.text.tokenizing import (
    BytePairTokens,
    ByteTokens,
    CharacterTokens,
    PretrainedTokenizer,
)
from jtrain.errors import DataError

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


def test_a_fingerprint_depends_on_the_content():
    assert fingerprint(ByteTokenizer()) == "1b5ec18e7563"
    found = {fingerprint(build()) for build in KINDS.values()}
    found |= {
        fingerprint(Vocabulary("ab")),
        fingerprint(train_bpe(VERSES, vocab=271, end="<|end|>")),
    }
    assert len(found) == 5


def test_bytes_are_those_of_utf_8():
    numbers = ByteTokenizer().encode("aé")
    assert numbers.tolist() == [97, 0xC3, 0xA9]
    assert ByteTokenizer().decode([97, 256, 0xC3]) == "a\ufffd"


def test_pairs_that_occur_most_are_one_token():
    tokenizer = train_bpe(["ab ab ab ab cd"], vocab=258, end="<|end|>")
    assert len(tokenizer.encode("ab")) == 1
    assert len(tokenizer.encode("cd")) == 2


def test_a_text_that_spells_out_an_end_ends_nothing():
    tokenizer = BytePairTokens(vocab=260).build(VERSES)
    numbers = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end is not None
    assert tokenizer.end not in numbers.tolist()
    assert tokenizer.decode(numbers) == "a<|endoftext|>b"
    assert tokenizer.decode([tokenizer.end, *numbers.tolist()]) == "a<|endoftext|>b"


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


def test_a_file_of_jtrain_is_read(tmp_path: Path, build):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(build().description()), encoding="utf-8")
    assert fingerprint(read_tokenizer(path)) == fingerprint(build())


def test_numbers_past_65536_take_four_bytes():
    vocab = {f"w{i}": i for i in range(65_537)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    parsed = {"version": "1.0", "added_tokens": [], "model": model}
    tokenizer = BPE(parsed, end="w65536")
    assert tokenizer.encode("w65536").dtype == np.uint32
    assert tokenizer.encode("w65536").tolist() == [65_536] == [tokenizer.end]


def test_the_vocabulary_reaches_up_to_the_largest_number():
    """A file may leave numbers out: an embedding of as many rows as tokens would be too short."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 2, "z": 65_536}, "unk_token": "a"}
    tokenizer = BPE({"version": "1.0", "added_tokens": [], "model": model}, end="b")
    assert len(tokenizer) == 65_537
    assert tokenizer.encode("z").tolist() == [65_536]


def test_half_of_a_surrogate_pair_is_refused(build):
    """The shell gives it for a byte of a prompt that is not UTF-8."""
    with pytest.raises(DataError, match=r"surrogate pair|is not among"):
        build().encode("a\udcff")


def test_two_different_tokenizers_are_refused_with_the_command_to_type():
    one, other = ByteTokenizer(), Vocabulary("ab")
    check_same_tokenizer({"data/a": one, "data/b": ByteTokenizer()})
    with pytest.raises(DataError) as refused:
        check_same_tokenizer({"data/a": one, "data/b": other})
    for part in (fingerprint(one), fingerprint(other), "--tokenizer data/a/tokenizer.json"):
        assert part in str(refused.value)


def test_a_missing_tokenizers_package_is_reported_with_its_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'jtrain\[text\]'"):
        BytePairTokens().build(VERSES)


def test_too_few_or_too_many_tokens_are_refused_and_the_advice_works():
    with pytest.raises(DataError, match="Set vocab=257 or more"):
        BytePairTokens(vocab=256).build(VERSES)
    assert len(BytePairTokens(vocab=257).build(VERSES)) == 257
    with pytest.raises(DataError, match=r"Set vocab=(\d+) or less") as refused:
        BytePairTokens(vocab=5000).build(VERSES)
    most = int(str(refused.value).split("Set vocab=")[1].split(" ")[0])
    assert len(BytePairTokens(vocab=most).build(VERSES)) == most


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x00\x01", "from byte"),
        (b'{"version": ', "from byte 12"),
        (b"[1]", "holds a list"),
        (b'{"kind": "words"}', "'words' is not a kind"),
        (b'{"learning_rate": 1}', "has the keys learning_rate"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, data: bytes, says: str):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(DataError, match=says):
        read_tokenizer(tmp_path / "tokenizer.json")


def test_a_text_is_neither_cut_nor_padded_where_the_file_asks_for_a_length():
    plain = train_bpe(["to be or not to be"], vocab=260, end="<|end|>").description()["tokenizer"]
    length = {
        "truncation": {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
    }
    long = "to be or not to be, or to be"
    want, got = BPE(plain, end="<|end|>"), BPE(plain | length, end="<|end|>")
    for text in ("to", long):
        for special in (False, True):
            np.testing.assert_array_equal(
                got.encode(text, special=special), want.encode(text, special=special)
            )


WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
PIECES = {**WORDS, "type": "WordPiece", "unk_token": "none", "max_input_chars_per_word": 9}
PIECES["continuing_subword_prefix"] = "##"
# Backtracks without end, so that the package's limit ends it.
ENDLESS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
FAILING = {
    "a pattern": {"model": WORDS, "pre_tokenizer": {**ENDLESS, "invert": False}},
    "a part of no length": {
        "model": WORDS,
        "pre_tokenizer": {"type": "FixedLength", "length": 0},
    },
    "an unknown token that is none": {"model": PIECES},
}


@pytest.mark.parametrize("name", FAILING)
def test_a_file_that_fails_on_a_text_is_refused_in_words(name: str):
    built = BPE({"version": "1.0", "added_tokens": [], **FAILING[name]}, end="a")
    for encode in (built.encode, lambda text: built.encode(text, special=True)):
        with pytest.raises(DataError, match=r"fails on a text .*Download that file again"):
            encode("a" * 40 + "b")


def test_a_file_on_which_the_package_panics_is_refused_in_words():
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(DataError, match=r"cannot be read .*Tokenizer.save"):
        BPE({"version": "1.0", "added_tokens": [], "model": WORDS, "normalizer": broken}, end="a")
