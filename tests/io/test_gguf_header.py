"""Headers of GGUF files of wild shape are refused in words, without the memory that they count."""

import struct

import pytest

from jtrain.errors import CheckpointError
from jtrain.models.pretrained.source import PretrainedWeights

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
