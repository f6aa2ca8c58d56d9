"""The logits of Hugging Face's models, for random weights at reduced width and depth.

The comparison needs torch and transformers: `pip install 'jtrain[transformers]'`, and `-m slow`.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from comparison import assert_close

from jtrain.core.pytree import named_leaves
from jtrain.models.experts.experts import Dropless
from jtrain.models.presets.from_hf import gpt2_from_hf, llama_from_hf, mixtral_from_hf
from jtrain.models.transformer import Transformer

EXPERTS = Dropless(count=4)
TOKENS = np.random.default_rng(0).integers(0, 97, (2, 40)).astype(np.int32)
SMALL: dict[str, Any] = {"vocab": 97, "context": 64, "layers": 3, "heads": 4, "width": 32}
LINEAR = {"kind": "rotary", "scaling": {"kind": "linear", "factor": 4.0}}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "low": 1.0, "high": 4.0, "context": 16}
THEIR_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

# Ours, and what Hugging Face's config calls the same.
LLAMAS = {
    "llama2": ({}, {}),
    "grouped": ({"kv_heads": 2}, {"num_key_value_heads": 2}),
    "tied, one group": (
        {"kv_heads": 1, "tied": True},
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "linear scaling": (
        {"positions": LINEAR},
        {"rope": {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama3 scaling, base": (
        {"kv_heads": 2, "positions": {"kind": "rotary", "base": 500.0, "scaling": LLAMA3}},
        {"num_key_value_heads": 2, "theta": 500.0, "rope": THEIR_LLAMA3},
    ),
    "wide heads": ({"head_size": 16}, {"head_dim": 16}),
    "stacked layers": ({"scan": True}, {}),
}


def logits_of(values: Transformer, params) -> np.ndarray:
    return jax.jit(values.build().apply, static_argnames="train")(params, {}, TOKENS)[0]


def weights_of(net) -> dict[str, np.ndarray]:
    return {name: x.detach().numpy() for name, x in net.state_dict().items()}


def theirs(net):
    """Their logits, after every weight was drawn anew: zeros and ones would hide a mistake."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        return net.eval()(torch.from_numpy(TOKENS).long()).logits.numpy()


def agree(got, want) -> None:
    assert np.abs(want).max() > 1
    assert_close(got, want, 1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [{}, {"scan": True}], ids=str)
def test_gpt2_gives_the_logits_of_transformers(settings):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 97, "n_positions": 64, "n_layer": 3, "n_head": 4, "n_embd": 32}
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    expected = theirs(net)
    values = Transformer(preset="gpt2", **SMALL, **settings)
    agree(logits_of(values, gpt2_from_hf(values, weights_of(net))), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LLAMAS)
def test_llama_gives_the_logits_of_transformers(name: str):
    transformers = pytest.importorskip("transformers")
    ours, said = LLAMAS[name]
    sizes = {
        "vocab_size": 97, "max_position_embeddings": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    said = dict(said)
    rope = {"rope_theta": said.pop("theta", 10000.0), "rope_type": "default"} | said.pop("rope", {})
    net = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, rope_parameters=rope, **said)
    )
    expected = theirs(net)
    values = Transformer(preset="llama2-7b", hidden=48, **(SMALL | ours))
    agree(logits_of(values, llama_from_hf(values, weights_of(net))), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [{}, {"scan": True}], ids=str)
def test_mixtral_gives_the_logits_of_transformers(settings, tmp_path):
    transformers = pytest.importorskip("transformers")
    net = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=97, max_position_embeddings=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, hidden_size=32, intermediate_size=48, num_local_experts=4,
        )
    )  # fmt: skip
    expected = theirs(net)
    values = Transformer(
        preset="mixtral-8x7b", **SMALL, kv_heads=2, hidden=48, experts=EXPERTS, **settings
    )
    agree(logits_of(values, mixtral_from_hf(values, weights_of(net))), expected)
    net.save_pretrained(tmp_path)
    published = pytest.importorskip("safetensors.numpy").load_file(tmp_path / "model.safetensors")
    assert any("block_sparse_moe.experts.3.w2" in name for name in published)
    agree(logits_of(values, mixtral_from_hf(values, published)), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mixtral_has_the_sizes_of_transformers():
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.MixtralConfig(), Transformer(preset="mixtral-8x7b")
    same = {
        "vocab_size": ours.vocab, "num_hidden_layers": ours.layers, "hidden_size": ours.width,
        "num_attention_heads": ours.heads, "num_key_value_heads": ours.groups,
        "intermediate_size": ours.size_of_hidden, "rms_norm_eps": ours.epsilon,
        "num_local_experts": ours.experts.count, "num_experts_per_tok": ours.experts.top_k,
        "sliding_window": ours.window, "tie_word_embeddings": ours.tied,
    }  # fmt: skip
    assert {name: getattr(theirs, name) for name in same} == same
    assert theirs.rope_parameters["rope_theta"] == ours.positions.base


def test_every_weight_of_every_expert_lands_once_and_whole():
    values = dataclasses.replace(TINY, experts=EXPERTS)
    layer = "model.layers.{}.block_sparse_moe"
    weights = {name: x for name, x in named(TINY).items() if ".mlp." not in name}
    draw = np.random.default_rng(1).standard_normal
    for i in range(2):
        moe = layer.format(i)
        weights[f"{moe}.gate.weight"] = draw((4, 16))
        for expert in range(4):
            for name, shape in {"w1": (24, 16), "w2": (16, 24), "w3": (24, 16)}.items():
                weights[f"{moe}.experts.{expert}.{name}.weight"] = draw(shape)
    mixture = mixtral_from_hf(values, weights)["blocks"]["1"]["mixture"]
    for ours, w in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        expected = weights[f"{layer.format(1)}.experts.2.{w}.weight"].T
        np.testing.assert_array_equal(mixture[ours][2], expected)
    fused = {name: x for name, x in weights.items() if "block_sparse_moe" not in name}
    for i in range(2):
        of = f"{layer.format(i)}.experts"
        each = lambda w, of=of: [weights[f"{of}.{n}.{w}.weight"] for n in range(4)]
        mlp = f"model.layers.{i}.mlp"
        fused[f"{mlp}.gate.weight"] = weights[f"{layer.format(i)}.gate.weight"]
        both = [np.concatenate(pair) for pair in zip(each("w1"), each("w3"), strict=True)]
        fused[f"{mlp}.experts.gate_up_proj"] = np.stack(both)
        fused[f"{mlp}.experts.down_proj"] = np.stack(each("w2"))
    again = mixtral_from_hf(values, fused)["blocks"]["1"]["mixture"]
    jax.tree.map(np.testing.assert_array_equal, again, mixture)
    del weights[f"{layer.format(0)}.experts.3.w1.weight"]
    with pytest.raises(ValueError, match=r"block_sparse_moe.experts.3.w1.weight: missing"):
        mixtral_from_hf(values, weights)


def named(values: Transformer) -> dict[str, np.ndarray]:
    """Make weights with Hugging Face's names and shapes, all numbers distinct."""
    width, hidden, vocab = values.width, values.hidden, values.vocab
    heads, groups = (n * values.size_of_head for n in (values.heads, values.groups))
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    for i in range(values.layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (heads, width),
            f"{layer}.self_attn.k_proj.weight": (groups, width),
            f"{layer}.self_attn.v_proj.weight": (groups, width),
            f"{layer}.self_attn.o_proj.weight": (width, heads),
            f"{layer}.mlp.gate_proj.weight": (hidden, width),
            f"{layer}.mlp.up_proj.weight": (hidden, width),
            f"{layer}.mlp.down_proj.weight": (width, hidden),
            f"{layer}.input_layernorm.weight": (width,),
            f"{layer}.post_attention_layernorm.weight": (width,),
        }
    draw = np.random.default_rng(0)
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


TINY = Transformer(
    preset="smollm2-135m", vocab=11, layers=2, heads=4, kv_heads=2, width=16, hidden=24
)


def test_every_weight_lands_once_and_whole():
    weights = named(TINY)
    params = llama_from_hf(TINY, weights)
    like = jax.eval_shape(TINY.build().init, jax.random.key(0))[0]
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, like)
    total = sum(np.abs(array, dtype=np.float64).sum() for array in weights.values())
    ours = sum(np.abs(array, dtype=np.float64).sum() for array in named_leaves(params).values())
    assert ours == pytest.approx(total, rel=1e-9)
    key = params["blocks"]["1"]["qkv"]["kernel"].reshape(16, 2, 4, 4)[
        :, 1, 2
    ]  # of the second group
    np.testing.assert_array_equal(key, weights["model.layers.1.self_attn.k_proj.weight"][4:].T)


def test_weights_of_another_model_are_told_all_at_once_and_the_right_ones_fit():
    weights = named(TINY)
    del weights["model.norm.weight"]
    weights["model.layers.0.mlp.up_proj.weight"] = np.zeros((20, 16), np.float32)
    weights["model.layers.7.mlp.up_proj.weight"] = np.zeros((24, 16), np.float32)
    with pytest.raises(ValueError, match="not those of this transformer") as told:
        llama_from_hf(TINY, weights)
    for words in (
        "norm.weight: missing",
        "layers.0.mlp.up_proj.weight: (20, 16) becomes (16, 20), not (16, 24) as blocks/0/up/",
        "layers.7.mlp.up_proj.weight: unused",
        "Set the values of the model that was trained, for example model.preset=",
    ):
        assert words in str(told.value)
    assert llama_from_hf(TINY, named(TINY))
