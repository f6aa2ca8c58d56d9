"""Exports of a trained model: Hugging Face folders, LoRA adapters, StableHLO programs."""

import functools
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jtrain.checkpoint import inspect, layout, leaf_table
from jtrain.checkpoint.init_from import is_requested
from jtrain.config.resolve import resolve
from jtrain.core.pytree import named_leaves
from jtrain.core.rows import with_rows
from jtrain.core.types import Batch
from jtrain.errors import CheckpointError, ConfigError
from jtrain.finetune.adapter_file import write_peft_adapter
from jtrain.finetune.lora import Lora, LowRankAdapter, build_adapter
from jtrain.io.hub import is_hub_name, local_folder
from jtrain.io.safetensors import write_safetensors
from jtrain.models.layers.low_rank import LowRank, Quantized
from jtrain.models.pretrained.families import family_name, family_of
from jtrain.models.pretrained.source import is_pretrained
from jtrain.models.pretrained.tensors_table import model_shapes
from jtrain.models.pretrained.values import read_hf_config
from jtrain.models.pretrained.write import Export, check_empty, without_class_names, write_folder
from jtrain.models.transformer import Transformer
from jtrain.train.loaded_run import LoadedRun, load
from jtrain.train.run_dir import RunDir

DTYPES = ("float32", "bfloat16", "float16")


def export_hf(config: Path, directory: Path, step: int, out: Path, dtype: str = "") -> Export:
    """Write the trained parameters of a checkpoint as a folder of the family that computes them.

    The terms of a run with LoRA are added to the weights beside them.

    Args:
        directory: of its checkpoints.
        out: the new folder.
        dtype: of the tensors; empty: that of the model that the run came from, or float32.

    Raises:
        CheckpointError: if no family computes the model, or the folder cannot be written.
    """
    check_empty(out)
    resolved, model, lora, record = _stored_model(config, directory, step)
    name = getattr(model, "pretrained", "")
    source = local_folder(name, weights=False)
    known = bool(name) and is_pretrained(source)
    base = read_hf_config(name) if known else {}
    start = resolved.init_from
    if start.path or not is_requested("head/bias", start):
        base = without_class_names(base)  # they are of another head
    family = family_of(model, family_name(base))
    chosen = dtype or base.get("torch_dtype") or base.get("dtype") or "float32"
    return write_folder(
        out,
        family,
        model,
        _reader(model, lora, directory, step, record),
        dtype=chosen if chosen in DTYPES else "float32",
        base=base if family_name(base) == family.name else {},
        beside=source if known and source.is_dir() else None,
    )


def export_peft(config: Path, directory: Path, step: int, out: Path) -> int:
    """Write the terms of a run with LoRA as an adapter of the package peft; return its bytes.

    Raises:
        CheckpointError: if the run has no terms, or its model no published family.
    """
    resolved, model, lora, record = _stored_model(config, directory, step)
    if not has_terms(record):
        raise CheckpointError(
            f"{config} was trained without lora, so it has no adapter. Export the model: --to hf"
        )
    base = resolved.init_from.path or getattr(model, "pretrained", "")
    known = is_hub_name(base) or (bool(base) and is_pretrained(Path(base)))  # and not another run
    built = model.build()
    params, _ = jax.eval_shape(built.init, jax.random.key(0))
    adapter = build_adapter(lora, params, built.dims, built.linear)
    arrays = inspect.read_arrays(directory, step, [n for n in record if n.startswith("params/")])
    term = lambda name: {part: arrays[f"params/{name}/{part}"] for part in "ab"}
    terms = {name: term(name) for name in adapter.leaves}
    return write_peft_adapter(out, adapter, terms, model, base if known else "")


def _stored_model(config: Path, directory: Path, step: int) -> tuple[Any, Any, Lora, Any]:
    resolved = resolve(config).config
    model, lora = getattr(resolved, "model", None), getattr(resolved, "lora", Lora())
    layout.check_valid(directory, step)
    record = layout.read_record(directory, step)["leaves"]
    if model is None or not hasattr(model, "build"):
        raise CheckpointError(
            f"{config} has no `model` that is a network of jtrain, and only those have a published "
            f"family. Export the tensors: --to safetensors"
        )
    RunDir(directory.parent).pin_models()
    return resolved, with_sizes_of_data(model, record), lora, record


def with_sizes_of_data(model: Any, record: Any) -> Any:
    """Return the config with the sizes that its data gave, by the leaves of the checkpoint.

    They are the vocabulary of a text model, and images and classes of an image classifier.
    """
    prefix = "extra/base/" if has_terms(record) else "params/"
    shape = lambda name: _stored_shape(record, prefix, name)
    if hasattr(model, "with_sizes_of"):
        return model.with_sizes_of(shape) if f"{prefix}head/bias" in record else model
    stored = {f"{prefix}tokens", "params/tokens/a"} & set(record)
    if getattr(model, "vocab", None) != 0 or not stored:
        return model
    return model.for_tokens(shape("tokens")[0])


def _stored_shape(record: Any, prefix: str, name: str) -> tuple[int, ...]:
    """Return the shape of a leaf; (inputs, outputs) of one that is stored in fewer bits."""
    if stored := record.get(f"{prefix}{name}"):
        return leaf_table.parse_leaf(stored).shape
    a, b = (leaf_table.parse_leaf(record[f"params/{name}/{term}"]).shape for term in "ab")
    return a[0], b[-1]


def _reader(
    model: Any, lora: Lora, directory: Path, step: int, record: Any
) -> Callable[[str], np.ndarray]:
    def read_leaf(full: str) -> np.ndarray:
        return inspect.read_arrays(directory, step, [full])[full]

    read_full = merged_reader(model, lora, read_leaf) if lora.rank else read_leaf

    scanned = getattr(model, "scan", False)
    stored_name = lambda name: name if name.startswith("extra/") else f"params/{name}"

    @functools.lru_cache(maxsize=1)
    def stored(name: str) -> np.ndarray:
        return read_full(stored_name(name))

    def read(name: str) -> np.ndarray:
        if not (scanned and name.startswith("blocks/")):
            return stored(name)
        _, index, rest = name.split("/", 2)
        return stored(f"blocks/{rest}")[int(index)]

    names = [] if scanned or lora.rank else map(stored_name, model_shapes(model))
    if missing := [name for name in names if name not in record]:
        raise CheckpointError(
            f"{directory / str(step)} should have {missing[0]} for its config, and has "
            f"{', '.join(list(record)[:5])}. Export a run that was trained with its config."
        )
    return read


Read = Callable[[str], np.ndarray]


def merged_reader(model: Any, settings: Lora, read: Read) -> Read:
    """Return a function that reads a leaf of the model as `params/NAME` or `extra/NAME`.

    Args:
        read: reads a leaf as the run stored it.
    """
    built = model.build()
    params, _ = jax.eval_shape(built.init, jax.random.key(0))
    adapter = build_adapter(settings, params, built.dims, built.linear)
    dtypes = {name: leaf.dtype for name, leaf in named_leaves(params).items()}

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
    ordered = {  # as the leaves of (params, extra)
        f"{part}/{name}": np.asarray(jax.device_get(leaf))
        for part, tree in zip(("params", "extra"), weights, strict=True)
        for name, leaf in named_leaves(tree).items()
    }
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
            f"its model is not a transformer. Add one: jt.Experiment(..., predict=lambda params, "
            f"extra, batch: outputs)."
        )
    apply, tokens = experiment.model.apply, jax.ShapeDtypeStruct((model.context,), np.int32)
    return lambda weights, batch: apply(*weights, batch["tokens"])[0], {"tokens": tokens}


def _text(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"
