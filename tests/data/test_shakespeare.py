import hashlib
import re
from pathlib import Path

import numpy as np

from jtrain.data import InOrder
from jtrain.data.text import shakespeare
from jtrain.data.text.shakespeare import Shakespeare, read_plays, split_play

HERE = Path(shakespeare.__file__).parent


def test_is_what_its_provenance_says():
    provenance = (HERE / "PROVENANCE.md").read_text(encoding="utf-8")
    packed = (HERE / "plays.txt.xz").read_bytes()
    assert hashlib.sha256(packed).hexdigest() in provenance
    assert f"{len(packed):,} bytes" in provenance
    assert f"{sum(map(len, read_plays().values())):,} characters" in provenance
    assert len(packed) < 2_500_000


def test_has_37_plays_that_look_like_plays():
    assert len(read_plays()) == 37
    assert list(read_plays()) == sorted(read_plays())
    for name, play in read_plays().items():
        speeches = play.removesuffix("\n\n").split("\n\n")
        assert len(speeches) > 400, name
        for speech in speeches:
            speaker, *lines = speech.split("\n")
            assert re.fullmatch(r"[A-Z][A-Za-z' &-]*:", speaker), (name, speech)
            assert lines, (name, speech)
            assert all(line and line == line.strip() for line in lines), (name, speech)


def test_has_no_headings_directions_or_licences():
    text = "".join(read_plays().values())
    assert len(set(text)) == 63
    for word in ("gutenberg", "copyright", "http", "exeunt", "[", "(", "_", "*"):
        assert word not in text.lower()
    assert not re.search(r"(?m)^(?:ACT|SCENE) [IVX]+", text)


def test_has_the_words_everybody_knows():
    assert "HAMLET:\nTo be, or not to be: that is the question:\n" in read_plays()["hamlet"]
    assert "Tomorrow" not in read_plays()["macbeth"]  # the spelling of the edition
    assert "To-morrow, and to-morrow, and to-morrow,\n" in read_plays()["macbeth"]


def test_the_two_parts_are_disjoint_and_complete():
    for play in read_plays().values():
        train, validation = split_play(play)
        assert train + validation == play
        assert 0.09 < len(validation) / len(play) < 0.12
        assert train.endswith("\n\n")


def test_both_parts_are_alike():
    corpus = Shakespeare(context=64).build()
    assert corpus.vocabulary.decode(corpus.train.tokens[:9]) == "THESEUS:\n"
    share = len(corpus.validation.tokens) / len(corpus.train.tokens)
    assert 0.1 < share < 0.12
    # Unigram nats a character by the training part's counts: equal on both parts.
    nats = [nats_a_character(corpus.train.tokens, part.tokens) for part in corpus[:2]]
    assert abs(nats[0] - nats[1]) < 0.03


def nats_a_character(counted, judged) -> float:
    shares = np.bincount(counted, minlength=63) / len(counted)
    return float(-np.log(shares[judged]).mean())


def test_every_validation_character_is_a_target_once():
    corpus = Shakespeare(context=64).build()
    batches = InOrder(corpus.validation, size=64)
    targets = sum(int(batch["length"][batch["mask"]].sum()) for batch in batches)
    assert targets == len(corpus.validation.tokens) - 1
