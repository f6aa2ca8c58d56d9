"""Conversion of Hugging Face weights to the parameters of a Transformer.

Arrays are numpy's, `{name: x.numpy() for name, x in net.state_dict().items()}` of a
GPT2LMHeadModel, a LlamaForCausalLM or a MixtralForCausalLM, or the contents of
their safetensors file; no torch is needed here.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from jtrain.core.pytree import named_leaves
from jtrain.core.types import Params
from jtrain.errors import CheckpointError
from jtrain.models.layers.block_stack import stack_layers, unstack_layers
from jtrain.models.transformer import Transformer

Weights: TypeAlias = Mapping[str, np.ndarray]

# Buffers that hold no weight: causal masks, and the angles of rotary positions.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class LeafMapping(NamedTuple):
    """A parameter, the published weights that it is made from, and the conversion."""

    ours: str
    theirs: tuple[str, ...]
    change: Callable[..., np.ndarray]


def gpt2_from_hf(values: Transformer, weights: Weights) -> Params:
    """Return the parameters of a transformer like GPT-2: learned positions, LayerNorm, GELU.

    Raises:
        CheckpointError: with every weight that is missing, unused or of another shape.
    """
    return _fill(values, list(_gpt2(values)), _strip_prefix("transformer.", weights))


def llama_from_hf(values: Transformer, weights: Weights) -> Params:
    """Return the parameters of a transformer like Llama (rotary, RMSNorm, SwiGLU, no bias).

    Raises:
        CheckpointError: with every weight that is missing, unused or of another shape.
    """
    return _fill(values, list(_llama(values, _mlp)), _strip_prefix("model.", weights))


def mixtral_from_hf(values: Transformer, weights: Weights) -> Params:
    """Return the parameters of a transformer like Mixtral: Llama with a mixture of experts.

    Names are those of published files (`block_sparse_moe`), or those of transformers 5 in memory.

    Raises:
        CheckpointError: with every weight that is missing, unused or of another shape.
    """
    fused = any(name.endswith(".experts.gate_up_proj") for name in weights)
    mlp = _experts_fused if fused else functools.partial(_experts, values)
    return _fill(values, list(_llama(values, mlp)), _strip_prefix("model.", weights))


def _gpt2(values: Transformer) -> Iterator[LeafMapping]:
    # Published columns are query, key and value, then heads; ours are heads first.
    by_head = lambda x: _qkv(values, *np.split(x, 3, axis=-1))
    yield LeafMapping("tokens", ("wte.weight",), _same)
    yield LeafMapping("positions", ("wpe.weight",), _same)
    for i in range(values.layers):
        ours, theirs = f"blocks/{i}", f"h.{i}"
        yield LeafMapping(f"{ours}/qkv/kernel", (f"{theirs}.attn.c_attn.weight",), by_head)
        yield LeafMapping(f"{ours}/qkv/bias", (f"{theirs}.attn.c_attn.bias",), by_head)
        for our, their in (("out", "attn.c_proj"), ("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
            yield LeafMapping(f"{ours}/{our}/kernel", (f"{theirs}.{their}.weight",), _kernel)
            yield LeafMapping(f"{ours}/{our}/bias", (f"{theirs}.{their}.bias",), _same)
        yield from _norm(f"{ours}/norm_attention", f"{theirs}.ln_1")
        yield from _norm(f"{ours}/norm_mlp", f"{theirs}.ln_2")
    yield from _norm("norm", "ln_f")
    if not values.tied:
        yield LeafMapping("head", ("lm_head.weight",), _same)


def _llama(
    values: Transformer, mlp: Callable[[str, str], Iterator[LeafMapping]]
) -> Iterator[LeafMapping]:
    yield LeafMapping("tokens", ("embed_tokens.weight",), _same)
    for i in range(values.layers):
        ours, theirs = f"blocks/{i}", f"layers.{i}"
        qkv = tuple(f"{theirs}.self_attn.{name}_proj.weight" for name in "qkv")
        grouped = lambda q, k, v: _kernel(_qkv(values, q.T, k.T, v.T))
        yield LeafMapping(f"{ours}/qkv/kernel", qkv, grouped)
        yield LeafMapping(
            f"{ours}/out/kernel", (f"{theirs}.self_attn.o_proj.weight",), _transposed_kernel
        )
        yield from mlp(ours, theirs)
        first, second = f"{theirs}.input_layernorm", f"{theirs}.post_attention_layernorm"
        yield LeafMapping(f"{ours}/norm_attention/scale", (f"{first}.weight",), _same)
        yield LeafMapping(f"{ours}/norm_mlp/scale", (f"{second}.weight",), _same)
    yield LeafMapping("norm/scale", ("norm.weight",), _same)
    if not values.tied:
        yield LeafMapping("head", ("lm_head.weight",), _same)


def _mlp(ours: str, theirs: str) -> Iterator[LeafMapping]:
    for name in ("gate", "up", "down"):
        yield LeafMapping(
            f"{ours}/{name}/kernel", (f"{theirs}.mlp.{name}_proj.weight",), _transposed_kernel
        )


def _experts(values: Transformer, ours: str, theirs: str) -> Iterator[LeafMapping]:
    """Yield the sources of experts published one by one: w1 is gate, w3 up, w2 down."""
    mixture, theirs = f"{ours}/mixture", f"{theirs}.block_sparse_moe"
    experts = range(getattr(values.experts, "count", 0))
    stacked = lambda *each: np.stack([x.T for x in each])
    yield LeafMapping(f"{mixture}/router", (f"{theirs}.gate.weight",), np.transpose)
    for our, their in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        names = tuple(f"{theirs}.experts.{i}.{their}.weight" for i in experts)
        yield LeafMapping(f"{mixture}/{our}", names, stacked)


def _experts_fused(ours: str, theirs: str) -> Iterator[LeafMapping]:
    """Yield the sources of experts published together, e o i, with gate before up."""
    mixture, experts = f"{ours}/mixture", f"{theirs}.mlp.experts"
    half = lambda x, part: np.split(x.swapaxes(1, 2), 2, axis=-1)[part]
    both = (f"{experts}.gate_up_proj",)
    yield LeafMapping(f"{mixture}/router", (f"{theirs}.mlp.gate.weight",), np.transpose)
    yield LeafMapping(f"{mixture}/gate", both, lambda x: half(x, 0))
    yield LeafMapping(f"{mixture}/up", both, lambda x: half(x, 1))
    yield LeafMapping(f"{mixture}/down", (f"{experts}.down_proj",), lambda x: x.swapaxes(1, 2))


def _norm(ours: str, theirs: str) -> Iterator[LeafMapping]:
    yield LeafMapping(f"{ours}/scale", (f"{theirs}.weight",), _same)
    yield LeafMapping(f"{ours}/bias", (f"{theirs}.bias",), _same)


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _kernel(x: np.ndarray) -> np.ndarray:  # i o
    """Return a kernel in the layout of `jtrain.models.layers.linear`: wide dim last."""
    return x if x.shape[1] >= x.shape[0] else x.T


def _transposed_kernel(x: np.ndarray) -> np.ndarray:  # o i
    return _kernel(x.T)


def _qkv(values: Transformer, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Join columns of queries, keys and values group by group: queries, key, value."""
    split = lambda x: x.reshape(*x.shape[:-1], values.groups, -1, values.size_of_head)
    together = np.concatenate([split(q), split(k), split(v)], axis=-2)
    return together.reshape(*q.shape[:-1], -1)


def _strip_prefix(prefix: str, weights: Weights) -> Weights:
    """Return the weights with names inside the model, without buffers."""
    return {
        name.removeprefix(prefix): np.asarray(array)
        for name, array in weights.items()
        if not name.endswith(BUFFERS)
    }


def _fill(values: Transformer, sources: list[LeafMapping], weights: Weights) -> Params:
    """Return the tree of the model's parameters with the arrays of `weights`."""
    like = jax.eval_shape(values.build().init, jax.random.key(0))[0]
    like = jax.eval_shape(unstack_layers, like) if values.scan else like
    shapes = {name: leaf.shape for name, leaf in named_leaves(like).items()}
    found: dict[str, np.ndarray] = {}
    used = _used_names(values, sources)
    wrong = [f"{name}: unused" for name in weights if name not in used]
    for ours, theirs, change in sources:
        missing = [f"{name}: missing" for name in theirs if name not in weights]
        wrong += missing
        if ours not in shapes:
            wrong.append(f"{', '.join(theirs)}: the model has no {ours}")
        elif not missing:
            found[ours], words = _convert(change, [weights[name] for name in theirs], shapes[ours])
            wrong += [f"{', '.join(theirs)}: {words} as {ours}"] if words else []
    filled = {source.ours for source in sources}
    wrong += [f"{name}: no weight for it" for name in shapes if name not in filled]
    if wrong:
        raise CheckpointError(
            "these weights are not those of this transformer:\n  " + "\n  ".join(wrong) + "\n"
            "Set the values of the model that was trained, for example model.preset=gpt2."
        )
    params = jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in shapes])
    return stack_layers(params) if values.scan else params


def _used_names(values: Transformer, sources: list[LeafMapping]) -> set[str]:
    """Return the names that are read; a tied head repeats the token embedding."""
    names = {name for source in sources for name in source.theirs}
    return names | {"lm_head.weight"} if values.tied else names


def _convert(
    change: Callable[..., np.ndarray], arrays: list[np.ndarray], shape: tuple[int, ...]
) -> tuple[np.ndarray, str]:
    """Return the converted array, and an error message about its shape or an empty string."""
    found = ", ".join(str(array.shape) for array in arrays)
    try:
        array = np.ascontiguousarray(change(*arrays))
    except ValueError:  # the heads do not divide the columns
        return arrays[0], f"{found} does not become {shape}"
    return array, "" if array.shape == shape else f"{found} becomes {array.shape}, not {shape}"
