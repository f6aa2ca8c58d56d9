"""LoRA on any model: which leaves get a low-rank term, and the terms' first values.

A run trains the terms alone: they are its `params`, and the frozen weights of the model are in its
`extra`, so that they have no gradient, no optimizer state and no copy in a checkpoint.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.core import pytree
from jtrain.core.loss import Stateful
from jtrain.core.model import Model
from jtrain.core.rows import row_keys
from jtrain.core.types import (
    Batch,
    Dims,
    Extra,
    Key,
    Keys,
    Leaf,
    LossFn,
    LossValue,
    Metrics,
    Params,
)
from jtrain.errors import ConfigError
from jtrain.finetune.reference import ReferenceLoss, read_reference
from jtrain.models.layers.low_rank import LowRank, Quantized, as_dense, keeps_dims, quantize
from jtrain.optim.groups import check_pattern, matches, nearest, stacked_dims

Weights: TypeAlias = tuple[Params, Extra]
_SALT = 0x10A  # apart from the keys that the model itself draws from


@configclass
class Lora:
    """Low-rank terms beside frozen weights; all other weights are frozen too.

    Source: Hu et al. 2021, arXiv 2106.09685; frozen weights in 4 bits: Dettmers et al. 2023
    (QLoRA), arXiv 2305.14314.
    """

    rank: int = Field(default=0, ge=0)
    """Rank of each term; 0: no LoRA, all weights are trained."""
    alpha: float = Field(default=16.0, gt=0)
    """Scale of the terms: alpha / rank."""
    on: tuple[str, ...] = ()
    """Patterns on the names of leaves, such as `*/qkv/*`: the matrices among them get a term."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the input of each term, drawn by row."""
    frozen: Literal["as_is", "bfloat16", "int8", "nf4"] = "as_is"
    """Type in which the matrices with a term are stored: int8 and nf4 in blocks of 64."""


@dataclasses.dataclass(frozen=True)
class AdaptedLeaf:
    """Leaf of a model that gets a low-rank term."""

    shape: tuple[int, ...]
    stack: int
    """Leading dims that stack layers, each of which has its own term."""
    linear: bool
    """Whether the leaf is a kernel whose layer computes the term beside it."""
    transposed: bool
    """Whether the leaf is stored as (outputs, inputs)."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of inputs and outputs of one layer."""
        *first, last = self.shape[self.stack :]
        return (last, math.prod(first)) if self.transposed else (math.prod(first), last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankAdapter:
    """LoRA of one model as pure functions of its weights."""

    settings: Lora
    leaves: Mapping[str, AdaptedLeaf]

    def attach(self, weights: Weights, key: Key) -> Weights:
        """Return the terms, and what is carried beside them: `base`, frozen, and `rest`."""
        params, extra = weights
        return self.init(key), {"base": self.freeze(params), "rest": extra}

    def init(self, key: Key) -> Params:
        """Return the first terms: A drawn, B zero, so that the model starts as it was.

        A is uniform in +- 1 / sqrt(inputs), as in Hu et al.'s code and in PEFT.
        """
        made = {}
        for index, (name, leaf) in enumerate(self.leaves.items()):
            before, (inputs, outputs) = leaf.shape[: leaf.stack], leaf.sizes
            bound, shape = inputs**-0.5, (*before, inputs, self.settings.rank)
            drawn = jax.random.uniform(jax.random.fold_in(key, index), shape, minval=-1)
            made[name] = {"a": bound * drawn, "b": jnp.zeros((*before, *shape[-1:], outputs))}
        return made

    def freeze(self, params: Params) -> Params:
        """Return the weights of the model with the adapted leaves in the type they are stored."""
        store = lambda path, x: self.store(pytree.name(path), x)
        return jax.tree_util.tree_map_with_path(store, params)

    def store(self, name: str, x: Leaf) -> Leaf | Quantized:
        """Return a leaf of the model in the type in which it is stored."""
        leaf, kind = self.leaves.get(name), self.settings.frozen
        if leaf is None or kind == "as_is":
            return x
        if kind == "bfloat16":
            return x.astype(jnp.bfloat16)
        return quantize(x, kind, stack=leaf.stack)

    def row_keys(self, rng: Key | None, batch: Batch) -> Keys | None:
        """Return a key for each row, or None where nothing is dropped."""
        if rng is None or not self.settings.dropout:
            return None
        return row_keys(jax.random.fold_in(rng, _SALT), batch)

    def join(
        self, params: Params, extra: Extra, keys: Keys | None = None, *, merged: bool = False
    ) -> Params:
        """Return the parameters of the model: frozen leaves, and a `LowRank` where there is a term.

        They have the type of the terms, which a run casts to the type that it computes in.

        Args:
            keys: of the rows, for dropout.
            merged: add every term to its leaf. Those that are not the kernel of a linear layer of
                this package always are.
        """
        dtype = jax.tree.leaves(params)[0].dtype
        indices = {name: index for index, name in enumerate(self.leaves)}

        def put(path: Any, x: Any) -> Any:
            name = pytree.name(path)
            leaf = self.leaves.get(name)
            if leaf is None:
                return as_dense(x, dtype)
            both = self._low_rank(leaf, x, params[name], _at(keys, indices[name], leaf))
            return both if leaf.linear and not merged else both.merged()

        stored = lambda x: isinstance(x, Quantized)
        return jax.tree_util.tree_map_with_path(put, extra["base"], is_leaf=stored)

    def dims(self, dims: Mapping[str, Dims]) -> dict[str, Dims]:
        """Return the names of the dims of the model, of the terms, and of codes and scales."""
        named = dict(dims)
        for name, leaf in self.leaves.items():
            names = dims.get(name)
            if names is None or len(names) != len(leaf.shape):
                continue
            if self.settings.frozen in ("int8", "nf4"):
                blocks = (
                    names if keeps_dims(leaf.shape[leaf.stack :]) else (*names[: leaf.stack], None)
                )
                named[f"{name}/codes"], named[f"{name}/scales"] = (*blocks, None), blocks
            if len(names) != leaf.stack + 2:
                continue
            first, last = names[-2:][::-1] if leaf.transposed else names[-2:]
            named[f"{name}/a"] = (*names[: leaf.stack], first, None)
            named[f"{name}/b"] = (*names[: leaf.stack], None, last)
        return named

    def _low_rank(self, leaf: AdaptedLeaf, x: Any, term: Any, keys: Keys | None) -> LowRank:
        scale, rate = self.settings.alpha / self.settings.rank, self.settings.dropout
        return LowRank(x, term["a"], term["b"], keys, scale, rate, leaf.transposed)


def build_adapter(
    settings: Lora, params: Params, dims: Mapping[str, Dims], linear: Mapping[str, bool] = {}
) -> LowRankAdapter:
    """Return the adapter of a model.

    Args:
        params: of the model, or their shapes.
        linear: kernels whose layers take a `LowRank` (`Model.linear`).

    Raises:
        ConfigError: if a pattern matches no matrix, the rank is larger than a dim of a matrix, or
            there is dropout for a leaf that is not a kernel of a linear layer.
    """
    shapes = {name: leaf.shape for name, leaf in pytree.named_leaves(params).items()}
    stacks = {name: stacked_dims(name, dims) for name in shapes}
    matrices = {n: shape for n, shape in shapes.items() if len(shape) - stacks[n] >= 2}
    for i, pattern in enumerate(settings.on):
        check_pattern(f"lora.on[{i}]", pattern, list(shapes))
        if not any(matches(name, pattern) for name in matrices):
            near = ", ".join(nearest(pattern, list(matrices)))
            raise ConfigError(
                f"lora.on[{i}] is {pattern!r}, which matches no matrix, and only a matrix has a "
                f"low-rank term. Nearest matrices: {near}."
            )
    for name, leaf in pytree.named_leaves(params).items():
        if jnp.iscomplexobj(leaf):
            raise ConfigError(
                f"{name} holds {leaf.dtype}, and low-rank terms and frozen weights are real. "
                f"Train the whole model (lora.rank=0, lora.on=[]), or give the real and the "
                f"imaginary part as two parameters."
            )
    leaves = {}
    for name, shape in matrices.items():
        if any(matches(name, pattern) for pattern in settings.on):
            kernel = name in linear
            leaves[name] = AdaptedLeaf(shape, stacks[name], kernel, kernel and linear[name])
    adapter = LowRankAdapter(settings=settings, leaves=leaves)
    _check(adapter)
    return adapter


def _check(adapter: LowRankAdapter) -> None:
    settings = adapter.settings
    for name, leaf in adapter.leaves.items():
        if settings.rank > min(leaf.sizes):
            inputs, outputs = leaf.sizes
            raise ConfigError(
                f"lora.rank={settings.rank} is more than the smaller dim of {name}, which has "
                f"{inputs} inputs and {outputs} outputs. Write lora.rank={min(leaf.sizes)} or "
                f"less, or leave the leaf out of lora.on."
            )
    other = [name for name, leaf in adapter.leaves.items() if not leaf.linear]
    if settings.dropout and other:
        raise ConfigError(
            f"lora.dropout={settings.dropout} drops inputs of linear maps by row, and {other[0]} "
            f"is not a kernel of a linear layer of jtrain's models ({len(other)} such leaves). "
            f"Write lora.dropout=0, or leave them out of lora.on."
        )


def _at(keys: Keys | None, index: int, leaf: AdaptedLeaf) -> Keys | None:
    """Return the keys of the rows at one leaf: b, or l b for a stack of layers."""
    if keys is None:
        return None
    fold = jax.vmap(jax.random.fold_in, (0, None))
    keys = fold(keys, index)
    for layers in reversed(leaf.shape[: leaf.stack]):
        keys = jax.vmap(fold, (None, 0))(keys, jnp.arange(layers))
    return keys


T = TypeVar("T")
InitExtra: TypeAlias = Callable[[Params, Extra, int], Extra]


def extra_of_model(extra: Extra) -> Extra:
    """Return the `extra` of the model itself, with or without an adapter."""
    return extra.get("rest", extra) if isinstance(extra, Mapping) else extra


def adapted_loss(adapter: LowRankAdapter, loss: LossFn | Stateful) -> Stateful:
    """Return the loss of the terms; the frozen weights are carried and stay as they are."""

    def call(
        params: Params, extra: Extra, batch: Batch, rng: Key | None
    ) -> tuple[LossValue, Metrics, Extra]:
        full, rest = adapter.join(params, extra, adapter.row_keys(rng, batch)), extra["rest"]
        if isinstance(loss, ReferenceLoss):
            reference = adapter.join(read_reference(params, rest), extra)
            value, metrics, rest = loss.compare(full, reference, rest, batch, rng)
        elif isinstance(loss, Stateful):
            value, metrics, rest = loss.loss(full, rest, batch, rng)
        else:
            output: Any = loss(full, batch, rng)
            value, metrics = output if type(output) is tuple else (output, {})
        return value, metrics, {"base": extra["base"], "rest": rest}

    return Stateful(call)


def adapted_init_extra(init_extra: InitExtra | None) -> InitExtra | None:
    """Return the function that makes the state of the loss, where there is one, of the terms."""
    if init_extra is None:
        return None
    return lambda params, extra, rows: {
        "base": extra["base"],
        "rest": init_extra(params, extra["rest"], rows),
    }


def adapted(adapter: LowRankAdapter, call: Callable[..., T] | None) -> Callable[..., T] | None:
    """Return a function of `(params, extra, ...)`, where there is one, with the terms merged.

    It has the attributes of `call`, such as the tokenizer of an experiment's `complete`.
    """
    if call is None:
        return None

    @functools.wraps(call)
    def merged(params: Params, extra: Extra, *rest: Any) -> T:
        return call(adapter.join(params, extra, merged=True), extra["rest"], *rest)

    return merged


def adapted_model(adapter: LowRankAdapter, model: Model) -> Model:
    """Return the model as a function of the terms and of what is carried beside them."""

    def init(key: Key) -> Weights:
        return adapter.attach(model.init(key), key)

    def apply(params: Params, extra: Extra, *inputs: Any, **named: Any) -> tuple[Any, Extra]:
        full = adapter.join(params, extra, merged=True)
        outputs, rest = model.apply(full, extra["rest"], *inputs, **named)
        return outputs, {"base": extra["base"], "rest": rest}

    return Model(init, apply, adapter.dims(model.dims), model.named, model.rows_interact)
