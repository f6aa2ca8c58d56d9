"""Conversion of timm and torchvision weights to the parameters of a ResNet or a ViT.

Arrays are numpy's, `{name: x.numpy() for name, x in net.state_dict().items()}` of a torch module;
no torch is needed here. Names and transforms are those of `jtrain.models.pretrained.families`.
"""

from collections.abc import Mapping
from typing import TypeAlias

import jax
import numpy as np

from jtrain.core.types import Extra, Params
from jtrain.errors import CheckpointError
from jtrain.models.pretrained.families.resnet import TIMM_RESNET
from jtrain.models.pretrained.families.vit import TIMM_VIT
from jtrain.models.pretrained.family import Family
from jtrain.models.pretrained.tensors_table import model_shapes
from jtrain.models.resnet import ResNet
from jtrain.models.vit import ViT

Weights: TypeAlias = Mapping[str, np.ndarray]


def resnet_from_timm(values: ResNet, weights: Weights) -> tuple[Params, Extra]:
    """Return the parameters and running statistics of a ResNet from torchvision's or timm's names.

    Raises:
        CheckpointError: with every weight that is missing, unused or of another shape.
    """
    return _fill(values, TIMM_RESNET, weights)


def vit_from_timm(values: ViT, weights: Weights) -> tuple[Params, Extra]:
    """Return the parameters of a ViT that reads its class token from timm's names.

    Raises:
        CheckpointError: with every weight that is missing, unused or of another shape.
    """
    return _fill(values, TIMM_VIT, weights)


def _fill(values: ResNet | ViT, family: Family, weights: Weights) -> tuple[Params, Extra]:
    """Return the model's parameters and `extra` with the arrays of `weights`."""
    shapes, found, wrong = model_shapes(values), {}, []
    leaves = {leaf.theirs[0]: leaf for leaf in family.leaves(values)}  # a tensor each
    for theirs, leaf in leaves.items():
        ours = leaf.ours
        if theirs not in weights:
            wrong.append(f"{theirs}: missing")
        elif ours not in shapes:
            wrong.append(f"{theirs}: the model has no {ours}")
        else:
            array = np.asarray(weights[theirs])
            (want,) = jax.eval_shape(leaf.transform.split, shapes[ours])
            if array.shape != want.shape:
                wrong.append(f"{theirs}: is {array.shape} as {ours}, which takes {want.shape}")
            else:
                found[ours] = leaf.transform.join((array,))
    filled = {leaf.ours for leaf in leaves.values()}
    wrong += [f"{n}: unused" for n in weights if n not in leaves and not n.endswith(family.ignored)]
    wrong += [f"{ours}: no weight for it" for ours in shapes if ours not in filled]
    if wrong:
        raise CheckpointError(
            f"these weights are not those of this {values.kind}:\n  " + "\n  ".join(wrong) + "\n"
            "Set the values of the model that was trained (preset=..., image, classes)."
        )
    like = jax.eval_shape(values.build().init, jax.random.key(0))
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in shapes])
