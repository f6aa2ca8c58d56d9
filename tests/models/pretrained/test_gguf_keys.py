"""Keys of GGUF files are computed as llama.cpp does, or refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.errors import CheckpointError
from jtrain.models.pretrained.gguf_file import Dequantised, _config
from jtrain.models.pretrained.gguf_keys import ENTRIES, KEYS, KEYS_OF
from jtrain.models.pretrained.registry import build_model, find_family

pytest.importorskip("gguf")

PATH = Path("a.gguf")
SIZES = {
    "block_count": 6, "embedding_length": 16, "attention.head_count": 4, "context_length": 32,
    "feed_forward_length": 24, "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


def build(kind: str, keys: dict[str, Any], divisors: list[float] | None = None) -> Any:
    metadata = {"general.architecture": kind}
    metadata |= {f"{kind}.{name}": value for name, value in {**SIZES, **keys}.items()}
    raw = {} if divisors is None else {"rope_freqs.weight": np.array(divisors, np.float32)}
    raw = {name: Dequantised(x.shape, lambda x=x: x) for name, x in raw.items()}
    hf = _config(PATH, {name: x for name, x in metadata.items() if x is not ...}, raw)
    return build_model(find_family(hf, f"{PATH}"), hf)


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}, None),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0}, None),
    ],
)
def test_angles_are_scaled_as_in_llama_cpp(keys, factor):
    for kind in ("llama", "qwen2", "gemma3"):
        scaling = build(kind, keys).positions.scaling
        assert getattr(scaling, "factor", None) == factor


REFUSED = [
    ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}),
    ("llama", {"rope.scaling.type": "longrope"}),
    ("llama", {"rope.scaling.attn_factor": 1.2}),
    ("qwen3", {"rope.scaling.yarn_ext_factor": 1.0}),
    ("qwen2", {"rope.dimension_count": 2}),
    ("gemma3", {"rope.dimension_count_swa": 2}),
    ("llama", {"rope.freq_base": "1e4"}),
    ("llama", {"attention.causal": False}),
    ("qwen2", {"attention.sliding_window": 8}),
    ("llama", {"attention.scale": 1.0}),
    ("llama", {"attention.clamp_kqv": 8.0}),
    ("llama", {"logit_scale": 0.5}),
    ("llama", {"final_logit_softcapping": 30.0}),
    ("llama", {"expert_gating_func": 2, "expert_count": 4, "expert_used_count": 2}),
    ("qwen2", {"expert_count": 4}),
    ("gemma2", {"rope.freq_base_swa": 5e4}),
    ("gemma2", {"attention.sliding_window_pattern": [True, True, False, False, True, False]}),
    ("llama", {"attention.head_count_kv": np.array([4, 4, 2, 2, 4, 4])}),
    ("llama", {"a_key_of_later_years": 3}),
    ("llama", {"block_count": "6"}),
    ("llama", {"block_count": 10**9}),
    ("llama", {"embedding_length": ...}),
    ("llama", {"attention.head_count": 99}),
]


@pytest.mark.parametrize(("kind", "keys"), REFUSED)
def test_a_key_of_another_function_is_refused_by_name(kind, keys):
    with pytest.raises(CheckpointError) as error:
        build(kind, keys)
    name = next(iter(keys)).removeprefix("attention.sliding_window_pattern") or "layer_types"
    assert name in str(error.value)


PASSED = [
    ("llama", {"rope.dimension_count": 4, "attention.scale": 0.5, "vocab_size": 9}),
    ("llama", {"rope.scaling.original_context_length": 8, "pooling_type": 1}),
    ("llama", {"expert_count": 0, "use_parallel_residual": False, "attention.max_alibi_bias": 0.0}),
    ("llama", {"attention.sliding_window": 32, "rope.dimension_sections": np.zeros(4, int)}),
    ("llama", {"attention.head_count_kv": np.array([4] * 6), "tensor_data_layout": "Meta"}),
    ("gemma3", {"attention.key_length": 4, "attention.sliding_window": 0}),
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


WILD = (None, True, -1, 0, 1.5, 2**64 - 1, float("inf"), float("nan"), "", "x", np.zeros(0), [1, 2])


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3", marks=pytest.mark.thorough)])
def test_a_wild_value_is_refused_by_its_key(kind):
    for name in {**KEYS, **KEYS_OF[kind], "attention.scale": (), "rope.dimension_count": ()}:
        named = {name, ENTRIES.get(name), "layer_types", "contradicts itself"} - {None}
        for value in WILD:
            text = ""
            try:
                build(kind, {name: value})
            except CheckpointError as error:
                text = str(error)
            assert not text or any(one in text for one in named), (name, value, text)


def test_divisors_of_the_angles():
    assert build("llama", {}, [1.0, 1.0]) == build("llama", {})
    for keys, divisors in (({"rope.scaling.factor": 2.0}, [1.0, 8.0]), ({}, [1.0, 8.0, 8.0])):
        with pytest.raises(CheckpointError, match=r"rope_freqs.weight.*rope.scaling.factor="):
            build("llama", keys, divisors)
