from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from jtrain.data.text.mixture import MixedCorpus, Mixture
from jtrain.data.text.prepare import prepare
from jtrain.data.text.tokenizing import ByteTokens, CharacterTokens
from jtrain.errors import DataError


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"verse": "rose ", "prose": "and so it goes. "}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text * 60, encoding="utf-8")
        prepare(f"{name}.txt", name, tokenizing=ByteTokens())


def mixture(**changed: object) -> Mixture:
    """Build a mixture from a config."""
    parts = {"verse": {"path": "verse", "weight": 0.7}, "prose": {"path": "prose", "weight": 0.3}}
    asked = {"kind": "mixture", "parts": parts, "context": 4, **changed}
    return TypeAdapter(Mixture).validate_python(asked)


def part(path: str, weight: float = 1, **more: object) -> dict[str, object]:
    return {"path": path, "weight": weight, **more}


def of_verse(corpus: MixedCorpus, tokens: np.ndarray) -> bool:
    text = corpus.vocabulary.decode(tokens)
    return text in "rose " * 3


@pytest.mark.parametrize("step", [0, 3, 10**6])
def test_each_batch_has_the_configured_shares(step: int):
    corpus = mixture().build()
    batches = corpus.shuffled(size=10, seed=0)
    verse = [of_verse(corpus, row) for row in batches[step]["tokens"]]
    assert sum(verse) == 7
    halves = [batches.shard(index, 2)[step]["tokens"] for index in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves), batches[step]["tokens"])


def test_each_text_has_its_own_evaluation():
    corpus = mixture().build()
    sets = corpus.in_order(size=4)
    assert list(sets) == ["verse", "prose"]
    for name, rows in sets.items():
        batch = rows[0]
        assert [of_verse(corpus, row) for row in batch["tokens"]] == [name == "verse"] * 4
        targets = sum(int(batch["length"][batch["mask"]].sum()) for batch in rows)
        assert targets == {"verse": 29, "prose": 95}[name], "a tenth of its tokens, each once"


def test_documents_can_be_packed():
    batch = mixture(pack=True).build().shuffled(size=10, seed=0)[0]
    assert batch["segments"].shape == batch["tokens"].shape == (10, 5)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"parts": {}}, r"must name at least one text, found none; write \{NAME: \{path"),
        ({"parts": {"verse": part("verse", -1)}}, "greater than 0"),
        ({"parts": {"verse": part("verse", float("inf"))}}, "finite"),
        ({"parts": {"verse": part("verse", context=8)}}, "verse.context"),
        ({"parts": {"all": {"kind": "mixture", "parts": {"verse": part("verse")}}}}, "all.kind"),
    ],
)
def test_an_invalid_mixture_is_refused_in_the_config(changed: dict, says: str):
    with pytest.raises(ValidationError, match=says):
        mixture(**changed)


def test_a_text_of_another_tokenizer_is_refused_and_the_advice_works():
    prepare("prose.txt", "letters", tokenizing=CharacterTokens())
    mixed = {"verse": part("verse"), "prose": part("letters")}
    with pytest.raises(DataError, match=r"verse was written by bytes 1b5e.*--out letters-again"):
        mixture(parts=mixed).build()
    mixture(parts=mixed | {"prose": part("prose")}).build()
    with pytest.raises(
        DataError, match=r"Tokenizer abc was requested.*data.tokenizer=1b5ec18e7563"
    ):
        mixture(tokenizer="abc").build()
    mixture(tokenizer="1b5ec18e7563").build()


def test_a_text_that_is_too_short_is_named_and_the_advice_works():
    Path("short.txt").write_text("so", encoding="utf-8")
    prepare("short.txt", "short", tokenizing=ByteTokens())
    parts = {"verse": part("verse"), "short": part("short")}
    with pytest.raises(DataError, match=r"validation 0.1 of short .*Set data.validation=0.5"):
        mixture(parts=parts).build()
    with pytest.raises(DataError, match=r"context 40 does not fit .* of verse.* data.context=29"):
        mixture(context=40).build()
    mixture(context=29).build()
