"""Export of a run with LoRA: the weights with the terms added."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from comparison import assert_close

import jtrain as jt
from jtrain.cli import main
from jtrain.core import pytree
from jtrain.core.pytree import named_leaves
from jtrain.finetune.lora import Lora, build_adapter
from jtrain.models.layers.block_stack import unstack_layers
from jtrain.models.pretrained.source import PretrainedWeights
from jtrain.models.resnet import ResNet
from jtrain.models.vit import ViT
from jtrain.train.export_hf import with_sizes_of_data

CONFIG = """
experiment: language
steps: 2
batch: 8
data: {{kind: random, vocab: 31, context: 8}}
model:
  {{layers: 2, heads: 2, width: 16, norm: rms, activation: swiglu, bias: false,
   positions: {{kind: rotary}}, scan: {scan}}}
lora: {{rank: 2, "on": [{on}], frozen: {frozen}}}
optimizer: {{kind: adam, lr: 1.0e-2}}
evaluate: {{every: 0}}
parallel: {{kind: single}}
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("scan", "frozen", "on"),
    [
        ("false", "as_is", '"*kernel"'),
        ("true", "nf4", '"*kernel", tokens'),
    ],
)
def test_the_terms_are_added(scan, frozen, on, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "terms.yaml").write_text(CONFIG.format(scan=scan, frozen=frozen, on=on))
    assert main(["run", "terms.yaml"]) == 0
    assert main(["export", "terms", "out", "--to", "hf"]) == 0
    run, source = jt.load("terms"), PretrainedWeights(tmp_path / "out")
    assert any(np.abs(x["b"]).max() > 0 for x in jax.device_get(run.params).values())
    want = named_leaves(unstack_layers(run.merged) if scan == "true" else run.merged)
    found = source.read(source.found)
    assert found.keys() == want.keys()
    for name, leaf in want.items():
        assert_close(found[name], leaf, 1e-6)  # sums of two numbers
    assert main(["export", "terms", "out.safetensors", "--to", "safetensors"]) == 2
    assert "was trained with lora" in (text := capsys.readouterr().err)
    assert "jtrain export terms out --to hf" in text


NETS = {
    "vit": ViT(image=(8, 8, 3), patch=4, layers=1, heads=2, width=64, classes=5),
    "resnet": ResNet(image=(224, 224, 1), blocks=(1,), width=8, classes=5),
}


@pytest.mark.parametrize("frozen", ["as_is", "int8", "nf4"])
@pytest.mark.parametrize("kind", NETS)
def test_classes_and_images_are_found_in_frozen_leaves_of_any_type(kind, frozen):
    model, settings = NETS[kind], Lora(rank=2, on=("*kernel",), frozen=frozen)
    built, key = model.build(), jax.random.key(0)
    params, extra = jax.eval_shape(built.init, key)
    adapter = build_adapter(settings, params, built.dims, built.linear)
    terms, carried = jax.eval_shape(adapter.attach, (params, extra), key)
    record = pytree.describe({"params": terms, "extra": carried})
    unknown = dataclasses.replace(model, image=(0, 0, 0), classes=0)
    assert with_sizes_of_data(unknown, Path(), 0, record) == model
