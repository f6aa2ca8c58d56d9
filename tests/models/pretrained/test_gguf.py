"""GGUF files, written by the package `gguf`, are read as the folder of the same model."""

from pathlib import Path
from typing import Any

import numpy as np
import published_models as published
import pytest

from jtrain.errors import CheckpointError
from jtrain.models.pretrained.families import FAMILIES, build_model, find_family
from jtrain.models.pretrained.gguf import Dequantised, _config, read_gguf
from jtrain.models.pretrained.source import CLASSES, PretrainedWeights, vocabulary_of

gguf = pytest.importorskip("gguf")

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def their_name(name: str) -> str:
    for old, new in {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        **NAMES,
    }.items():
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


@pytest.mark.thorough
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
    for keep in (len(complete) - 64, 10):
        path.write_bytes(complete[:keep])
        with pytest.raises(
            CheckpointError, match=r"is not a complete GGUF file .*Download it again"
        ):
            PretrainedWeights(path)
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


pytest.importorskip("gguf")

PATH = Path("a.gguf")
SIZES = {
    "block_count": 6,
    "embedding_length": 16,
    "attention.head_count": 4,
    "context_length": 32,
    "feed_forward_length": 24,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def build(kind: str, keys: dict[str, Any], divisors: list[float] | None = None) -> Any:
    metadata = {"general.architecture": kind}
    metadata |= {f"{kind}.{name}": value for name, value in {**SIZES, **keys}.items()}
    raw = {} if divisors is None else {"rope_freqs.weight": np.array(divisors, np.float32)}
    raw = {name: Dequantised(x.shape, lambda x=x: x) for name, x in raw.items()}
    hf = _config(PATH, {name: x for name, x in metadata.items() if x is not ...}, raw)
    family = find_family(hf, f"{PATH}")
    return build_model(CLASSES[family.kind], family, hf)


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}, None),
    ],
)
def test_angles_are_scaled_as_in_llama_cpp(keys, factor):
    for kind in ("llama", "qwen2", "gemma3"):
        scaling = build(kind, keys).positions.scaling
        assert getattr(scaling, "factor", None) == factor


REFUSED = [
    ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}),
    ("qwen2", {"rope.dimension_count": 2}),
    ("llama", {"attention.causal": False}),
    ("llama", {"expert_gating_func": 2, "expert_count": 4, "expert_used_count": 2}),
    ("gemma2", {"attention.sliding_window_pattern": [True, True, False, False, True, False]}),
    ("llama", {"attention.head_count_kv": np.array([4, 4, 2, 2, 4, 4])}),
    ("llama", {"a_key_of_later_years": 3}),
]


@pytest.mark.parametrize(("kind", "keys"), REFUSED)
def test_a_key_of_another_function_is_refused_by_name(kind, keys):
    with pytest.raises(CheckpointError) as error:
        build(kind, keys)
    name = next(iter(keys)).removeprefix("attention.sliding_window_pattern") or "layer_types"
    assert name in str(error.value)


PASSED = [
    ("llama", {"rope.dimension_count": 4, "attention.scale": 0.5, "vocab_size": 9}),
    ("llama", {"attention.sliding_window": 32, "rope.dimension_sections": np.zeros(4, int)}),
]


@pytest.mark.parametrize(("kind", "keys"), PASSED)
def test_a_key_without_an_effect_passes(kind, keys):
    assert build(kind, keys) == build(kind, {})


def test_keys_that_are_left_out_have_the_defaults_of_llama_cpp():
    gemma = build("gemma3", {})  # in config.json: base 1e6, window 4096, 4 kv heads of 256
    assert (gemma.positions.base, gemma.window, gemma.kv_heads, gemma.head_size) == (
        1e4,
        None,
        4,
        4,
    )
    assert build("qwen3", {}).head_size == 4
    assert build("gemma2", {}).window == 4096
    pattern = {"attention.sliding_window": 8, "attention.sliding_window_pattern": 3}
    assert build("gemma3", pattern).global_every == 3
    listed = {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False] * 3}
    assert build("gemma3", listed).global_every == 2
    assert build("gemma3", {**listed, "rope.freq_base_swa": 5e3}).positions.local_base == 5e3


def test_divisors_of_the_angles():
    assert build("llama", {}, [1.0, 1.0]) == build("llama", {})
    for keys, divisors in (({"rope.scaling.factor": 2.0}, [1.0, 8.0]), ({}, [1.0, 8.0, 8.0])):
        with pytest.raises(CheckpointError, match=r"rope_freqs.weight.*rope.scaling.factor="):
            build("llama", keys, divisors)
