"""Tiny Shakespeare: the published text, or an error."""

import hashlib
from pathlib import Path

import pytest

from jtrain.data.text import shakespeare
from jtrain.data.text.shakespeare import TinyShakespeare
from jtrain.errors import DataError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JTRAIN_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tinyshakespeare").mkdir()
    return tmp_path / "tinyshakespeare" / "input.txt"


def test_a_missing_text_is_reported_with_the_command(place):
    with pytest.raises(DataError, match=r"curl --create-dirs -o .*tinyshakespeare/input.txt https"):
        TinyShakespeare().build()


def test_another_text_is_refused_and_can_be_trained_on_as_it_is(place):
    place.write_text("To be, or not to be. " * 40)
    with pytest.raises(DataError, match=r"not the text .* data.kind=text data.path=.*input.txt"):
        TinyShakespeare().build()


def test_the_last_tenth_is_held_out(place, monkeypatch):
    text = "To be, or not to be. " * 40
    place.write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    monkeypatch.setattr(shakespeare, "DIGEST", digest)
    corpus = TinyShakespeare(context=8).build()
    assert len(corpus.train) == len(text) * 9 // 10 - 8
    assert corpus.vocabulary.decode([0, 1]) == " ,"
