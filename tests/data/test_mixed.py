import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.batches.by_step import Shuffled
from jtrain.data.batches.mixed import MixedBatches
from jtrain.data.batches.proportions import Proportions
from jtrain.data.sources.arrays import Arrays
from jtrain.data.text.packed import Packed
from jtrain.data.text.prepare import prepare
from jtrain.data.text.token_files import TokenFiles
from jtrain.data.text.tokenizing import ByteTokens, CharacterTokens, PretrainedTokenizer
from jtrain.data.text.windows import Windows
from jtrain.errors import DataError


@pytest.mark.parametrize(
    "weights",
    [[1], [1, 1], [7, 2, 1], [0.7, 0.2, 0.1], [0.5, 0.25, 0.25], [1, 3], [0.3, 0.3, 0.3]],
)
def test_after_every_row_each_source_has_its_share_to_one_row(weights: list[float]):
    assert_shares(weights)


@pytest.mark.parametrize("seed", range(25))
def test_any_weights_are_exact_to_one_row(seed: int):
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


def test_a_place_is_computed_without_earlier_places():
    found, places = Proportions([5, 3, 1]), np.arange(1000)
    source, before = found.at(places)
    some = np.random.default_rng(0).permutation(1000)[:50]
    assert found.at(some)[0].tolist() == source[some].tolist()
    assert found.at(some)[1].tolist() == before[some].tolist()
    assert found.at(np.array([9 * 10**12]))[1].tolist() == [5 * 10**12]


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


def test_processes_shard_a_batch():
    whole, parts = mixed(), [mixed().shard(index, 4) for index in range(4)]
    for step in (0, 11):
        for name in ("of", "x", "row", "mask"):
            together = np.concatenate([part[step][name] for part in parts])
            np.testing.assert_array_equal(together, whole[step][name])


def test_a_source_that_comes_once_in_many_batches_is_in_its_place():
    often, seldom = Arrays(x=np.zeros(5)), Arrays(x=np.ones(5))
    batches = MixedBatches({"often": (often, 49_999), "seldom": (seldom, 1)}, size=1000)
    assert sum(batches[step]["x"].sum() for step in range(100)) == 2


def test_a_single_source_is_read_as_without_a_mixture():
    source = Arrays(x=np.arange(11))
    mine, alone = MixedBatches({"x": (source, 2.0)}, size=4), Shuffled(source, size=4)
    rows = lambda batches: [x for step in range(11) for x in batches[step]["x"].tolist()]
    assert sorted(rows(mine)) == sorted(rows(alone)) == sorted(list(range(11)) * 4)


def test_folders_of_two_tokenizers_are_refused_with_both_fingerprints(tmp_path: Path):
    (tmp_path / "a.txt").write_text("to be or not to be", encoding="utf-8")
    write = lambda name, how: prepare(tmp_path / "a.txt", tmp_path / name, tokenizing=how)
    headers = [write("a", ByteTokens()), write("b", CharacterTokens())]
    part = lambda name: (Windows(TokenFiles(tmp_path / name), context=4), 1.0)
    with pytest.raises(DataError) as refused:
        MixedBatches({name: part(name) for name in "ab"}, size=4)
    said = str(refused.value)
    assert all(header["tokenizer"] in said for header in headers)
    assert f"--tokenizer {tmp_path / 'a'}/tokenizer.json --out {tmp_path / 'b'}-again" in said
    write("b-again", PretrainedTokenizer(path=str(tmp_path / "a" / "tokenizer.json")))
    MixedBatches({name: part(name) for name in ("a", "b-again")}, size=4)[0]


TOKENS = np.arange(50)


@pytest.mark.parametrize(
    ("parts", "says", "right"),
    [
        ({"a": 1, "b": 0}, ("weight of b is 0", "leave b out"), {"a": 1}),
        ({"a": 1, "b": -2}, ("weight of b is -2", "Set weight=1"), {"a": 1, "b": 1}),
        ({"a": float("nan")}, ("weight of a is nan",), {"a": 1}),
        ({"a": "2", "b": 1}, ("weight of a is '2'", "Set weight=1"), {"a": 1, "b": 1}),
        ({}, ("no sources",), {"a": 1}),
        (
            {"a": 0.12345678, "b": 0.7654321},
            ("exact only over", "Round them: a 139, b 861"),
            {"a": 139, "b": 861},
        ),
    ],
)
def test_invalid_weights_are_refused_and_the_advice_works(parts, says, right):
    build = lambda parts: MixedBatches(
        {name: (Windows(TOKENS, context=4), weight) for name, weight in parts.items()}, size=4
    )
    with pytest.raises(DataError) as refused:
        build(parts)
    assert all(part in str(refused.value) for part in says), refused.value
    build(right)[0]


def test_rows_with_different_arrays_are_refused():
    unlike = {"a": (Windows(TOKENS, context=4), 1.0), "b": (Windows(TOKENS, context=5), 1.0)}
    with pytest.raises(DataError, match=r"tokens int32\[5\].*tokens int32\[6\].*one context"):
        MixedBatches(unlike, size=4)
    with pytest.raises(DataError, match="segments"):
        MixedBatches({"a": unlike["a"], "b": (Packed(TOKENS, context=4), 1.0)}, size=4)
