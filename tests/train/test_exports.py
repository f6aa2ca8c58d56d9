"""Exports of runs: published models, adapters and programs come back as they were trained."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import published_models as published
import pytest
from comparison import assert_close, bitwise
from safetensors.numpy import load_file

import jtrain as jt
from jtrain.cli import main
from jtrain.core.pytree import named_leaves
from jtrain.data.text.tokenizers import BPE, ByteTokenizer
from jtrain.errors import DataError
from jtrain.models.layers.block_stack import unstack_layers
from jtrain.models.pretrained.source import PretrainedWeights, check_vocabulary
from jtrain.train import export

LANGUAGE = """
experiment: language
steps: 1
batch: 8
data: {kind: random, vocab: 31, context: 8}
model: {from: hf}
optimizer: {kind: sgd, lr: 1.0e-30}
evaluate: {every: 0}
"""


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory):
    """A run of one step that changes nothing."""
    folder = tmp_path_factory.mktemp("published")
    published.write_model(folder / "hf", published.golden("llama31"))
    (folder / "hf" / "tokenizer.json").write_text(json.dumps(tokenizer(a=0, b=1)))
    (folder / "tuned.yaml").write_text(LANGUAGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["run", "tuned.yaml"]) == 0
    return folder


@pytest.fixture(name="project")
def _project(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def tokenizer(**vocab: int):
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    return {"version": "1.0", "model": model, "added_tokens": []}


@pytest.mark.thorough
def test_an_export_of_what_was_not_trained_is_the_source(project, capsys):
    assert main(["export", "tuned", "back", "--to", "hf"]) == 0
    out = capsys.readouterr().out
    assert "back: llama of step 1, " in out
    assert "with tokenizer.json" in out
    back, sent = (load_file(project / name / "model.safetensors") for name in ("back", "hf"))
    assert back.keys() == sent.keys()
    assert all(bitwise(back[name], sent[name]) for name in sent)
    assert main(["export", "tuned", "back", "--to", "hf"]) != 0
    assert "nothing is written over other files" in capsys.readouterr().err


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(tokenizer(a=0, b=1)))
    same, other = (BPE(tokenizer(**v), end="a") for v in ({"a": 0, "b": 1}, {"b": 0, "a": 1}))
    check_vocabulary("hf", same)
    check_vocabulary("", other)
    with pytest.raises(DataError, match=r"2 of its tokens have another number there, '[ab]' among"):
        check_vocabulary("hf", other)
    with pytest.raises(DataError, match=r"another kind than hf/tokenizer.json.*--tokenizer hf/tok"):
        check_vocabulary("hf", ByteTokenizer())


ADAPTED = """
experiment: language
steps: 2
batch: 8
data: {kind: random, vocab: 31, context: 8}
model:
  {layers: 2, heads: 2, width: 16, norm: rms, activation: swiglu, bias: false,
   positions: {kind: rotary}, scan: true}
lora: {rank: 2, "on": ["*kernel", tokens], frozen: nf4}
optimizer: {kind: adam, lr: 1.0e-2}
evaluate: {every: 0}
parallel: {kind: single}
"""


@pytest.mark.thorough
def test_the_terms_are_added(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "terms.yaml").write_text(ADAPTED)
    assert main(["run", "terms.yaml"]) == 0
    assert main(["export", "terms", "out", "--to", "hf"]) == 0
    run, source = jt.load("terms"), PretrainedWeights(tmp_path / "out")
    assert any(np.abs(x["b"]).max() > 0 for x in jax.device_get(run.params).values())
    want = named_leaves(unstack_layers(run.merged))
    found = source.read(source.found)
    assert found.keys() == want.keys()
    for name, leaf in want.items():
        assert_close(found[name], leaf, 1e-6)  # sums of two numbers
    assert main(["export", "terms", "out.safetensors", "--to", "safetensors"]) == 2
    assert "was trained with lora" in (text := capsys.readouterr().err)
    assert "jtrain export terms out --to hf" in text


@pytest.mark.thorough
def test_the_adapter_of_a_run_is_added_to_its_base(project, capsys):
    terms = "model={from: hf, scan: true}", "lora={rank: 2, on: ['*/kernel']}", "optimizer.lr=0.1"
    assert main(["run", "tuned.yaml", "name=terms", *terms]) == 0
    assert main(["export", "terms", "terms-peft", "--to", "peft"]) == 0
    assert "terms-peft: adapter of step 1" in capsys.readouterr().out
    source, want = PretrainedWeights("terms-peft"), unstack_layers(jt.load("terms").merged)
    found = source.read(source.found)
    for name, leaf in named_leaves(want).items():
        assert_close(found[name], leaf, 1e-6)
    assert main(["export", "tuned", "none", "--to", "peft"]) != 0
    assert "was trained without lora, so it has no adapter" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_predict_that_reads_the_mask_is_exported(tmp_path, monkeypatch):
    """As that of images does, whose rows that the mask hides are zeros."""

    def predict(weights, batch):
        (params, _), row = weights, batch["row"]
        return jnp.where(batch["mask"][:, None], batch["x"] @ params["w"], 0) + row[:, None]

    experiment, params = types.SimpleNamespace(predict=predict), jnp.arange(6.0).reshape(2, 3)
    inputs = {"x": jax.ShapeDtypeStruct((2,), jnp.float32)}
    facts = {"config": None, "step": 3, "extra": {}, "inputs": inputs, "outputs": lambda: predict}
    run = types.SimpleNamespace(experiment=experiment, params={"w": params}, **facts)
    pytest.importorskip("flatbuffers")
    monkeypatch.setattr(export, "load", lambda *args, **named: run)
    found = export.export_stablehlo("run", "newest", tmp_path / "served")
    assert found["inputs"] == {"x": "float32[b,2]"}
    function = jax.export.deserialize(bytearray((tmp_path / "served/model.stablehlo").read_bytes()))
    arrays, x = load_file(tmp_path / "served/weights.safetensors"), np.float32([[1, 0], [0, 1]])
    got = function.call([arrays[name] for name in found["weights"]], {"x": x})
    np.testing.assert_array_equal(got, [[0, 1, 2], [3, 4, 5]])
