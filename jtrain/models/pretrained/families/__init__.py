"""The families of published models, and which of them a config belongs to."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jtrain.config.dump import flatten, plain_values
from jtrain.errors import CheckpointError
from jtrain.errors.spelling import did_you_mean
from jtrain.models.images import Pixels
from jtrain.models.pretrained.families.convolutional import EFFICIENTNET_LITE, RESNET, TIMM_RESNET
from jtrain.models.pretrained.families.entries import EXPLICIT
from jtrain.models.pretrained.families.images import TIMM_VIT, VIT
from jtrain.models.pretrained.families.llama import (
    GEMMA2,
    GEMMA3,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
)
from jtrain.models.pretrained.families.text import BERT, GPT2
from jtrain.models.pretrained.family import Family, HFConfig, Values

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, GEMMA2, GEMMA3, GPT2, BERT),
        *(VIT, RESNET, TIMM_VIT, TIMM_RESNET, EFFICIENTNET_LITE),
    )
}
ARCHITECTURES: Mapping[str, Family] = {
    name: family for family in FAMILIES.values() for name in sorted(family.timm)
}
"""Families by the name of an architecture of timm."""

# Fields that change how a model is computed or trained, and not which function it is.
FREE = {"preset", "from", "dropout", "attention", "scan", "remat", "saved", "statistics", "quiet"}
FREE |= {f"experts.{name}" for name in ("uneven", "group", "z")}
FREE |= {"multi_token_depth", "multi_token_weight"}  # no other part of the model reads them
# Images of other sizes and ranges are changed before the network: `Pixels`.
OF_IMAGES = {"image", *(f"pixels.{field.name}" for field in dataclasses.fields(Pixels))}


def find_family(hf: HFConfig, where: str) -> Family:
    """Return the family of a config.json, whose path is `where`.

    Raises:
        CheckpointError: if there is no such family, with the nearest names.
    """
    if name := family_name(hf):
        return FAMILIES[name]
    timm = "architecture" in hf and "model_type" not in hf
    key, known = ("architecture", ARCHITECTURES) if timm else ("model_type", FAMILIES)
    name = hf.get(key)
    raise CheckpointError(
        f"{where} has {key}={name!r}, and jtrain has {', '.join(known)}"
        f"{did_you_mean(str(name), known)}. Use a model of one of them, or load single tensors "
        f"into a model of yours by init_from.rename."
    )


def family_name(hf: HFConfig) -> str:
    """Return the name of the family of a config.json, of transformers or of timm; empty if none."""
    name, architecture = hf.get("model_type"), hf.get("architecture")
    if isinstance(name, str) and name in FAMILIES and not FAMILIES[name].timm:
        return name
    found = ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    return found.name if found and name is None else ""


def family_of(model: Any, preferred: str = "") -> Family:
    """Return the family that computes the function of a config of ours.

    Args:
        preferred: the name of the family to take if it computes the same.

    Raises:
        CheckpointError: if none does, with what the nearest one computes otherwise.
    """
    names = sorted(FAMILIES, key=lambda name: name != preferred)
    differences = {}
    for family in (FAMILIES[name] for name in names if FAMILIES[name].kind == model.kind):
        differences[family.name] = _differences(family, model)
        if not differences[family.name]:
            return family
    if not differences:
        raise CheckpointError(
            f"no published family has models of kind {model.kind}; families exist for "
            f"{', '.join(sorted({family.kind for family in FAMILIES.values()}))}. Export the "
            f"tensors under jtrain's names: --to safetensors"
        )
    nearest = min(differences, key=lambda name: len(differences[name]))
    words = ", ".join(
        f"{key}={ours} (there {theirs})" for key, ours, theirs in differences[nearest]
    )
    raise CheckpointError(
        f"no published family computes this model: the nearest, {nearest}, differs in {words}. "
        f"Export the tensors under jtrain's names: --to safetensors"
    )


def _differences(family: Family, model: Any) -> list[tuple[str, Any, Any]]:
    """Return each field in which a model of the family differs, ours first."""
    explicit = {
        name: getattr(model, field)
        for name, field in EXPLICIT.items()
        if hasattr(model, name) and hasattr(model, field)
    }
    ours = dataclasses.replace(model, **explicit)
    try:
        values = family.read({"model_type": family.name, **family.hf(model)})
        theirs = type(model)(**values)
    except (CheckpointError, AttributeError, TypeError, ValueError, KeyError):
        return [("family", "another function", family.name)] * len(flatten(ours))
    before, after = flatten(ours), flatten(theirs)
    keys = [key for key in {**before, **after} if key not in FREE | OF_IMAGES]
    return [(k, before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)]


def model_values(model: Any) -> Values:
    """Return all fields of a config that make the function, `kind` and no preset included.

    Fields that only change how it is computed or trained are left out.
    """
    known = plain_values(model)
    fields = {key: value for key, value in known.items() if key not in FREE}
    return fields | ({"preset": "none"} if "preset" in known else {})


def build_model(cls: Any, family: Family, hf: HFConfig) -> Any:
    """Return our config of a class; raise CheckpointError if the config.json contradicts itself."""
    values = family.read(hf)
    try:
        return cls(**values)
    except ValidationError as error:
        words = "; ".join(": ".join([*map(str, x["loc"]), x["msg"]]) for x in error.errors())
        raise CheckpointError(
            f"config.json of the family {family.name} contradicts itself, under jtrain's names of "
            f"its entries: {words.rstrip('.')}. Download the folder again."
        ) from None
