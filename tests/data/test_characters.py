from pathlib import Path

import numpy as np
import pytest

from jtrain.data import Vocabulary, read_text
from jtrain.data.text.text import Text


def test_decoding_gives_the_text_back():
    text = "O, Romeo!\n\u00e9t\u00e9 \U0001f339 rose"
    vocabulary = Vocabulary(text)
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert len(vocabulary) == len(set(text))


def test_numbers_are_places_in_the_order_of_the_characters():
    vocabulary = Vocabulary("cabbage")
    assert vocabulary.characters == "abceg"
    assert vocabulary.encode("beg").tolist() == [1, 3, 4]
    assert vocabulary == Vocabulary("egabc")


def test_numbers_take_the_fewest_bytes():
    many = Vocabulary("".join(map(chr, range(300))))
    assert Vocabulary("ab").encode("ab").dtype == np.uint8
    assert many.encode(chr(299)).dtype == np.uint16
    assert many.encode(chr(299)).tolist() == [299]


def test_files_are_read_in_the_order_they_are_named(tmp_path: Path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    assert read_text(tmp_path / "a.txt") == "a.txt"
    assert read_text(str(tmp_path / "*.txt")) == "a.txtb.txt"
    assert read_text([tmp_path / "c.md", tmp_path / "a.txt"]) == "c.mda.txt"


def test_a_byte_order_mark_is_no_character(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert read_text(tmp_path / "a.txt") == "abc"


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_the_end_of_a_text_is_held_out_for_validation(tmp_path: Path, share: float):
    text = "".join(chr(97 + i % 26) for i in range(1000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    corpus = Text(path=str(tmp_path / "a.txt"), context=16, validation=share).build()
    cut = round(1000 * (1 - share))
    assert corpus.vocabulary.decode(corpus.train.tokens) == text[:cut]
    assert corpus.vocabulary.decode(corpus.validation.tokens) == text[cut:]
    assert (corpus.train.stride, corpus.validation.stride) == (1, 16)
