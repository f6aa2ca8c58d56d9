"""BERT and its kin: MiniLM and other sentence encoders."""

from collections.abc import Iterator
from typing import Any

from jtrain.models.pretrained import checks
from jtrain.models.pretrained.families.entries import COMMON, TANH_GELU, size_entries, sizes
from jtrain.models.pretrained.families.llama import linear_leaves
from jtrain.models.pretrained.family import Family, HFConfig, Leaf, Values, layer_norm_leaves
from jtrain.models.pretrained.transforms import by_group, linear

SIZES = {
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "hidden": "intermediate_size",
    "epsilon": "layer_norm_eps",
}
EXACT = dict.fromkeys(("gelu", "gelu_python"), "gelu_exact")
ACTIVATIONS = EXACT | dict.fromkeys(TANH_GELU, "gelu")
ENTRIES: checks.Supported = {
    **COMMON,
    **size_entries(SIZES),
    "hidden_act": tuple(ACTIVATIONS),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_pooling_layer": (checks.FLAG,),
}


def _values(hf: HFConfig) -> Values:
    activation = ACTIVATIONS[hf.get("hidden_act", "gelu")]
    pooler = hf.get("add_pooling_layer", hf.get("architectures") in (None, ["BertModel"]))
    return {**sizes(hf, SIZES), "activation": activation, "pooler": pooler}


def _entries(model: Any) -> Values:
    fields = {ours: getattr(model, ours) for ours in SIZES} | {"hidden": model.size_of_hidden}
    return {
        **{theirs: fields[ours] for ours, theirs in SIZES.items()},
        "hidden_act": "gelu" if model.activation == "gelu_exact" else "gelu_new",
        "position_embedding_type": "absolute",
        "add_pooling_layer": model.pooler,
    }


def _leaves(model: Any) -> Iterator[Leaf]:
    width, hidden = model.width, model.size_of_hidden
    grouped = by_group(model.heads, model.heads)
    for ours, theirs in {"tokens": "word", "positions": "position", "types": "token_type"}.items():
        yield Leaf(ours, (f"embeddings.{theirs}_embeddings.weight",))
    yield from layer_norm_leaves("norm", "embeddings.LayerNorm")
    for i in range(model.layers):
        ours, theirs = f"blocks/{i}", f"encoder.layer.{i}"
        names = tuple(f"{theirs}.attention.self.{name}" for name in ("query", "key", "value"))
        kernels, biases = (tuple(f"{n}.{end}" for n in names) for end in ("weight", "bias"))
        yield Leaf(f"{ours}/qkv/kernel", kernels, grouped.then(linear(width, 3 * width)))
        yield Leaf(f"{ours}/qkv/bias", biases, grouped)
        out = f"{theirs}.attention.output"
        yield from linear_leaves(f"{ours}/out", f"{out}.dense", width, width)
        yield from layer_norm_leaves(f"{ours}/norm_attention", f"{out}.LayerNorm")
        yield from linear_leaves(f"{ours}/up", f"{theirs}.intermediate.dense", width, hidden)
        yield from linear_leaves(f"{ours}/down", f"{theirs}.output.dense", hidden, width)
        yield from layer_norm_leaves(f"{ours}/norm_mlp", f"{theirs}.output.LayerNorm")
    if model.pooler:
        yield from linear_leaves("pooler", "pooler.dense", width, width)


def _surplus(model: Any) -> tuple[str, ...]:
    """Return the heads of pretraining, and the pooler where the model has none."""
    return ("cls.",) if model.pooler else ("cls.", "pooler.")


BERT = Family(
    name="bert",
    architecture="BertModel",
    kind="encoder",
    entries=ENTRIES,
    values=_values,
    hf=_entries,
    leaves=_leaves,
    prefix="bert.",
    ignored=("embeddings.position_ids",),
    surplus=_surplus,
    rename=lambda model, name: name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    ),
)
