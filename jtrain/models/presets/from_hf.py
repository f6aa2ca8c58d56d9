"""Weights as Hugging Face publishes them, as the parameters of a Transformer.

Arrays are numpy's, `{name: x.numpy() for name, x in net.state_dict().items()}` of a
GPT2LMHeadModel, a LlamaForCausalLM or a MixtralForCausalLM, or what a safetensors file of theirs
holds; no torch is needed here.
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


class Source(NamedTuple):
    """A parameter of ours, the weights of theirs that it is made of, and how."""

    ours: str
    theirs: tuple[str, ...]
    change: Callable[..., np.ndarray]


def gpt2_from_hf(values: Transformer, weights: Weights) -> Params:
    """The parameters of a transformer like GPT-2 (learned positions, LayerNorm, GELU, biases).

    Raises:
        CheckpointError: with every weight that is missing, left over or of another shape.
    """
    return _filled(values, list(_gpt2(values)), _without("transformer.", weights))


def llama_from_hf(values: Transformer, weights: Weights) -> Params:
    """The parameters of a transformer like Llama (rotary, RMSNorm, SwiGLU, no bias).

    Raises:
        CheckpointError: with every weight that is missing, left over or of another shape.
    """
    return _filled(values, list(_llama(values, _mlp)), _without("model.", weights))


def mixtral_from_hf(values: Transformer, weights: Weights) -> Params:
    """The parameters of a transformer like Mixtral: Llama with a mixture of experts.

    By the names of published files (`block_sparse_moe`), or by those that transformers 5 has in
    memory.

    Raises:
        CheckpointError: with every weight that is missing, left over or of another shape.
    """
    fused = any(name.endswith(".experts.gate_up_proj") for name in weights)
    mlp = _experts_fused if fused else functools.partial(_experts, values)
    return _filled(values, list(_llama(values, mlp)), _without("model.", weights))


def _gpt2(values: Transformer) -> Iterator[Source]:
    # Theirs is query, key and value, then heads; ours the other way round.
    by_head = lambda x: _qkv(values, *np.split(x, 3, axis=-1))
    yield Source("tokens", ("wte.weight",), _same)
    yield Source("positions", ("wpe.weight",), _same)
    for i in range(values.layers):
        ours, theirs = f"blocks/{i}", f"h.{i}"
        yield Source(f"{ours}/qkv/kernel", (f"{theirs}.attn.c_attn.weight",), by_head)
        yield Source(f"{ours}/qkv/bias", (f"{theirs}.attn.c_attn.bias",), by_head)
        for our, their in (("out", "attn.c_proj"), ("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
            yield Source(f"{ours}/{our}/kernel", (f"{theirs}.{their}.weight",), _kernel)
            yield Source(f"{ours}/{our}/bias", (f"{theirs}.{their}.bias",), _same)
        yield from _norm(f"{ours}/norm_attention", f"{theirs}.ln_1")
        yield from _norm(f"{ours}/norm_mlp", f"{theirs}.ln_2")
    yield from _norm("norm", "ln_f")
    if not values.tied:
        yield Source("head", ("lm_head.weight",), _same)


def _llama(values: Transformer, mlp: Callable[[str, str], Iterator[Source]]) -> Iterator[Source]:
    yield Source("tokens", ("embed_tokens.weight",), _same)
    for i in range(values.layers):
        ours, theirs = f"blocks/{i}", f"layers.{i}"
        qkv = tuple(f"{theirs}.self_attn.{name}_proj.weight" for name in "qkv")
        grouped = lambda q, k, v: _kernel(_qkv(values, q.T, k.T, v.T))
        yield Source(f"{ours}/qkv/kernel", qkv, grouped)
        yield Source(f"{ours}/out/kernel", (f"{theirs}.self_attn.o_proj.weight",), _turned)
        yield from mlp(ours, theirs)
        first, second = f"{theirs}.input_layernorm", f"{theirs}.post_attention_layernorm"
        yield Source(f"{ours}/norm_attention/scale", (f"{first}.weight",), _same)
        yield Source(f"{ours}/norm_mlp/scale", (f"{second}.weight",), _same)
    yield Source("norm/scale", ("norm.weight",), _same)
    if not values.tied:
        yield Source("head", ("lm_head.weight",), _same)


def _mlp(ours: str, theirs: str) -> Iterator[Source]:
    for name in ("gate", "up", "down"):
        yield Source(f"{ours}/{name}/kernel", (f"{theirs}.mlp.{name}_proj.weight",), _turned)


def _experts(values: Transformer, ours: str, theirs: str) -> Iterator[Source]:
    """Theirs one by one: w1 is the gate, w3 goes up, w2 down."""
    mixture, theirs = f"{ours}/mixture", f"{theirs}.block_sparse_moe"
    experts = range(getattr(values.experts, "count", 0))
    stacked = lambda *each: np.stack([x.T for x in each])
    yield Source(f"{mixture}/router", (f"{theirs}.gate.weight",), np.transpose)
    for our, their in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        names = tuple(f"{theirs}.experts.{i}.{their}.weight" for i in experts)
        yield Source(f"{mixture}/{our}", names, stacked)


def _experts_fused(ours: str, theirs: str) -> Iterator[Source]:
    """Theirs together, e o i, the gate before what goes up."""
    mixture, experts = f"{ours}/mixture", f"{theirs}.mlp.experts"
    half = lambda x, part: np.split(x.swapaxes(1, 2), 2, axis=-1)[part]
    both = (f"{experts}.gate_up_proj",)
    yield Source(f"{mixture}/router", (f"{theirs}.mlp.gate.weight",), np.transpose)
    yield Source(f"{mixture}/gate", both, lambda x: half(x, 0))
    yield Source(f"{mixture}/up", both, lambda x: half(x, 1))
    yield Source(f"{mixture}/down", (f"{experts}.down_proj",), lambda x: x.swapaxes(1, 2))


def _norm(ours: str, theirs: str) -> Iterator[Source]:
    yield Source(f"{ours}/scale", (f"{theirs}.weight",), _same)
    yield Source(f"{ours}/bias", (f"{theirs}.bias",), _same)


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _kernel(x: np.ndarray) -> np.ndarray:  # i o
    """As jtrain.models.layers.linear keeps it: i o where it widens, o i where it narrows."""
    return x if x.shape[1] >= x.shape[0] else x.T


def _turned(x: np.ndarray) -> np.ndarray:  # o i
    return _kernel(x.T)


def _qkv(values: Transformer, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Columns of queries, keys and values as ours: by group, its queries, its key, its value."""
    split = lambda x: x.reshape(*x.shape[:-1], values.groups, -1, values.size_of_head)
    together = np.concatenate([split(q), split(k), split(v)], axis=-2)
    return together.reshape(*q.shape[:-1], -1)


def _without(prefix: str, weights: Weights) -> Weights:
    """The weights by their names inside of the model, without its buffers."""
    return {
        name.removeprefix(prefix): np.asarray(array)
        for name, array in weights.items()
        if not name.endswith(BUFFERS)
    }


def _filled(values: Transformer, sources: list[Source], weights: Weights) -> Params:
    """The tree that the model would make, with the arrays of `weights` in it."""
    like = jax.eval_shape(values.build().init, jax.random.key(0))[0]
    like = jax.eval_shape(unstack_layers, like) if values.scan else like
    shapes = {name: leaf.shape for name, leaf in named_leaves(like).items()}
    found: dict[str, np.ndarray] = {}
    asked = _asked(values, sources)
    wrong = [f"{name}: left over" for name in weights if name not in asked]
    for ours, theirs, change in sources:
        missing = [f"{name}: missing" for name in theirs if name not in weights]
        wrong += missing
        if ours not in shapes:
            wrong.append(f"{', '.join(theirs)}: the model has no {ours}")
        elif not missing:
            found[ours], words = _changed(change, [weights[name] for name in theirs], shapes[ours])
            wrong += [f"{', '.join(theirs)}: {words} as {ours}"] if words else []
    filled = {source.ours for source in sources}
    wrong += [f"{name}: nothing to fill it with" for name in shapes if name not in filled]
    if wrong:
        raise CheckpointError(
            "these weights are not those of this transformer:\n  " + "\n  ".join(wrong) + "\n"
            "Set the values of the model they were trained for: model.preset=gpt2 say."
        )
    params = jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in shapes])
    return stack_layers(params) if values.scan else params


def _asked(values: Transformer, sources: list[Source]) -> set[str]:
    """The names that are read; a tied head is the token embedding once more."""
    names = {name for source in sources for name in source.theirs}
    return names | {"lm_head.weight"} if values.tied else names


def _changed(
    change: Callable[..., np.ndarray], arrays: list[np.ndarray], shape: tuple[int, ...]
) -> tuple[np.ndarray, str]:
    """The array as ours, and what is wrong with its shape."""
    found = ", ".join(str(array.shape) for array in arrays)
    try:
        array = np.ascontiguousarray(change(*arrays))
    except ValueError:  # heads that cannot be told apart
        return arrays[0], f"{found} does not become {shape}"
    return array, "" if array.shape == shape else f"{found} becomes {array.shape}, not {shape}"
