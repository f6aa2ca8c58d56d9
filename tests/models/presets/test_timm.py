"""Published weights in our networks give the logits of the networks they come from.

The comparison needs torch and timm: `pip install 'jtrain[timm]'`, and `-m slow`.
"""

import jax
import numpy as np
import pytest
from comparison import assert_close

from jtrain.errors import CheckpointError
from jtrain.models.presets.timm import resnet_from_timm, vit_from_timm
from jtrain.models.resnet import ResNet
from jtrain.models.vit import ViT

RESNET = ResNet(image=(8, 8, 1), blocks=(1,), width=2, classes=3)


def weights_of(values):
    """Make weights with torchvision's names and shapes of a ResNet with one basic block."""
    assert values.blocks == (1,)
    draw, w = np.random.default_rng(0), values.width
    shapes = {"conv1.weight": (w, 1, 7, 7), "fc.weight": (3, w), "fc.bias": (3,)}
    shapes |= {f"layer1.0.conv{i}.weight": (w, w, 3, 3) for i in (1, 2)}
    norms = ("weight", "bias", "running_mean", "running_var")
    shapes |= {f"{bn}.{n}": (w,) for bn in ("bn1", "layer1.0.bn1", "layer1.0.bn2") for n in norms}
    arrays = {name: draw.random(shape, np.float32) for name, shape in shapes.items()}
    return {**arrays, "bn1.num_batches_tracked": np.int64(3)}


def test_every_array_finds_its_place():
    weights = weights_of(RESNET)
    params, extra = resnet_from_timm(RESNET, weights)
    like = jax.eval_shape(RESNET.build().init, jax.random.key(0))
    same = jax.tree.map(lambda a, b: a.shape == b.shape, (params, extra), like)
    assert all(jax.tree.leaves(same))
    np.testing.assert_array_equal(
        params["stem"]["kernel"][2, 3, 0], weights["conv1.weight"][:, 0, 2, 3]
    )
    np.testing.assert_array_equal(extra["norm"]["var"], weights["bn1.running_var"])


def test_all_that_does_not_fit_is_told_at_once():
    weights = weights_of(RESNET)
    weights["other"] = weights.pop("fc.bias")
    weights["fc.weight"] = weights["fc.weight"][:2]
    with pytest.raises(CheckpointError) as caught:
        resnet_from_timm(RESNET, weights)
    told = str(caught.value)
    for words in ("fc.bias: missing", "other: unused", "fc.weight: is (2, 2) as head/kernel"):
        assert words in told
    assert "Set the values of the model" in told


def test_a_vit_without_a_class_token_takes_none():
    values = ViT(image=(4, 4, 1), patch=2, layers=1, heads=1, width=4, classes=2, pool="mean")
    with pytest.raises(CheckpointError, match="cls_token: missing"):
        vit_from_timm(values, {})


SIZE = {"image": (64, 64, 3), "classes": 11}
NETS = {
    "resnet18": (ResNet(preset="resnet18", **SIZE), resnet_from_timm, {}),
    "resnet50": (ResNet(preset="resnet50", **SIZE), resnet_from_timm, {}),
    "vit_base_patch16_224": (
        ViT(preset="vit-b16", **SIZE, layers=2, width=96, heads=4),
        vit_from_timm,
        {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 4},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_gives_the_logits_of_timm(name):
    torch, timm = pytest.importorskip("torch"), pytest.importorskip("timm")
    values, fill, sizes = NETS[name]
    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=values.classes, **sizes).eval()
    for part in net.modules():
        if isinstance(part, torch.nn.BatchNorm2d):  # at the start it does nothing
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)
            part.weight.data.uniform_(0.2, 0.6)
            part.bias.data.normal_(0, 0.1)
    x = np.random.default_rng(0).standard_normal((2, *values.image)).astype(np.float32)
    with torch.no_grad():
        want = net(torch.tensor(x).permute(0, 3, 1, 2)).numpy()
    params, extra = fill(values, {n: array.numpy() for n, array in net.state_dict().items()})
    got, _ = jax.jit(values.build().apply, static_argnames="train")(params, extra, x)
    assert np.abs(want).max() > 0.1
    assert_close(got, want, 1e-4)
