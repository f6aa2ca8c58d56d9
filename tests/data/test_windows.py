from pathlib import Path

import numpy as np
import pytest

from jtrain.data import Arrays, InOrder, Source, Windows, read_tokens


def rows(windows: Windows) -> list[tuple[list[int], int]]:
    got = windows[np.arange(len(windows))]
    assert (got["tokens"].dtype, got["length"].dtype) == (np.int32, np.int32)
    return [
        (tokens.tolist(), int(length))
        for tokens, length in zip(got["tokens"], got["length"], strict=True)
    ]


def test_a_window_at_every_token():
    assert rows(Windows(np.arange(6), context=3)) == [
        ([0, 1, 2, 3], 3),
        ([1, 2, 3, 4], 3),
        ([2, 3, 4, 5], 3),
    ]


def test_the_last_window_may_be_short():
    assert rows(Windows(np.arange(7), context=4, stride=4)) == [
        ([0, 1, 2, 3, 4], 4),
        ([4, 5, 6, 6, 6], 2),
    ]


@pytest.mark.parametrize("context", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tokens", [9, 10, 17, 100])
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


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tokens", [6, 7, 11, 20])
def test_at_any_stride_every_target_is_in_a_window_and_none_is_empty(tokens: int, stride: int):
    found = rows(Windows(np.arange(tokens), context=5, stride=stride))
    assert {t for row, length in found for t in row[1 : 1 + length]} == set(range(1, tokens))
    assert all(length > 0 for _, length in found)
    assert all(row[0] == i * stride for i, (row, _) in enumerate(found))


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy"])
def test_token_files_are_mapped_and_read_as_they_were_written(tmp_path: Path, name: str):
    tokens = np.random.default_rng(0).integers(0, 50_257, 1000).astype(np.uint16)
    path = tmp_path / name
    if name.endswith("npy"):
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    read = read_tokens(path)
    assert isinstance(read, np.memmap)
    assert rows(Windows(read, context=64)) == rows(Windows(tokens, context=64))


def test_raw_tokens_of_32_bits(tmp_path: Path):
    np.array([1, 70_000, 3], "<u4").tofile(tmp_path / "t.bin")
    assert read_tokens(tmp_path / "t.bin", "uint32").tolist() == [1, 70_000, 3]


def test_arrays_keep_their_types_and_rows():
    source = Arrays(image=np.eye(3, dtype=np.float32), label=[2, 1, 0])
    got = source[np.array([2, 0, 2])]
    np.testing.assert_array_equal(got["image"], np.eye(3)[[2, 0, 2]])
    assert (got["image"].dtype, got["label"].tolist()) == (np.float32, [0, 2, 0])
    assert isinstance(source, Source)
