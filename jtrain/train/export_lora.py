"""Weights of a checkpoint of a run with LoRA, with the terms added."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core import pytree
from jtrain.finetune.lora import Lora, LowRankAdapter, build_adapter
from jtrain.models.layers.low_rank import LowRank, Quantized

Read = Callable[[str], np.ndarray]


def merged_reader(model: Any, settings: Lora, read: Read) -> Read:
    """Return a function that reads a leaf of the model as `params/NAME` or `extra/NAME`.

    Args:
        model: the config of the model.
        settings: of the run.
        read: reads a leaf as the run stored it.
    """
    built = model.build()
    params, _ = jax.eval_shape(built.init, jax.random.key(0))
    adapter = build_adapter(settings, params, built.dims, built.linear)
    dtypes = {name: leaf.dtype for name, leaf in pytree.named_leaves(params).items()}

    def read_merged(full: str) -> np.ndarray:
        kind, name = full.split("/", 1)
        if kind == "extra":
            return read(f"extra/rest/{name}")
        if name not in adapter.leaves:
            return read(f"extra/base/{name}").astype(dtypes[name])
        return np.asarray(_merged(adapter, name, read))

    return read_merged


def has_terms(record: Mapping[str, Any]) -> bool:
    """Return whether these leaves of a checkpoint are those of a run with LoRA."""
    params = [name for name in record if name.startswith("params/")]
    frozen = any(name.startswith("extra/base/") for name in record)
    return frozen and bool(params) and all(name.endswith(("/a", "/b")) for name in params)


def _merged(adapter: LowRankAdapter, name: str, read: Read) -> jax.Array:
    settings, leaf, base = adapter.settings, adapter.leaves[name], f"extra/base/{name}"
    if settings.frozen == "int8" or settings.frozen == "nf4":
        shape = leaf.shape[leaf.stack :]
        codes, scales = (jnp.asarray(read(f"{base}/{part}")) for part in ("codes", "scales"))
        frozen = Quantized(codes, scales, shape, settings.frozen)
    else:
        frozen = jnp.asarray(read(base))
    a, b = (jnp.asarray(read(f"params/{name}/{part}")) for part in "ab")
    scale = settings.alpha / settings.rank
    return LowRank(frozen, a, b, None, scale, 0.0, leaf.transposed).merged()
