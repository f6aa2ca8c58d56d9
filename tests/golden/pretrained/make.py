"""Write the goldens beside this file: outputs of `transformers` and of timm for small models.

Run from the folder of the repository, with torch, transformers and timm installed:

    PYTHONPATH=tests python tests/golden/pretrained/make.py [NAME ...]

Weights are drawn by name (tests/published_models.py), so that a golden is the config, the shapes
and the outputs: text that a reader can compare.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import transformers as T  # noqa: N812
from published_models import GOLDEN, draw_pixels, tensors_of, write_model
from safetensors import safe_open

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "max_position_embeddings": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA = {**SIZES, "num_hidden_layers": 3, "head_dim": 8, "query_pre_attn_scalar": 24}
GEMMA["sliding_window"] = 4
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
BERT = {key: x for key, x in SIZES.items() if key != "num_key_value_heads"}
VIT = {
    "image_size": 8,
    "patch_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_labels": 5,
}
RESNET = {"hidden_sizes": [8, 16], "depths": [2, 1], "num_labels": 5}

CAUSAL = {
    "llama": ("Llama", T.LlamaConfig(**SIZES, rms_norm_eps=1e-5)),
    "llama31": ("Llama", T.LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "llama_bias": ("Llama", T.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=8)),
    "mistral": ("Mistral", T.MistralConfig(**SIZES, sliding_window=4)),
    "mixtral": ("Mixtral", T.MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen2": ("Qwen2", T.Qwen2Config(**SIZES)),
    "qwen3": ("Qwen3", T.Qwen3Config(**SIZES, head_dim=8)),
    "gemma2": ("Gemma2", T.Gemma2Config(**GEMMA)),
    "gemma3": (
        "Gemma3",
        T.Gemma3TextConfig(
            **GEMMA,
            rope_parameters=GEMMA3_ROPE,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
    ),
    "gpt2": (
        "GPT2",
        T.GPT2Config(
            vocab_size=31,
            n_positions=32,
            n_layer=2,
            n_head=4,
            n_embd=16,
            bos_token_id=0,
            eos_token_id=0,
        ),
    ),
}
OTHERS = {
    "bert": (T.BertModel, T.BertConfig(**BERT)),
    "vit": (T.ViTForImageClassification, T.ViTConfig(**VIT)),
    "resnet": (
        T.ResNetForImageClassification,
        T.ResNetConfig(
            **RESNET,
            embedding_size=8,
            layer_type="basic",
        ),
    ),
    "resnet_bottleneck": (
        T.ResNetForImageClassification,
        T.ResNetConfig(
            **RESNET,
            embedding_size=2,
        ),
    ),
}
# The smallest of each family, and the side of the images.
TIMM = {
    "timm_resnet": ("resnet18", 32),
    "timm_vit": ("vit_tiny_patch16_224", 224),
    "efficientnet_lite": ("tf_efficientnet_lite0", 64),
}


def main(chosen: list[str]) -> None:
    classes = {name: (getattr(T, CAUSES[kind]), config) for name, (kind, config) in CAUSAL.items()}
    for name, (cls, config) in {**classes, **OTHERS}.items():
        if not chosen or name in chosen:
            write(name, cls, config)
    for name, (architecture, side) in TIMM.items():
        if not chosen or name in chosen:
            write_timm(name, architecture, side)


CAUSES = {
    kind: f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    for kind, _ in CAUSAL.values()
}


def write(name: str, cls: Any, config: Any) -> None:
    config._attn_implementation = "eager"  # others leave out soft caps
    with tempfile.TemporaryDirectory() as folder:
        cls(config).save_pretrained(folder)
        golden: dict[str, Any] = {"config": json.loads((Path(folder) / "config.json").read_text())}
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        golden["tensors"] = dict(sorted(shapes.items()))
        golden["config"].pop("transformers_version")
        write_model(Path(folder), golden)
        net = cls.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        golden |= outputs(name, net)
    save(name, golden, f"transformers {T.__version__}")


def write_timm(name: str, architecture: str, side: int) -> None:
    net = timm.create_model(architecture, num_classes=5).eval()
    tensors = {key: list(x.shape) for key, x in net.state_dict().items()}
    cfg = {"input_size": [3, side, side], "mean": net.default_cfg["mean"]}
    cfg["std"] = net.default_cfg["std"]
    config = {"architecture": architecture, "num_classes": 5, "pretrained_cfg": cfg}
    golden: dict[str, Any] = {"config": config, "tensors": dict(sorted(tensors.items()))}
    arrays = tensors_of(golden)
    net.load_state_dict({key: torch.from_numpy(np.array(x)) for key, x in arrays.items()})
    golden |= image_outputs(net, side)
    save(name, golden, f"timm {timm.__version__}")


def save(name: str, golden: dict[str, Any], made_by: str) -> None:
    text = json.dumps(golden | {"made_by": made_by}, indent=1)
    (GOLDEN / f"{name}.json").write_text(compact(text) + "\n")
    print(name, os.path.getsize(GOLDEN / f"{name}.json"))


def outputs(name: str, net: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    with torch.no_grad():
        if name.startswith(("vit", "resnet")):
            return image_outputs(lambda x: net(x).logits, 8 if name == "vit" else 32)
        tokens = rng.integers(0, 31, (2, 12))
        if name == "bert":
            visible = np.ones((2, 12), int)
            visible[1, 7:] = 0
            inputs = {"input_ids": tokens, "attention_mask": visible, "token_type_ids": tokens % 2}
            found = net(**{key: torch.from_numpy(x) for key, x in inputs.items()})
            return {
                "tokens": tokens.tolist(),
                "visible": visible.tolist(),
                "outputs": rounded(found.last_hidden_state),
                "pooled": rounded(found.pooler_output),
            }
        return {"tokens": tokens.tolist(), "outputs": rounded(net(torch.from_numpy(tokens)).logits)}


def image_outputs(net: Any, side: int) -> dict[str, Any]:
    pixels = draw_pixels((2, 3, side, side))
    with torch.no_grad():
        found = net(torch.from_numpy(pixels))
    return {"pixels": list(pixels.shape), "outputs": rounded(found)}


def rounded(x: torch.Tensor) -> Any:
    return np.vectorize(lambda number: float(f"{number:.7g}"))(x.double().numpy()).tolist()


def compact(text: str) -> str:
    """Put the innermost lists of numbers on one line each."""
    lines, inside = [], []
    for line in text.splitlines():
        if inside:
            inside.append(line.strip())
            if line.strip().startswith("]"):
                lines.append(" ".join(inside).replace("[ ", "[").replace(" ]", "]"))
                inside = []
            elif line.strip().endswith("["):
                lines += [inside[0], *inside[1:-1]]
                inside = [line]
        elif line.rstrip().endswith("["):
            inside = [line]
        else:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
