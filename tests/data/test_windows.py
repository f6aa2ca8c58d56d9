"""Rows of tokens: windows, packed documents and random tokens."""

from pathlib import Path

import numpy as np
import pytest

from jtrain.data import InOrder, Shuffled, Windows
from jtrain.data.text.prepare import prepare
from jtrain.data.text.token_files import TokenFiles
from jtrain.data.text.token_rows import Packed, pack_best_fit
from jtrain.data.text.tokenizing import ByteTokens


def listed(windows: Windows) -> list[tuple[list[int], int]]:
    got = windows[np.arange(len(windows))]
    assert (got["tokens"].dtype, got["length"].dtype) == (np.int32, np.int32)
    return [
        (tokens.tolist(), int(length))
        for tokens, length in zip(got["tokens"], got["length"], strict=True)
    ]


def test_the_last_window_may_be_short():
    assert listed(Windows(np.arange(7), context=4, stride=4)) == [
        ([0, 1, 2, 3, 4], 4),
        ([4, 5, 6, 6, 6], 2),
    ]


@pytest.mark.parametrize(("tokens", "context"), [(9, 8), (10, 3), (17, 1)])
def test_with_strides_of_the_context_every_target_counts_once(tokens: int, context: int):
    windows = Windows(np.arange(tokens, dtype=np.uint16), context=context, stride=context)
    targets = [
        int(t)
        for batch in InOrder(windows, size=4)
        for row, length, real in zip(batch["tokens"], batch["length"], batch["mask"], strict=True)
        if real
        for t in row[1 : 1 + length]
    ]
    assert targets == list(range(1, tokens))


@pytest.mark.parametrize(("tokens", "stride"), [(6, 5), (11, 2), (20, 3)])
def test_at_any_stride_every_target_is_in_a_window_and_none_is_empty(tokens: int, stride: int):
    found = listed(Windows(np.arange(tokens), context=5, stride=stride))
    assert {t for row, length in found for t in row[1 : 1 + length]} == set(range(1, tokens))
    assert all(length > 0 for _, length in found)
    assert all(row[0] == i * stride for i, (row, _) in enumerate(found))


def pack_sequentially(lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack by best fit decreasing, one length at a time, into the fullest row with room."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fits = [row for row in rows if sum(row) + length <= capacity]
        if fits:
            max(fits, key=sum).append(length)
        else:
            rows.append([length])
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_as_full_as_by_sequential_best_fit(seed: int):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 40))
    lengths = rng.integers(1, capacity + 1, int(rng.integers(1, 300)))
    pieces, begins = pack_best_fit(lengths, capacity)
    parts = np.split(pieces, begins[1:-1])
    assert sorted(pieces.tolist()) == list(range(len(lengths)))
    found = [int(lengths[part].sum()) for part in parts]  # equally full rows in any order
    assert sorted(found) == sorted(map(sum, pack_sequentially(lengths.tolist(), capacity)))


def ragged(context: int, documents: int = 90) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct tokens, in documents of every critical length."""
    odd = [1, 2, context, context + 1, context + 2, 2 * context, 2 * context + 1, 2 * context + 2]
    drawn = np.random.default_rng(context).integers(1, 4 * context, documents)
    edges = np.cumsum([0, *odd, *drawn.tolist()])
    return np.arange(edges[-1]), edges


@pytest.mark.parametrize(("context", "epoch"), [(1, 0), (7, 3), (16, 0)])
def test_no_token_is_lost_or_repeated_in_an_epoch(context: int, epoch: int):
    tokens, edges = ragged(context)
    source = Packed(tokens, context=context, documents=edges)
    batches = Shuffled(source, size=4, seed=epoch, end="pad")
    steps = -(-len(source) // 4)
    targets, seen = np.zeros(len(tokens), int), np.zeros(len(tokens), int)
    document = np.searchsorted(edges, tokens, "right")
    for step in range(epoch * steps, (epoch + 1) * steps):
        batch = batches[step]
        rows, segments = batch["tokens"][batch["mask"]], batch["segments"][batch["mask"]]
        real = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        np.add.at(targets, rows[:, 1:][real], 1)
        np.add.at(seen, rows[segments > 0], 1)
        # An input is the token before its target, in the same document.
        assert (rows[:, 1:][real] == rows[:, :-1][real] + 1).all()
        assert (document[rows[:, 1:][real]] == document[rows[:, :-1][real]]).all()
    first = np.isin(tokens, edges[:-1])
    assert (targets == ~first).all(), "every token but the first of a document, exactly once"
    cuts = (
        np.maximum(-(-(np.diff(edges) - 1) // context), 1) - 1
    )  # the token at a cut is in two rows
    assert (seen >= 1).all()
    assert seen.sum() == len(tokens) + cuts.sum()


def test_token_files_are_packed_by_their_documents(tmp_path: Path):
    lines = [f"line {i} " + "x" * (i % 23) for i in range(200)]
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    prepare(tmp_path / "a.txt", tmp_path / "out", tokenizing=ByteTokens(), by="line", shard=111)
    files = TokenFiles(tmp_path / "out")
    train, valid = files.split(0.2)
    found = []
    for part in (train, valid):
        for batch in InOrder(Packed(part, context=64), size=4):
            rows = zip(batch["tokens"], batch["segments"], batch["mask"], strict=True)
            for tokens, segments, real in rows:
                ids = set(segments.tolist()) - {0} if real else set()
                found += [files.tokenizer.decode(tokens[segments == i]) for i in ids]
    assert sorted(found) == sorted(lines)
