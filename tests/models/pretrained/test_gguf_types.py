"""Types of GGUF tensors, in files of random blocks: the package's numbers, and plain loops."""

import functools
from pathlib import Path

import numpy as np
import pytest
from comparison import assert_close

from jtrain.models.pretrained.gguf_file import read_gguf

gguf = pytest.importorskip("gguf")

ROWS, WIDTH = 6, 512
# Bytes in a block where its float16 scales lie: random ones would be infinite.
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


@functools.cache
def blocks(kind: str) -> np.ndarray:
    """Return random blocks, rows x bytes."""
    draw = np.random.default_rng(len(kind) + ord(kind[1]))
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    found = draw.integers(0, 256, (ROWS * WIDTH // numbers, size), dtype=np.uint8)
    for place in SCALES[kind]:
        scale = draw.normal(size=len(found)).astype(np.float16)
        found[:, place : place + 2] = scale[:, None].view(np.uint8)
    return found.reshape(ROWS, -1)


def write(path: Path, kind: str) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_context_length(8)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(ROWS)
    writer.add_layer_norm_rms_eps(1e-6)
    quantised = gguf.GGMLQuantizationType[kind]
    writer.add_tensor("blk.0.ffn_up.weight", blocks(kind), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(tmp_path: Path, kind: str) -> np.ndarray:
    file = read_gguf(write(tmp_path / f"{kind}.gguf", kind))
    tensor = file.tensors["model.layers.0.mlp.up_proj.weight"]
    assert tensor.shape == (ROWS, WIDTH)
    return np.asarray(tensor)


@pytest.mark.parametrize("kind", SCALES)
def test_gives_the_numbers_of_the_package(tmp_path, kind):
    found = read(tmp_path, kind)
    want = gguf.quants.dequantize(blocks(kind), gguf.GGMLQuantizationType[kind])
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, want.reshape(ROWS, WIDTH))


def half(block: np.ndarray, place: int) -> float:
    return float(block[place : place + 2].view(np.float16)[0])


def q4_0(block):
    d, codes = half(block, 0), block[2:].astype(int)
    return [d * (code - 8) for code in [*(codes & 15), *(codes >> 4)]]


def q4_1(block):
    d, m, codes = half(block, 0), half(block, 2), block[4:].astype(int)
    return [d * code + m for code in [*(codes & 15), *(codes >> 4)]]


def q4_k(block):
    d, least, packed, codes = half(block, 0), half(block, 2), block[4:16], block[16:].astype(int)
    q = [int(byte) for byte in packed]
    values = []
    for j in range(8):
        if j < 4:
            scale, minimum = q[j] & 63, q[j + 4] & 63
        else:
            scale = (q[j + 4] & 15) | (q[j - 4] >> 6 << 4)
            minimum = (q[j + 4] >> 4) | (q[j] >> 6 << 4)
        part = codes[32 * (j // 2) : 32 * (j // 2) + 32]
        part = part >> 4 if j % 2 else part & 15
        values += [d * scale * code - least * minimum for code in part]
    return values


def q6_k(block):
    d, scales = half(block, 208), block[192:208].view(np.int8).astype(int)
    values = np.zeros(256)
    for half_block in range(2):
        low = block[64 * half_block : 64 * half_block + 64].astype(int)
        high = block[128 + 32 * half_block : 160 + 32 * half_block].astype(int)
        for i in range(32):
            for quarter in range(4):
                bits = low[i + 32 * (quarter % 2)]
                bits = bits >> 4 if quarter >= 2 else bits & 15
                code = (bits | ((high[i] >> 2 * quarter) & 3) << 4) - 32
                scale = scales[8 * half_block + i // 16 + 2 * quarter]
                values[128 * half_block + 32 * quarter + i] = d * scale * code
    return values


@pytest.mark.parametrize(
    ("kind", "loop"), [("Q4_0", q4_0), ("Q4_1", q4_1), ("Q4_K", q4_k), ("Q6_K", q6_k)]
)
def test_gives_the_numbers_of_the_format(tmp_path, kind, loop):
    """Source of the loops: the layouts of ggml-quants.c, https://github.com/ggml-org/llama.cpp."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    want = [number for block in blocks(kind).reshape(-1, size) for number in loop(block)]
    assert_close(read(tmp_path, kind).ravel(), want, 1e-6)
