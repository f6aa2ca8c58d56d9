"""Mixtures: the share of each source, exact to one row."""

import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from jtrain.data.batches.mixed import MixedBatches, Proportions
from jtrain.data.sources.arrays import Arrays
from jtrain.data.text.corpora import MixedCorpus, Mixture
from jtrain.data.text.prepare import prepare
from jtrain.data.text.tokenizing import ByteTokens


def test_any_weights_are_exact_to_one_row():
    for weights in ([0.7, 0.2, 0.1], [0.3, 0.3, 0.3]):
        assert_shares(weights)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        weights = rng.integers(1, 60, int(rng.integers(2, 9))) ** int(rng.integers(1, 3))
        assert_shares(weights.tolist())


def assert_shares(weights: list[float]) -> None:
    found = Proportions(weights)
    places = np.arange(2 * found.period + 7)
    source, before = found.at(places)
    total = sum(Fraction(repr(float(weight))) for weight in weights)
    for number, weight in enumerate(weights):
        share = Fraction(repr(float(weight))) / total
        counts = np.cumsum(source == number)
        # In integers: |count - share x rows| < 1.
        off = np.abs(counts * share.denominator - share.numerator * (places + 1))
        assert off.max() < share.denominator
        assert before[source == number].tolist() == list(range(counts[-1]))


PARTS = {"a": 10, "b": 7, "c": 3}  # rows


def mixed(size: int = 8, seed: int = 0) -> MixedBatches:
    source = lambda name: Arrays(
        of=np.full(PARTS[name], ord(name)), x=np.arange(PARTS[name], dtype=np.float32)
    )
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    parts = {name: (source(name), weight) for name, weight in weights.items()}
    return MixedBatches(parts, size=size, seed=seed)


def test_each_source_goes_through_its_own_epochs():
    batches = mixed()
    rows = [
        (chr(of), int(x))
        for i in range(100)
        for b in [batches[i]]
        for of, x in zip(b["of"], b["x"], strict=True)
    ]
    for name, length in PARTS.items():
        mine = [x for of, x in rows if of == name]
        epochs = [mine[i : i + length] for i in range(0, len(mine) - length, length)]
        assert len(epochs) > 10
        assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1, "each epoch in another order"


def test_a_batch_is_a_function_of_the_seed_and_the_step():
    forward, jumping = mixed(), mixed()
    expected = [forward[step]["x"].tolist() for step in range(30)]
    for step in (29, 3, 3, 17):
        assert jumping[step]["x"].tolist() == expected[step]
    assert mixed(seed=1)[0]["x"].tolist() != expected[0]
    whole = np.concatenate([mixed(size=4)[step]["x"] for step in range(60)])
    assert whole.tolist() == np.concatenate(expected).tolist(), "independent of the batch size"


def test_the_order_of_a_mixture_is_pinned():
    a, b = Arrays(x=np.arange(97)), Arrays(x=np.arange(1000, 1310))
    batches, found = MixedBatches({"a": (a, 0.7), "b": (b, 0.3)}, size=64, seed=2), 0
    for step in [*range(600), 10**6]:
        found = zlib.crc32(batches[step]["x"].astype("<i8").tobytes(), found)
    assert found == 0x7B2BDAF2


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def of_verse(corpus: MixedCorpus, tokens: np.ndarray) -> bool:
    text = corpus.vocabulary.decode(tokens)
    return text in "rose " * 3


@pytest.mark.usefixtures("folders")
def test_each_batch_has_the_configured_shares():
    step = 10**6
    corpus = mixture().build()
    batches = corpus.shuffled(size=10, seed=0)
    verse = [of_verse(corpus, row) for row in batches[step]["tokens"]]
    assert sum(verse) == 7
    halves = [batches.shard(index, 2)[step]["tokens"] for index in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves), batches[step]["tokens"])
