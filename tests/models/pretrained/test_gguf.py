"""GGUF files, written by the package `gguf`, are read as the folder of the same model."""

from pathlib import Path
from typing import Any

import numpy as np
import published_models as published
import pytest

from jtrain.errors import CheckpointError
from jtrain.models.pretrained.gguf_file import _config, read_gguf
from jtrain.models.pretrained.registry import FAMILIES
from jtrain.models.pretrained.source import PretrainedWeights, vocabulary_of

gguf = pytest.importorskip("gguf")

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def their_name(name: str) -> str:
    for old, new in {"model.embed_tokens": "token_embd", "model.norm": "output_norm",
                     "lm_head": "output", "model.layers.": "blk.", **NAMES}.items():  # fmt: skip
        name = name.replace(old, new)
    return name


def permuted(name: str, x: np.ndarray, heads: int) -> np.ndarray:
    """Return queries and keys as llama.cpp has them: the pair of a rotation side by side."""
    if not name.endswith(("attn_q.weight", "attn_k.weight")):
        return x
    halves = x.reshape(heads, 2, x.shape[0] // heads // 2, x.shape[1])
    return halves.swapaxes(1, 2).reshape(x.shape)


def write(path: Path, golden: dict[str, Any], kind: str | None = None, **metadata: Any) -> Path:
    config = golden["config"]
    writer = gguf.GGUFWriter(path, metadata.get("architecture", "llama"))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_token_list([f"t{i}" for i in range(31)])
    for name, array in published.tensors_of(golden).items():
        new = their_name(name)
        heads = config["num_key_value_heads" if "attn_k" in new else "num_attention_heads"]
        array = np.ascontiguousarray(permuted(new, array, heads))
        if kind and array.ndim == 2:
            quantised = getattr(gguf.GGMLQuantizationType, kind)
            packed = gguf.quants.quantize(array, quantised)
            writer.add_tensor(new, packed, raw_dtype=quantised)
        else:
            writer.add_tensor(new, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(name="golden", scope="module")
def _golden():
    golden = published.golden("llama")
    golden["config"]["rms_norm_eps"] = float(np.float32(1e-5))
    return golden


def test_is_the_model_of_the_folder(golden, tmp_path):
    folder = PretrainedWeights(published.write_model(tmp_path / "hf", golden))
    file = PretrainedWeights(write(tmp_path / "a.gguf", golden))
    assert file.model == folder.model
    for name, array in folder.read(folder.found).items():
        np.testing.assert_array_equal(file.read({name: file.found[name]})[name], array, name)
    assert vocabulary_of(tmp_path / "a.gguf") == {f"t{i}": i for i in range(31)}


@pytest.mark.parametrize(("kind", "within"), [("F16", 5e-4), ("Q8_0", 1 / 127), ("Q4_1", 1 / 15)])
def test_quantised_tensors_are_dequantised(golden, tmp_path, kind, within):
    wide = {name: [*shape[:-1], 32] for name, shape in golden["tensors"].items()}
    changed = {**golden, "tensors": {n: s for n, s in wide.items() if n.endswith("tokens.weight")}}
    path = write(tmp_path / "q.gguf", changed, kind)
    found = np.asarray(read_gguf(path).tensors["model.embed_tokens.weight"])
    want = published.draw("model.embed_tokens.weight", (31, 32))
    # A step of the quantisation is the span of a block, of 32 numbers, over its levels.
    assert 0 < np.abs(found - want).max() <= within * np.ptp(want)


def test_a_truncated_or_foreign_file_is_refused(golden, tmp_path):
    path = write(tmp_path / "a.gguf", golden)
    complete = path.read_bytes()
    for keep in (len(complete) - 64, 200, 10):
        path.write_bytes(complete[:keep])
        with pytest.raises(CheckpointError, match=r"is no complete GGUF file .*Download it again"):
            PretrainedWeights(path)
    path.write_bytes(b"PK\3\4" * 99)
    with pytest.raises(CheckpointError, match="is no complete GGUF file"):
        PretrainedWeights(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        PretrainedWeights(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match=r"general.architecture='mamba'.*reads llama, qwen2"):
        PretrainedWeights(write(tmp_path / "m.gguf", golden, architecture="mamba"))


@pytest.mark.parametrize(
    ("kind", "width", "heads", "size", "scalar"),
    [
        ("gemma2", 4608, 32, 128, 144),  # the config.json of google/gemma-2-27b
        ("gemma3", 5376, 32, 128, 168),  # and of google/gemma-3-27b-pt
        ("gemma2", 3584, 16, 256, 256),
    ],
)
def test_the_queries_of_gemma_are_scaled_as_in_its_config(kind, width, heads, size, scalar):
    sizes = {"embedding_length": width, "attention.head_count": heads, "block_count": 2}
    sizes |= {"attention.key_length": size, "feed_forward_length": 24}
    sizes |= {"context_length": 8, "attention.layer_norm_rms_epsilon": 1e-6}
    metadata = {"general.architecture": kind} | {f"{kind}.{n}": x for n, x in sizes.items()}
    hf = _config(Path("a.gguf"), metadata, {})
    assert FAMILIES[hf["model_type"]].read(hf)["attention_scale"] == scalar**-0.5
