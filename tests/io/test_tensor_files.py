"""Files of tensors are read as the safetensors library writes them; broken ones are refused."""
# ruff: noqa: E501  (a case reads best on a line)

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jtrain.errors import CheckpointError
from jtrain.io.safetensors import HEADER, read_tensors
from jtrain.models.pretrained.source import PretrainedWeights

DRAW = np.random.default_rng(0)
ARRAYS = {
    "a.weight": DRAW.standard_normal((3, 4)).astype(np.float32),
    "a.half": DRAW.standard_normal(5).astype(np.float16),
    "b.whole": DRAW.integers(-9, 9, (2, 1, 3)),
    "b.flag": np.array([True, False]),
    "scalar": np.array(3, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.fixture(name="path")
def _path(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(ARRAYS, path, metadata={"format": "pt"})
    return path


def test_reads_files_of_the_safetensors_library(path):
    found = read_tensors(path)
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_reads_bfloat16(path):
    numbers = np.asarray(jnp.asarray(ARRAYS["a.weight"], jnp.bfloat16))
    header = {"x": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + numbers.tobytes())
    found = read_tensors(path)["x"]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, numbers)


def test_an_index_joins_its_files(tmp_path):
    save_file({"a": np.ones(3)}, tmp_path / "1.safetensors")
    save_file({"b": np.zeros(2)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    files = {"a": "1.safetensors", "b": "2.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert {name: array.shape for name, array in read_tensors(index).items()} == {
        "a": (3,),
        "b": (2,),
    }
    index.write_text(json.dumps({"weight_map": {**files, "c": "1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"expects c in 1.safetensors, which lacks it"):
        read_tensors(index)


def _header(entry: dict) -> bytes:
    text = json.dumps({"x": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


BROKEN = [
    (b"", "not a complete file of tensors: its header should have 0 bytes, and 0 exist"),
    ((4).to_bytes(8, "little") + b"{{{{", "JSONDecodeError"),
    (_header({"a": 1}), "its header has {'a': 1} for x"),
    (_header({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}), "x does not fit at 0 to 16 of 8 bytes"),
    (_header({"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}), "not a complete file of tensors"),
    (_header({"dtype": "F32", "shape": [0, 2**63 - 1], "data_offsets": [0, 0]}), r"x has the shape \[0, 9223372036854775807\]"),
    (_header({"dtype": "U8", "shape": [1] * 99, "data_offsets": [0, 1]}), r"x has the shape \[1, 1"),
    ((10**6).to_bytes(8, "little") + b"[" * 10**6, "is nested deeper than 64 levels"),
    ((HEADER + 1).to_bytes(8, "little") + bytes(HEADER + 1), r"a header of [\d,]+ bytes; use files of at most"),
    (_header({"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}), "x has the dtype F4; supported are BOOL, .* Convert the file"),
]  # fmt: skip


def test_a_broken_file_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    for content, words in BROKEN:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            read_tensors(path)


pytest.importorskip("gguf")


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def listed(kind: int, count: int, rest: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + rest


NESTED = b"".join(listed(9, 1) for _ in range(5000)) + listed(4, 0)
HEADERS = {
    "a count of keys": (2**60, b""),
    "a list of numbers": (1, key("a", 9, listed(0, 2**60))),
    "a list of texts": (1, key("a", 9, listed(8, 2**40))),
    "a text": (1, key("a", 8, struct.pack("<Q", 2**62))),
    "nested lists": (1, key("a", 9, NESTED)),
    "an unknown type": (1, key("a", 77, bytes(8))),
    "a key twice": (2, key("a", 4, bytes(4)) * 2),
    "an alignment": (1, key("general.alignment", 4, bytes(4))),
    "an architecture": (1, key("general.architecture", 9, listed(4, 1, bytes(4)))),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_of_wild_shape_is_refused(name, tmp_path):
    count, content = HEADERS[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, count) + content + bytes(64))
    with pytest.raises(CheckpointError, match=r"Download it again|general.architecture="):
        PretrainedWeights(path)


@pytest.mark.parametrize("shape", [(2**40, 2**40), (0, 2**63), (2**62,), (8,) * 5, (2**64 - 1, 0)])
def test_a_tensor_of_wild_shape_is_refused(shape, tmp_path):
    info = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("token_embd.weight") + info
    path = tmp_path / "a.gguf"
    path.write_bytes(header + bytes(64))
    with pytest.raises(CheckpointError, match=r"token_embd.weight|Download it again"):
        PretrainedWeights(path)
