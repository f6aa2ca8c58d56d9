"""A run that starts from a published model, and what is exported of it."""

import json

import jax
import numpy as np
import published_models as published
import pytest
from comparison import assert_close, bitwise
from safetensors.numpy import load_file

from jtrain.cli import main
from jtrain.config.resolve import resolve
from jtrain.data.text.bpe import BPE
from jtrain.data.text.tokenizer import ByteTokenizer
from jtrain.errors import DataError
from jtrain.models.pretrained.vocabulary import check_vocabulary

CONFIG = """
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
    (folder / "tuned.yaml").write_text(CONFIG)
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


@pytest.mark.thorough
@pytest.mark.parametrize("lora", ["", 'lora: {rank: 2, "on": ["*kernel"]}'])
def test_a_head_beside_a_tied_embedding_is_trained_and_exported(
    lora, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    golden = published.golden("llama31")  # tied
    head = published.draw("lm_head.weight", (31, 16))
    published.write_model(tmp_path / "hf", golden, **{"lm_head.weight": head})
    (tmp_path / "own.yaml").write_text(CONFIG + lora)
    assert main(["run", "own.yaml"]) == 0
    assert "ties the head to the embedding, and lm_head.weight differs" in capsys.readouterr().out
    assert main(["run", "own.yaml", "steps=2"]) == 0
    assert main(["export", "own", "back", "--to", "hf"]) == 0
    assert (
        json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    back, sent = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "hf"))
    assert back.keys() == sent.keys()
    assert all(bitwise(back[name], sent[name]) for name in sent)


@pytest.mark.thorough
def test_a_stored_config_needs_no_folder(project):
    (project / "hf").rename(project / "gone")
    try:
        model = resolve(project / "runs/tuned/config.yaml").config.model
    finally:
        (project / "gone").rename(project / "hf")
    assert (model.pretrained, model.width, model.tied) == ("hf", 16, True)


@pytest.mark.thorough
def test_stablehlo_gives_the_logits_for_any_number_of_rows(project):
    pytest.importorskip("flatbuffers")
    assert main(["export", "tuned", "served", "--to", "stablehlo"]) == 0
    said = json.loads((project / "served/signature.json").read_text())
    assert said["inputs"] == {"tokens": "int32[b,32]"}
    function = jax.export.deserialize(bytearray((project / "served/model.stablehlo").read_bytes()))
    arrays = load_file(project / "served/weights.safetensors")
    golden = published.golden("llama31")
    for rows in (1, 2):
        tokens = np.zeros((rows, 32), np.int32)
        tokens[:, :12] = golden["tokens"][:rows]
        logits = function.call([arrays[name] for name in said["weights"]], {"tokens": tokens})
        assert_close(logits[:, :12], golden["outputs"][:rows], 1e-5)


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


def test_data_for_a_file_takes_its_tokenizer(tmp_path, monkeypatch):
    (path := tmp_path / "a.gguf").touch()
    of_file = lambda path: {"b": 0, "a": 1}
    monkeypatch.setattr("jtrain.models.pretrained.vocabulary.vocabulary_of", of_file)
    with pytest.raises(DataError, match=rf"jtrain data prepare .* --tokenizer {path} --out DIR"):
        check_vocabulary(str(path), BPE(tokenizer(a=0, b=1), end="a"))
    with pytest.raises(DataError, match=rf"another kind than.*Set data.tokenizer={path}"):
        check_vocabulary(str(path), ByteTokenizer(), option="data.tokenizer")


def test_a_type_is_for_hf_alone(capsys):
    assert main(["export", "tuned", "x", "--to", "safetensors", "--dtype", "float16"]) == 2
    assert "--dtype is for --to hf" in capsys.readouterr().err
