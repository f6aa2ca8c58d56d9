"""Adapters as files of their own, and their sum with the base that they were trained on."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.config.dump import to_plain
from jtrain.core import pytree
from jtrain.core.types import Extra, Leaf, Params
from jtrain.errors import CheckpointError
from jtrain.finetune.lora import AdaptedLeaf, Lora, LowRankAdapter
from jtrain.io.safetensors import read_metadata, read_tensors, write_safetensors
from jtrain.models.layers.low_rank import add_product, as_dense
from jtrain.models.pretrained.families import family_name, family_of
from jtrain.models.pretrained.folder import is_adapter
from jtrain.models.pretrained.peft import TENSORS, write_terms
from jtrain.models.pretrained.values import read_hf_config
from jtrain.models.pretrained.write import check_empty
from jtrain.parallel import fingerprint

_FORMAT = "jtrain adapter 1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedAdapter:
    """Adapter read from a file."""

    where: str
    adapter: LowRankAdapter
    params: Params
    """The terms: `{leaf: {"a": ..., "b": ...}}`."""
    base: Mapping[str, str]
    """Fingerprint of each frozen leaf of the base, as it was stored."""


def write_adapter(path: Path, adapter: LowRankAdapter, params: Params, extra: Extra) -> int:
    """Write the terms alone, with the fingerprints of their base; return the bytes of the file.

    Args:
        path: a .safetensors file.
        params, extra: of a run with an adapter.

    Raises:
        CheckpointError: if the file cannot be written.
    """
    tensors = {
        name.replace("/", "."): np.asarray(leaf)
        for name, leaf in pytree.named_leaves(params).items()
    }
    about = {
        "format": _FORMAT,
        "lora": json.dumps(to_plain(adapter.settings)),
        "leaves": json.dumps({n: dataclasses.asdict(x) for n, x in adapter.leaves.items()}),
        "base": json.dumps(fingerprints(extra["base"])),
    }
    return write_safetensors(path, tensors, about)


def write_peft_adapter(
    folder: Path, adapter: LowRankAdapter, params: Params, model: Any, base: str = ""
) -> int:
    """Write the terms as an adapter that `peft.PeftModel.from_pretrained` loads; return its bytes.

    Args:
        folder: is made; must be empty.
        params: of a run with an adapter: the terms.
        base: name or folder of the model that the terms are added to; empty: not known.

    Raises:
        CheckpointError: if no published family computes the model, or a term is of another layer.
    """
    check_empty(folder)
    terms = {}
    for name, leaf in adapter.leaves.items():
        if not leaf.linear:
            raise CheckpointError(
                f"{name} has a low-rank term and is not a linear layer, and an adapter of peft has "
                f"only those. Write the sum, --to hf, or train without it: lora.on='[\"*/kernel\"]'"
            )
        a, b = (np.asarray(params[name][part], np.float32) for part in "ab")
        b = b.swapaxes(-1, -2) if leaf.transposed else b  # as the kernel is stored
        if not leaf.stack:
            terms[name] = a, b
            continue
        for i in range(leaf.shape[0]):
            terms[name.replace("blocks/", f"blocks/{i}/", 1)] = a[i], b[i]
    model = dataclasses.replace(model, scan=False) if getattr(model, "scan", False) else model
    family = family_of(model, family_name(read_hf_config(base)) if base else "")
    used = adapter.settings
    about = {"r": used.rank, "lora_alpha": used.alpha, "lora_dropout": used.dropout}
    return write_terms(folder, family, model, terms, about, base)


def read_adapter(path: Path | str) -> SavedAdapter:
    """Read an adapter's file.

    Raises:
        CheckpointError: if the file is not an adapter of jtrain, such as one of peft.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if is_adapter(folder) and Path(path) in (folder, folder / TENSORS):
        raise CheckpointError(
            f"{folder} is an adapter of peft, whose terms are those of the modules of its base. To "
            f"add it to the base: init_from.path={folder} or model.from={folder}"
        )
    about = read_metadata(Path(path))
    if about.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} is not an adapter: its metadata has format={about.get('format', 'nothing')} "
            f"and not {_FORMAT!r}. Write one from a run with lora: jt.load(RUN).save_adapter(PATH)."
        )
    leaves = {
        name: AdaptedLeaf(**{**known, "shape": tuple(known["shape"])})
        for name, known in json.loads(about["leaves"]).items()
    }
    settings = json.loads(about["lora"])
    adapter = LowRankAdapter(
        settings=Lora(**{**settings, "on": tuple(settings["on"])}), leaves=leaves
    )
    tensors = read_tensors(Path(path))
    term = lambda name, part: np.asarray(tensors[f"{name}/{part}".replace("/", ".")])
    params = {name: {part: term(name, part) for part in ("a", "b")} for name in leaves}
    return SavedAdapter(
        where=str(path), adapter=adapter, params=params, base=json.loads(about["base"])
    )


def fingerprints(base: Any) -> dict[str, str]:
    """Return the fingerprint of each leaf of frozen weights."""
    return fingerprint.read(fingerprint.start(pytree.named_leaves(base)))


def merge(params: Params, *adapters: SavedAdapter | tuple[SavedAdapter, float]) -> Params:
    """Return a model's weights with one adapter or several added, each times its factor.

    An adapter that was trained beside weights in 8 or 4 bits is added to those weights.

    Args:
        params: the base, as it was before the adapters were trained.
        adapters: each as read, or with a factor.

    Raises:
        CheckpointError: if an adapter was trained on another base, or two beside other types.
    """
    pairs = [one if isinstance(one, tuple) else (one, 1.0) for one in adapters]
    kinds = sorted({saved.adapter.settings.frozen for saved, _ in pairs})
    if len(kinds) > 1:
        raise CheckpointError(
            f"the adapters were trained beside weights stored as {' and '.join(kinds)}, which are "
            f"not the same numbers: merge those of one `lora.frozen` at a time."
        )
    for saved, _ in pairs:
        check_base(saved, saved.adapter.freeze(params))

    def leaf(path: Any, x: Leaf) -> Leaf:
        name = pytree.name(path)
        for saved, factor in (pair for pair in pairs if name in pair[0].params):
            term, settings = saved.params[name], saved.adapter.settings
            scale = factor * settings.alpha / settings.rank
            transposed = saved.adapter.leaves[name].transposed
            x = add_product(x, term["a"], term["b"], scale, transposed=transposed)
        return x

    return jax.tree_util.tree_map_with_path(leaf, _as_stored(params, pairs))


def _as_stored(params: Params, pairs: Sequence[tuple[SavedAdapter, float]]) -> Params:
    def leaf(path: Any, x: Leaf) -> Leaf:
        name = pytree.name(path)
        stored = [saved.adapter.store(name, x) for saved, _ in pairs if name in saved.params]
        return as_dense(stored[0], x.dtype) if stored else x

    return jax.tree_util.tree_map_with_path(leaf, params)


def check_base(saved: SavedAdapter, frozen: Params) -> None:
    """Raise unless these frozen weights are those that the adapter was trained on.

    Raises:
        CheckpointError: with the leaves that differ.
    """
    found = fingerprints(frozen)
    missing = sorted(saved.base.keys() ^ found.keys())
    differ = [n for n in saved.base if n in found and saved.base[n] != found[n]]
    if missing or differ:
        names = missing or differ
        what = "that only one of them has" if missing else "with other values"
        raise CheckpointError(
            f"{saved.where} is an adapter of another base: {len(names)} of {len(saved.base)} "
            f"leaves {what}, such as {', '.join(names[:3])}. Give the weights that it was trained "
            f"on: those of the run's init_from, or of its seed."
        )
