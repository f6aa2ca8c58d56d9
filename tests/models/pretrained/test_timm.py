"""Published weights in our networks give the logits of the networks they come from.

The comparison needs torch and timm: `pip install 'jtrain[timm]'`, and `-m slow`.
"""

import jax
import numpy as np
import pytest
from comparison import assert_close

from jtrain.models.pretrained.source import params_from_timm
from jtrain.models.resnet import ResNet
from jtrain.models.vit import ViT

SIZE = {"image": (64, 64, 3), "classes": 11}
NETS = {
    "resnet18": (ResNet(preset="resnet18", **SIZE), {}),
    "resnet50": (ResNet(preset="resnet50", **SIZE), {}),
    "vit_base_patch16_224": (
        ViT(preset="vit-b16", **SIZE, layers=2, width=96, heads=4),
        {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 4},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_gives_the_logits_of_timm(name):
    torch, timm = pytest.importorskip("torch"), pytest.importorskip("timm")
    values, sizes = NETS[name]
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
    params, extra = params_from_timm(
        values, {n: array.numpy() for n, array in net.state_dict().items()}
    )
    got, _ = jax.jit(values.build().apply, static_argnames="train")(params, extra, x)
    assert np.abs(want).max() > 0.1
    assert_close(got, want, 1e-4)
