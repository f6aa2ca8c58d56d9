"""Files of tensors are read as the safetensors library writes them; broken ones are refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jtrain.errors import CheckpointError
from jtrain.io.safetensors import HEADER, read_metadata, read_tensors

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


BROKEN = {
    "empty": (b"", "no complete file of tensors: its header should have 0 bytes, and 0 exist"),
    "no file of tensors": (b"PK\3\4" * 99, r"its header should have \d+ bytes, and 388 exist"),
    "header that is no JSON": ((4).to_bytes(8, "little") + b"{{{{", "JSONDecodeError"),
    "header of something else": (_header({"a": 1}), "its header has {'a': 1} for x"),
    "cut off": (
        _header({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}),
        "x does not fit at 0 to 16 of 8 bytes",
    ),
    "more elements than an array has": (
        _header({"dtype": "F32", "shape": [0, 2**63 - 1], "data_offsets": [0, 0]}),
        r"x has the shape \[0, 9223372036854775807\]",
    ),
    "more dims than an array has": (
        _header({"dtype": "U8", "shape": [1] * 99, "data_offsets": [0, 1]}),
        r"x has the shape \[1, 1",
    ),
    "a size beyond all files": (
        _header({"dtype": "U8", "shape": [10**40, 0], "data_offsets": [0, 0]}),
        "x has the shape",
    ),
    "nested without end": (
        (10**6).to_bytes(8, "little") + b"[" * 10**6,
        "is nested deeper than 64 levels",
    ),
    "a header that takes all memory": (
        (HEADER + 1).to_bytes(8, "little") + bytes(HEADER + 1),
        r"a header of [\d,]+ bytes; use files of at most",
    ),
    "strange type": (
        _header({"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}),
        "x has the dtype F4; supported are BOOL, .* Convert the file",
    ),
}


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_is_refused(content, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(BROKEN[content][0])
    with pytest.raises(CheckpointError, match=BROKEN[content][1]):
        read_tensors(path)


@pytest.mark.parametrize("found", ["null", "3", '["a"]'])
def test_metadata_of_another_kind_are_refused(found, tmp_path):
    text = b'{"__metadata__": %s}' % found.encode()
    (path := tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="its __metadata__ is"):
        read_metadata(path)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "", ".."])
def test_an_index_with_a_name_that_no_file_has_is_refused(name, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="which is not in the same folder"):
        read_tensors(index)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be read .No such file.*Name another file"):
        read_tensors(tmp_path / "x.safetensors")
