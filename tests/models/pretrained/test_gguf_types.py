"""Types of GGUF tensors, in files of random blocks: the package's numbers, and plain loops."""

import functools
from pathlib import Path

import numpy as np
import pytest

from jtrain.models.pretrained.gguf import read_gguf

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
