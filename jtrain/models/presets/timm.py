"""Conversion of timm and torchvision weights to the parameters of a ResNet or a ViT.

Arrays are numpy's, `{name: x.numpy() for name, x in net.state_dict().items()}` of a torch module;
no torch is needed here.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from jtrain.core.pytree import named_leaves
from jtrain.core.types import Extra, Params
from jtrain.errors import CheckpointError
from jtrain.models.resnet import ResNet
from jtrain.models.vit import ViT

Weights: TypeAlias = Mapping[str, np.ndarray]
Change: TypeAlias = Callable[[np.ndarray], np.ndarray]
Source: TypeAlias = tuple[str, str, Change]  # our name, the published name, and the conversion

SAME: Change = lambda x: x
CONVOLUTION: Change = lambda x: x.transpose(2, 3, 1, 0)  # o i k k -> k k i o


def resnet_from_timm(values: ResNet, weights: Weights) -> tuple[Params, Extra]:
    """Return the parameters and running statistics of a ResNet from torchvision's or timm's names.

    Raises:
        CheckpointError: with every weight that is missing, unused or of another shape.
    """
    return _fill(values, list(_resnet(values)), weights)


def vit_from_timm(values: ViT, weights: Weights) -> tuple[Params, Extra]:
    """Return the parameters of a ViT that reads its class token from timm's names.

    Raises:
        CheckpointError: with every weight that is missing, unused or of another shape.
    """
    return _fill(values, list(_vit(values)), weights)


def _resnet(values: ResNet) -> Iterator[Source]:
    yield "stem/kernel", "conv1.weight", CONVOLUTION
    yield from _norm("norm", "bn1")
    index = 0
    for stage, count in enumerate(values.blocks, 1):
        for number in range(count):
            ours, theirs = f"blocks/{index}", f"layer{stage}.{number}"
            index += 1
            for i in range(3 if values.bottleneck else 2):
                convolution = f"{ours}/convolutions/{i}/kernel"
                yield convolution, f"{theirs}.conv{i + 1}.weight", CONVOLUTION
                yield from _norm(f"{ours}/norms/{i}", f"{theirs}.bn{i + 1}")
            if number == 0 and (stage > 1 or values.bottleneck):
                yield f"{ours}/short/kernel", f"{theirs}.downsample.0.weight", CONVOLUTION
                yield from _norm(f"{ours}/norm_short", f"{theirs}.downsample.1")
    yield from _linear("head", "fc")


def _vit(values: ViT) -> Iterator[Source]:
    heads = values.heads
    flat = lambda x: x.transpose(0, 2, 3, 1).reshape(len(x), -1)  # o i k k -> o (k k i)
    yield "patches/kernel", "patch_embed.proj.weight", lambda x: _kernel(flat(x))
    yield "patches/bias", "patch_embed.proj.bias", SAME
    yield "token", "cls_token", lambda x: x.reshape(-1)
    yield "positions", "pos_embed", lambda x: x[0]
    for i in range(values.layers):
        ours, theirs = f"blocks/{i}", f"blocks.{i}"
        # Published columns are query, key and value, then heads; ours are heads first.
        by_head = lambda x: x.reshape(3, heads, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
        yield f"{ours}/qkv/kernel", f"{theirs}.attn.qkv.weight", lambda x, f=by_head: f(x).T
        yield f"{ours}/qkv/bias", f"{theirs}.attn.qkv.bias", by_head
        for our, their in (("out", "attn.proj"), ("up", "mlp.fc1"), ("down", "mlp.fc2")):
            yield from _linear(f"{ours}/{our}", f"{theirs}.{their}")
        for our, their in (("norm_attention", "norm1"), ("norm_mlp", "norm2")):
            yield from _scale(f"{ours}/{our}", f"{theirs}.{their}")
    yield from _scale("norm", "norm")
    yield from _linear("head", "head")


def _norm(ours: str, theirs: str) -> Iterator[Source]:
    yield from _scale(ours, theirs)
    yield f"{ours}/mean", f"{theirs}.running_mean", SAME
    yield f"{ours}/var", f"{theirs}.running_var", SAME


def _scale(ours: str, theirs: str) -> Iterator[Source]:
    yield f"{ours}/scale", f"{theirs}.weight", SAME
    yield f"{ours}/bias", f"{theirs}.bias", SAME


def _linear(ours: str, theirs: str) -> Iterator[Source]:
    yield f"{ours}/kernel", f"{theirs}.weight", _kernel
    yield f"{ours}/bias", f"{theirs}.bias", SAME


def _kernel(x: np.ndarray) -> np.ndarray:
    """Return a kernel o i in the layout of `Linear`: wide dim last."""
    return x.T if x.shape[0] >= x.shape[1] else x


def _fill(values: Any, sources: list[Source], weights: Weights) -> tuple[Params, Extra]:
    """Return the model's parameters and `extra` with the arrays of `weights`."""
    like = jax.eval_shape(values.build().init, jax.random.key(0))
    shapes = {name.partition("/")[2]: leaf.shape for name, leaf in named_leaves(like).items()}
    found, wrong = {}, []
    for ours, theirs, change in sources:
        if theirs not in weights:
            wrong.append(f"{theirs}: missing")
        elif ours not in shapes:
            wrong.append(f"{theirs}: the model has no {ours}")
        else:
            found[ours] = np.ascontiguousarray(change(np.asarray(weights[theirs])))
            if found[ours].shape != shapes[ours]:
                wrong.append(f"{theirs}: is {found[ours].shape} as {ours}, which is {shapes[ours]}")
    used = {theirs for _, theirs, _ in sources} | _counters(weights)
    filled = {ours for ours, _, _ in sources}
    wrong += [f"{name}: unused" for name in weights if name not in used]
    wrong += [f"{ours}: no weight for it" for ours in shapes if ours not in filled]
    if wrong:
        raise CheckpointError(
            f"these weights are not those of this {values.kind}:\n  " + "\n  ".join(wrong) + "\n"
            "Set the values of the model that was trained (preset=..., image, classes)."
        )
    leaves = (found[name] for name in shapes)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _counters(weights: Weights) -> set[str]:
    """Return the norms' counters of batches, which a fixed momentum does not read."""
    return {name for name in weights if name.endswith(".num_batches_tracked")}
