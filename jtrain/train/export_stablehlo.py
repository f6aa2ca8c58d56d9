"""Export of a run's predictions as StableHLO, with the number of rows left open."""

import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax import export

from jtrain.core.pytree import named_leaves
from jtrain.core.rows import with_rows
from jtrain.core.types import Batch
from jtrain.errors import ConfigError
from jtrain.io.safetensors import write_safetensors
from jtrain.models.pretrained.write import check_empty
from jtrain.models.transformer import Transformer
from jtrain.train.loaded_run import LoadedRun, load

PLATFORMS = ("cpu", "cuda", "tpu")
FUNCTION, WEIGHTS, SIGNATURE = "model.stablehlo", "weights.safetensors", "signature.json"


def export_stablehlo(
    run: str | Path, step: int | Literal["newest", "best"], out: Path
) -> dict[str, Any]:
    """Write a run's function, its weights and its signature into a new folder.

    The function takes the weights, a list of arrays in the order of the signature, and a dict of
    inputs whose first dim, the rows, may have any size:
    `jax.export.deserialize(bytes).call(weights, inputs)`.

    Raises:
        CheckpointError: if the folder has files, or the run has no such checkpoint.
        ConfigError: if the experiment has neither a `predict` nor a transformer as its model, or
            `flatbuffers` is not installed.
    """
    check_empty(out)
    if importlib.util.find_spec("flatbuffers") is None:
        raise ConfigError(
            "--to stablehlo was requested, and the package `flatbuffers`, by which jax.export "
            "writes a function, is not installed. Install it: pip install 'jtrain[export]'"
        )
    loaded = load(run, step, parallel="single")
    outputs, inputs = _function(loaded)
    weights = loaded.params, loaded.extra
    structure = jax.tree.structure(weights)
    (rows,) = export.symbolic_shape("b")
    batch = {n: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for n, x in inputs.items()}
    leaves = named_leaves({"params": weights[0], "extra": weights[1]})
    arrays = {name: np.asarray(jax.device_get(leaf)) for name, leaf in leaves.items()}
    ordered = {name: arrays[name] for name in _order(weights)}
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ordered.values()]

    def call(flat: list[Any], batch: Batch) -> Any:
        weights = jax.tree.unflatten(structure, flat)

        def one_row(row: Batch) -> Any:
            found = outputs(weights, with_rows(jax.tree.map(lambda x: x[None], row)))
            return jax.tree.map(lambda x: x[0], found)

        # Row by row: layers choose blocks by the number of rows, which is open here.
        return jax.vmap(one_row)(batch)

    exported = export.export(jax.jit(call), platforms=PLATFORMS)(like, batch)
    out.mkdir(parents=True, exist_ok=True)
    (out / FUNCTION).write_bytes(bytes(exported.serialize()))
    write_safetensors(out / WEIGHTS, ordered, {"format": "np"})
    found = {
        "step": loaded.step,
        "inputs": {name: _text(x) for name, x in batch.items()},
        "outputs": [_text(x) for x in exported.out_avals],
        "weights": list(ordered),
        "platforms": ", ".join(exported.platforms),
        "jax": jax.__version__,
        "calling_convention_version": exported.calling_convention_version,
    }
    (out / SIGNATURE).write_text(json.dumps(found, indent=2) + "\n")
    return found


def _function(loaded: LoadedRun) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """Return a function of the weights and a batch, and the inputs of one row."""
    experiment, model = loaded.experiment, getattr(loaded.config, "model", None)
    if experiment is not None and experiment.predict is not None:
        return loaded.outputs(), dict(loaded.inputs)
    if experiment is None or experiment.model is None or not isinstance(model, Transformer):
        raise ConfigError(
            f"{loaded.directory} has no function to export: its experiment has no `predict`, and "
            f"its model is no transformer. Add one: jt.Experiment(..., predict=lambda params, "
            f"extra, batch: outputs)."
        )
    apply, tokens = experiment.model.apply, jax.ShapeDtypeStruct((model.context,), np.int32)
    return lambda weights, batch: apply(*weights, batch["tokens"])[0], {"tokens": tokens}


def _order(weights: Any) -> list[str]:
    """Return the names of the weights in the order of their leaves."""
    params, extra = weights
    names = [f"params/{name}" for name in named_leaves(params)]
    return names + [f"extra/{name}" for name in named_leaves(extra)]


def _text(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"
