"""Published weights as a source of a new state's parameters, read one at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.core.types import Extra, Params
from jtrain.core.types import Leaf as Array
from jtrain.data.text.tokenizer_file import read_header
from jtrain.data.text.tokenizers import Tokenizer, describe_tokenizer
from jtrain.errors import CheckpointError, DataError
from jtrain.io.hub import is_hub_name, local_folder
from jtrain.io.regular_files import read_json
from jtrain.models.classifiers import EfficientNetLite, ResNet, ViT
from jtrain.models.encoder import Encoder
from jtrain.models.pretrained.families import FAMILIES, build_model, find_family
from jtrain.models.pretrained.family import Family
from jtrain.models.pretrained.folder import is_folder, read_folder
from jtrain.models.pretrained.gguf import GGUF, read_gguf
from jtrain.models.pretrained.peft import add_adapter
from jtrain.models.pretrained.tensors_table import (
    Index,
    Tensors,
    make_table,
    model_shapes,
    put_slices,
    release_host_memory,
)
from jtrain.models.pretrained.values import folder_if_any, name_of_base, read_hf_config
from jtrain.models.transformer import Transformer

TOKENIZER = "tokenizer.json"
RELEASED = 1 << 20
"""Bytes of a parameter after which freed memory is returned: less is not worth the call."""
CLASSES: Mapping[str, Any] = {
    "transformer": Transformer,
    "encoder": Encoder,
    "vit": ViT,
    "resnet": ResNet,
    "efficientnet_lite": EfficientNetLite,
}
"""Classes of our configs by their kind."""


def is_pretrained(path: Path) -> bool:
    """Return whether a path is a folder with config.json, or a GGUF file."""
    return path.suffix == GGUF or is_folder(path)


class PretrainedWeights:
    """Parameters of a published model, under our names; an adapter of peft is added to its base.

    Args:
        name: a folder, a GGUF file, or a name on the Hub.
        stacked: give the parameters of all blocks as one array each, as a model with `scan` has.

    Raises:
        CheckpointError: if the path is neither, or a tensor is missing, surplus or misshapen.
    """

    def __init__(self, name: str | Path, *, stacked: bool = False):
        path, base = local_folder(str(name)), name_of_base(str(name))
        self.where = f"{name} at commit {path.name}" if is_hub_name(str(name)) else str(name)
        self.hf = read_hf_config(name)
        self.family: Family = find_family(self.hf, self.where)
        self.model = build_model(CLASSES[self.family.kind], self.family, self.hf)
        source = local_folder(base)
        tensors: Tensors = (
            read_gguf(source).tensors if source.suffix == GGUF else read_folder(source)
        )
        if source != path:
            tensors = add_adapter(path, self.family, tensors)
        self._table = make_table(self.family, self.model, tensors, self.where)
        self._layers = self.model.layers if stacked and hasattr(self.model, "layers") else 0
        self.found: Mapping[str, jax.ShapeDtypeStruct] = dict(self._found())

    def _found(self):
        for name, leaf in self._table.found.items():
            _, index, rest = (*name.split("/", 2), "", "")[:3]
            if not (self._layers and name.startswith("blocks/")):
                yield name, leaf
            elif index == "0":
                shape = (self._layers, *leaf.shape)
                yield f"blocks/{rest}", jax.ShapeDtypeStruct(shape, leaf.dtype)

    def read(self, wanted: Mapping[str, Array], /) -> dict[str, Array]:
        """Read these parameters with the requested shardings and dtypes; numpy without a sharding.

        One slice of one parameter, that of one device, is on the host at a time.
        """
        found = {}
        for name, like in wanted.items():
            found[name] = self._place(name, like)
            if found[name].nbytes > RELEASED:
                release_host_memory()
        return found

    def _place(self, name: str, like: Array) -> Array:
        stacked = self._layers and name.startswith("blocks/")
        view = None if stacked else self._table.read(name)

        def part(index: Index) -> np.ndarray:
            shape = (len(range(n)[one]) for one, n in zip(index, like.shape, strict=True))
            array = np.empty(tuple(shape), like.dtype)
            if view is not None:
                view.copy(index, array)
                return array
            rest = name.removeprefix("blocks/")
            for i, layer in enumerate(range(self._layers)[index[0]]):
                self._table.read(f"blocks/{layer}/{rest}").copy(index[1:], array[i, ...])
            return array

        sharding = getattr(like, "sharding", None)
        if sharding is None:
            return part((slice(None),) * len(like.shape))
        return put_slices(like.shape, sharding, part)


def params_from_timm(model: Any, weights: Mapping[str, np.ndarray]) -> tuple[Params, Extra]:
    """Return the parameters of an image classifier, and its running statistics, from timm's.

    Args:
        model: a ResNet, a ViT or an EfficientNetLite.
        weights: `{name: x.numpy() for name, x in net.state_dict().items()}` of a module of timm or
            torchvision; no torch is needed here.

    Raises:
        CheckpointError: with every weight that is missing, surplus or of another shape.
    """
    family = FAMILIES.get(f"timm_{model.kind}", FAMILIES.get(model.kind))
    shapes = model_shapes(model)
    if family is None or not family.timm or {x.ours for x in family.leaves(model)} != set(shapes):
        raise CheckpointError(
            f"timm has no {model.kind} with the parameters of this one. Set the values of the "
            f"model that was trained (preset=..., pool=class for a ViT)."
        )
    table = make_table(family, model, weights, "the dict of weights")
    params, extra = jax.eval_shape(model.build().init, jax.random.key(0))
    arrays = [table.read(name).array for name in shapes]
    return jax.tree.unflatten(jax.tree.structure((params, extra)), arrays)


def vocabulary_of(path: Path) -> Mapping[str, int] | None:
    """Return the number of each token of a published tokenizer; None if there is none."""
    if path.suffix == GGUF:
        tokens = read_header(path).get("tokenizer.ggml.tokens", [])
        return {token: i for i, token in enumerate(tokens)} or None
    file = path / TOKENIZER
    if not file.is_file():
        return None
    try:
        return vocabulary_of_parsed(read_json(file))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is not a tokenizer ({error}). Download it again.") from None


def vocabulary_of_parsed(parsed: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of each token of a tokenizer.json; raise KeyError if it is none."""
    vocab = parsed["model"]["vocab"]
    if not isinstance(vocab, dict):  # pairs of a token and its chance
        vocab = {token: i for i, (token, _) in enumerate(vocab)}
    added = {token["content"]: token["id"] for token in parsed.get("added_tokens") or []}
    return {**vocab, **added}


def check_vocabulary(pretrained: str, tokenizer: Tokenizer, *, option: str = "") -> None:
    """Raise DataError if a published model was trained with other tokens than the data has.

    Args:
        pretrained: `from` of the model; empty: nothing is compared.
        tokenizer: of the data. Plain numbers, without a text behind them, are not compared.
        option: the option that names the tokenizer; empty: the data is written with it.
    """
    if not pretrained or tokenizer.kind == "numbers":
        return
    path = folder_if_any(pretrained)
    theirs = vocabulary_of(path) if path else None
    if path is None or theirs is None:
        return
    parsed = tokenizer.description().get("tokenizer")
    ours = vocabulary_of_parsed(parsed) if isinstance(parsed, dict) else {}
    differ = [token for token, number in ours.items() if theirs.get(token) != number]
    if ours and not differ:
        return
    whole = path.suffix == GGUF or is_hub_name(pretrained)
    file = pretrained if whole else f"{pretrained}/{TOKENIZER}"
    found = (
        f"{len(differ):,} of its tokens have another number there, {differ[0]!r} among them"
        if differ
        else f"it is of another kind than {file}"
    )
    remedy = (
        f"Set {option}={file}."
        if option
        else f"Write the data with the model's: jtrain data prepare FILES --tokenizer {file} "
        f"--out DIR"
    )
    raise DataError(
        f"the data has the tokenizer {describe_tokenizer(tokenizer)}, and model.from={pretrained} "
        f"was trained with another one: {found}. {remedy}"
    )
