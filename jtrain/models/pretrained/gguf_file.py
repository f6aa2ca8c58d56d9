"""GGUF files: the entries of config.json from their metadata, and their tensors, dequantised.

The format is that of llama.cpp, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, read
by the package `gguf`, which also dequantises.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.errors import CheckpointError
from jtrain.models.attention.positions import Llama3Scaling, Rotary
from jtrain.models.attention.rotary import frequencies
from jtrain.models.pretrained.family import HFConfig

GGUF = ".gguf"
BROKEN = (ValueError, IndexError, KeyError, TypeError)  # what the package raises
# Our families by the architecture of a file.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
ENTRIES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
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
    reader = _reader(path)
    try:
        # Lists, of a token each, take seconds.
        metadata = {n: one.contents() for n, one in reader.fields.items() if len(one.types) <= 1}
        raw = {tensor.name: _tensor(path, tensor) for tensor in reader.tensors}
    except BROKEN as error:
        raise _broken_error(path, error) from None
    config = _config(path, metadata, raw)
    return GGUFFile(config, _named(path, config, raw))


def read_gguf(path: Path) -> GGUFFile:
    """Read the metadata of a GGUF file and map its tensors; the newest file is cached.

    Raises:
        CheckpointError: if the file is missing, broken or of an architecture that is not known, or
            the package `gguf` is not installed.
    """
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}). Name another file."
        ) from None
    return _open(path, changed)


def _reader(path: Path) -> Any:
    try:
        gguf = importlib.import_module("gguf")
    except ImportError:
        raise CheckpointError(
            f"{path} is a GGUF file, and the package `gguf` is not installed. Install it: pip "
            f"install 'jtrain[gguf]'"
        ) from None
    try:
        return gguf.GGUFReader(path)
    except (*BROKEN, OSError, OverflowError, MemoryError) as error:
        raise _broken_error(path, error) from None


def _broken_error(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is no complete GGUF file ({type(error).__name__}: {error}). Download it again."
    )


def _tensor(path: Path, tensor: Any) -> Dequantised:
    dequantize = importlib.import_module("gguf.quants").dequantize

    def read() -> np.ndarray:
        try:
            return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: {tensor.name} is {tensor.tensor_type.name}, which the package `gguf` "
                f"does not dequantise. Use a file of F16, Q8_0, Q4_0, Q4_1 or K-quants."
            ) from None

    return Dequantised(tuple(int(n) for n in reversed(tensor.shape)), read)


def _config(path: Path, metadata: Mapping[str, Any], raw: Mapping[str, Dequantised]) -> HFConfig:
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{path} has general.architecture={kind!r}, and of GGUF files jtrain reads "
            f"{', '.join(ARCHITECTURES)}. Use the folder with safetensors of the same model."
        )
    entries = {theirs: metadata.get(f"{kind}.{name}") for name, theirs in ENTRIES.items()}
    config = {theirs: value for theirs, value in entries.items() if value is not None}
    config["model_type"] = ARCHITECTURES[kind]
    if kind == "llama" and config.get("num_local_experts"):
        config["model_type"] = "mixtral"
        config.setdefault("rope_theta", 10000.0)  # that of llama.cpp, and not of config.json
    config["vocab_size"] = raw["token_embd.weight"].shape[0] if "token_embd.weight" in raw else 0
    config["tie_word_embeddings"] = "output.weight" not in raw
    if kind.startswith("gemma") and "head_dim" in config:
        config["query_pre_attn_scalar"] = _query_scalar(config)
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "linear":
        factor = metadata[f"{kind}.rope.scaling.factor"]
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif scaling != "none":
        config["rope_scaling"] = {"rope_type": scaling}  # refused by the family
    if "rope_freqs.weight" in raw:
        config["rope_scaling"] = _llama3_scaling(path, config, np.asarray(raw["rope_freqs.weight"]))
    return config


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
    base = config.get("rope_theta", 10000.0)
    for factor in (8.0, 32.0):
        scaling = Llama3Scaling(factor=factor)
        rate = frequencies(Rotary(base=base), 2 * len(factors))
        scaled = frequencies(Rotary(base=base, scaling=scaling), 2 * len(factors))
        if np.allclose(rate / scaled, factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.context,
            }
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
        if inner in EXPERTS:
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
