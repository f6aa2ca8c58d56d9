"""GGUF files: the entries of config.json from their metadata, and their tensors, dequantised.

The format is that of llama.cpp, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the
package `gguf` dequantises.
"""

import dataclasses
import functools
import importlib
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.errors import CheckpointError
from jtrain.io.gguf_header import TensorInfo, map_bytes, read_header
from jtrain.models.attention.rotary import Llama3Scaling, Rotary, frequencies
from jtrain.models.pretrained.families.entries import get, rotary_entries
from jtrain.models.pretrained.family import MOST_LAYERS, HFConfig, Supported, check_entries

GGUF = ".gguf"
BROKEN = (ValueError, IndexError, KeyError, TypeError, ArithmeticError, struct.error)
# Our families by the architecture of a file.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "block_sparse_moe.gate",
}
GEMMA_BLOCK = {
    **BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}


@dataclasses.dataclass(frozen=True)
class Dequantised:
    """A tensor of a GGUF file as float32, computed where numpy makes an array of it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    dtype: np.dtype = np.dtype(np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.read(), dtype or self.dtype)

    def then(self, change: Callable[[np.ndarray], np.ndarray], *shape: int) -> "Dequantised":
        """Return the tensor changed; of the same shape if none is given."""
        return Dequantised(shape or self.shape, lambda: change(self.read()))


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """The content of a GGUF file, with the names of Hugging Face."""

    config: HFConfig
    tensors: Mapping[str, Dequantised]


@functools.lru_cache(maxsize=1)
def _open(path: Path, changed: int) -> GGUFFile:
    del changed
    try:
        importlib.import_module("gguf")
    except ImportError:
        raise CheckpointError(
            f"{path} is a GGUF file, and the package `gguf` is not installed. Install it: pip "
            f"install 'jtrain[gguf]'"
        ) from None
    data = map_bytes(path)
    try:
        header = read_header(data)
        raw = {n: _tensor(path, n, t, data[header.end :]) for n, t in header.tensors.items()}
        config = _config(path, header.metadata, raw)
    except CheckpointError:
        raise
    except BROKEN as error:
        raise CheckpointError(
            f"{path} is not a complete GGUF file ({type(error).__name__}: {error}). "
            f"Download it again."
        ) from None
    return GGUFFile(config, _named(path, config, raw))


def read_gguf(path: Path) -> GGUFFile:
    """Read the metadata of a GGUF file and map its tensors; the newest file is cached."""
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}). Name another file."
        ) from None
    return _open(path, changed)


def _tensor(path: Path, name: str, info: TensorInfo, data: np.ndarray) -> Dequantised:
    gguf = importlib.import_module("gguf")
    kind = gguf.GGMLQuantizationType(info.kind)
    in_bytes = gguf.quants.quant_shape_to_byte_shape(info.shape, kind)
    last = info.first + int(np.prod(in_bytes, dtype=object))
    if last > len(data):
        raise ValueError(f"{name} ends at byte {last:,} of {len(data):,}")
    stored = data[info.first : last].reshape(in_bytes)

    def read() -> np.ndarray:
        try:
            return gguf.quants.dequantize(stored, kind).astype(np.float32, copy=False)
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: {name} is {kind.name}, which the package `gguf` does not dequantise. Use "
                f"a file of F16, Q8_0, Q4_0, Q4_1 or K-quants."
            ) from None

    return Dequantised(info.shape, read)


def _config(path: Path, metadata: Mapping[str, Any], raw: Mapping[str, Dequantised]) -> HFConfig:
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{path} has general.architecture={kind!r}, and of GGUF files jtrain reads "
            f"{', '.join(ARCHITECTURES)}. Use the folder with safetensors of the same model."
        )
    keys = read_keys(path, kind, metadata)
    config = {theirs: keys[name] for name, theirs in ENTRIES.items() if keys.get(name)}
    config["model_type"] = ARCHITECTURES[kind]
    # What llama.cpp takes in the place of keys that are left out; config.json has other defaults.
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config.setdefault("rope_theta", 10000.0)
    if kind == "llama" and config.get("num_local_experts"):
        config["model_type"] = "mixtral"
    embedding = raw.get("token_embd.weight")
    config["vocab_size"] = embedding.shape[0] if embedding and embedding.shape else 1
    config["tie_word_embeddings"] = "output.weight" not in raw
    if kind.startswith("gemma"):
        config["query_pre_attn_scalar"] = _query_scalar(config)
        config |= layer_windows(kind, keys)
    else:
        config.pop("sliding_window", None)  # longer than the context
    config["rope_scaling"] = _scaling(path, keys, config, raw.get("rope_freqs.weight"))
    return config


def _scaling(
    path: Path, keys: Mapping[str, Any], config: HFConfig, divisors: Dequantised | None
) -> HFConfig | None:
    """Return the scaling of the angles; without a type it is linear, as in llama.cpp."""
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0))
    linear = factor not in (0, 1) and keys.get("rope.scaling.type") != "none"
    if divisors is None or np.all(np.asarray(divisors) == 1):
        return {"rope_type": "linear", "factor": factor} if linear else None
    if linear or divisors.shape != (config["head_dim"] // 2,):
        raise CheckpointError(
            f"{path} has rope_freqs.weight of {divisors.shape} for heads of {config['head_dim']}, "
            f"and rope.scaling.factor={factor}; jtrain has one divisor for each pair of a head, "
            f"without another factor. Use the folder with safetensors of the same model."
        )
    return _llama3_scaling(path, config, np.asarray(divisors))


def _query_scalar(config: HFConfig) -> int:
    """Return the scalar of Gemma's queries, which a file does not have.

    It is the size of a head, and in the models of 27B, with heads of 128, width / heads; llama.cpp
    tells them apart by their number of layers.
    """
    if config["head_dim"] != 128:
        return config["head_dim"]
    return config["hidden_size"] // config["num_attention_heads"]


def _llama3_scaling(path: Path, config: HFConfig, factors: np.ndarray) -> HFConfig:
    """Return the scaling of Llama 3.1 or 3.2 whose divisors of the angles a file has."""
    plain = Rotary(base=config["rope_theta"])
    for factor in (8.0, 32.0):
        scaled = Rotary(base=plain.base, scaling=Llama3Scaling(factor=factor))
        rate, slower = (frequencies(one, 2 * len(factors)) for one in (plain, scaled))
        if np.allclose(rate / slower, factors, rtol=1e-3):
            return rotary_entries(scaled)["rope_scaling"]
    raise CheckpointError(
        f"{path} scales its rotary angles by rope_freqs.weight in another way than Llama 3.1 and "
        f"3.2. Use the folder with safetensors of the same model."
    )


def _named(path: Path, config: HFConfig, raw: Mapping[str, Dequantised]) -> dict[str, Dequantised]:
    gemma = config["model_type"].startswith("gemma")
    block = GEMMA_BLOCK if gemma else BLOCK
    found: dict[str, Dequantised] = {}
    for name, tensor in raw.items():
        if name == "rope_freqs.weight":
            continue
        if gemma and name.endswith("norm.weight"):  # a file has 1 + scale
            tensor = tensor.then(lambda x: x - 1)
        if config["model_type"] in {"llama", "mixtral"}:
            tensor = _unpermuted(config, name, tensor)
        stem, _, end = name.rpartition(".")
        where, _, inner = stem.partition(".")[2].partition(".")
        layer = f"model.layers.{where}"
        if inner in EXPERTS and tensor.shape[:1] == (config.get("num_local_experts"),):
            for i in range(tensor.shape[0]):
                each = tensor.then(lambda x, i=i: x[i], *tensor.shape[1:])
                found[f"{layer}.block_sparse_moe.experts.{i}.{EXPERTS[inner]}.{end}"] = each
        elif stem in TOP:
            found[f"{TOP[stem]}.{end}"] = tensor
        elif stem.startswith("blk.") and inner in block:
            found[f"{layer}.{block[inner]}.{end}"] = tensor
        else:
            found[name] = tensor  # reported as surplus
    return found


def _unpermuted(config: HFConfig, name: str, tensor: Dequantised) -> Dequantised:
    """Return queries and keys with the halves of a head as the pairs of a rotation.

    Files of the architecture llama have neighbours as pairs, as the first Llama release.
    """
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    key = heads.get(name.split(".")[-2] if name.endswith(".weight") else "")
    if key is None:
        return tensor
    count = config.get(key) or config["num_attention_heads"]

    def change(x: np.ndarray) -> np.ndarray:
        pairs = x.reshape(count, -1, 2, *x.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(x.shape)

    return tensor.then(change)


ENTRIES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base_swa": "rope_local_base_freq",
}
REQUIRED = tuple(ENTRIES)[:6]
PER_LAYER = ("head_count", "head_count_kv", "feed_forward_length")  # a number, or one a layer
HEAD_SIZES = (
    *("rope.dimension_count", "rope.dimension_count_swa"),
    *("attention.key_length_swa", "attention.value_length_swa"),
)
KEYS: Supported = {
    "attention.causal": (True,),
    "rope.scaling.type": ("none", "linear", "yarn"),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (0, -1),
    "rope.scaling.yarn_attn_factor": (1, -1),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (True,),
    "expert_gating_func": (0, 1),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
}
"""Values that are computed of the keys of an architecture that llama.cpp reads.

Any other key than these and those below is of another function, unless its value is 0 or none.
"""
# Read, without an effect on logits, or found by the shapes of the tensors.
FREE = (
    *("model_type", *tuple(ENTRIES)[:9], "rope.scaling.factor", "rope.scale_linear"),
    *("vocab_size", "pooling_type", "tensor_data_layout", "attention.value_length"),
    *("attention.layer_norm_epsilon", "expert_feed_forward_length", "rope.scaling.finetuned"),
    *(f"rope.scaling.{name}" for name in ("original_context_length", "yarn_beta_fast")),
    "rope.scaling.yarn_beta_slow",
)
GEMMA_FREE = (
    *("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"),
    *("attention.sliding_window_pattern", "rope.freq_base_swa"),
)
FREE_OF = {
    "llama": ("expert_count", "expert_used_count"),
    "gemma2": GEMMA_FREE,
    "gemma3": GEMMA_FREE,
}


def read_keys(path: Path, kind: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an architecture's keys; raise CheckpointError if one is not computed."""
    keys: dict[str, Any] = {"model_type": kind}
    supported: dict[str, Any] = dict(KEYS)
    for key, value in metadata.items():
        if key.startswith(f"{kind}."):
            name = key.removeprefix(f"{kind}.")
            value = value.tolist() if isinstance(value, np.ndarray) else value
            if isinstance(value, list) and name.endswith(PER_LAYER):
                supported[name] = (value[0],)
                value = value[0] if len(set(value)) == 1 else value
            keys[name] = value
    for name in REQUIRED:
        get(keys, name, file=f"{path}")
    width, window = keys["embedding_length"], keys.get("attention.sliding_window", 0)
    head = keys.get("attention.key_length", width // keys["attention.head_count"])
    supported |= dict.fromkeys(HEAD_SIZES, (head,))
    supported["embedding_length_out"] = (width,)
    supported["attention.scale"] = (0, head**-0.5, float(np.float32(head**-0.5)))
    if keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0)) not in (0, 1):
        supported["rope.scaling.type"] = ("none", "linear")
    free = {*FREE, *FREE_OF.get(kind, ())}
    if window >= keys["context_length"]:
        free.add("attention.sliding_window")
    if kind == "gemma2":
        supported["rope.freq_base_swa"] = (keys.get("rope.freq_base", 10000.0),)
    for name in keys.keys() - supported.keys() - free:
        if keys[name] and not (isinstance(keys[name], list) and not any(keys[name])):
            supported[name] = (0, "none")
    check_entries(keys, supported, file=f"{path}", where=f"{kind}.")
    return keys


def layer_windows(kind: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window of Gemma's layers, and which of them have it."""
    window = keys.get("attention.sliding_window", 4096 if kind == "gemma2" else 0)
    found = keys.get("attention.sliding_window_pattern", 2 if kind == "gemma2" else 6)
    layers = range(min(keys["block_count"], MOST_LAYERS))
    windowed = found if isinstance(found, list) else [(i + 1) % found for i in layers]
    kinds = ["sliding_attention" if one else "full_attention" for one in windowed]
    return {"sliding_window": window or None, "layer_types": kinds}
