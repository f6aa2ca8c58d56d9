"""Small models of published families: their files, with weights that are drawn by name."""

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jtrain.core.pytree import named_leaves
from jtrain.models.pretrained.source import PretrainedWeights

GOLDEN = Path(__file__).parent / "golden" / "pretrained"


def names() -> list[str]:
    """Return the names of the goldens."""
    return sorted(path.stem for path in GOLDEN.glob("*.json"))


def golden(name: str) -> dict[str, Any]:
    """Return a golden: config, shapes of tensors, inputs and outputs of `transformers`."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw a tensor by its name: no two are alike, so that none can take another's place."""
    if name.endswith("num_batches_tracked"):
        return np.array(3)
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("running_var"):
        return (0.5 + np.abs(noise)).astype(np.float32)
    if len(shape) == 4:  # a convolution keeps the size of its inputs: Glorot and Bengio 2010
        return (noise * np.prod(shape[1:]) ** -0.5).astype(np.float32)
    one = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
    return (one + 0.2 * noise).astype(np.float32)


def draw_pixels(shape: tuple[int, ...]) -> np.ndarray:
    """Draw images b c h w."""
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def tensors_of(golden: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of a golden, by the names that transformers writes."""
    return {name: draw(name, tuple(shape)) for name, shape in golden["tensors"].items()}


def read_weights(source: PretrainedWeights) -> tuple[Any, Any]:
    """Return the parameters of the model of a source, and what it carries beside them."""
    like = jax.eval_shape(source.model.build().init, jax.random.key(0))
    named = {**named_leaves(like[0]), **{f"extra/{n}": x for n, x in named_leaves(like[1]).items()}}
    arrays = source.read(named)
    leaves = [jnp.asarray(arrays[name]) for name in named]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def write_model(folder: Path, golden: dict[str, Any], **changes: Any) -> Path:
    """Write config.json and model.safetensors; `changes` are tensors, None to leave one out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden["config"]))
    tensors = {**tensors_of(golden), **changes}
    kept = {name: np.array(x, order="C") for name, x in tensors.items() if x is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
