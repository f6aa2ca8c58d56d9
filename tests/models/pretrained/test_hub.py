"""Names on the Hugging Face Hub: downloads, pins, uploads, and what they may have wrong."""

import json
from pathlib import Path

import numpy as np
import published_models as published
import pytest
from fake_hub import FakeHub, forget_commits, serve_hub
from safetensors.numpy import save_file

from jtrain.cli import main
from jtrain.errors import CheckpointError
from jtrain.io.hub import local_folder, pin_commits, push_folder, resolved_commits
from jtrain.models.pretrained.source import PretrainedWeights, read_hf_config
from jtrain.models.transformer import Transformer

pytest.importorskip("huggingface_hub")


@pytest.fixture(name="hub")
def _hub(tmp_path, monkeypatch):
    with serve_hub(tmp_path / "cache", monkeypatch) as hub:
        monkeypatch.chdir(tmp_path)
        yield hub


def put_llama(hub: FakeHub, folder: Path, name: str = "org/small") -> str:
    """Serve a small Llama in two files, with a pickle and a program that nobody asks for."""
    golden = published.golden("llama")
    published.write_model(folder, golden)
    (folder / "model.safetensors").unlink()
    tensors = published.tensors_of(golden)
    weight_map = {x: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, x in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file(
            {x: tensors[x] for x, other in weight_map.items() if other == file}, folder / file
        )
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model.bin").write_text("a pickle")
    (folder / "modeling.py").write_text("a program")
    return hub.put(name, folder)


def test_a_name_is_a_model_and_stands_for_one_commit(hub, tmp_path):
    first = put_llama(hub, tmp_path / "one")
    model = Transformer(pretrained="org/small", dropout=0.1)
    assert (model.layers, model.width) == (2, 16)
    asked = " ".join(hub.asked)
    assert "/config.json" in asked
    assert "/model-0" not in asked, "values need no weights"
    put_llama(hub, tmp_path / "two")  # the branch moves
    source = PretrainedWeights("org/small")
    assert first in source.where
    want = PretrainedWeights(tmp_path / "one")
    for name, array in source.read(source.found).items():
        np.testing.assert_array_equal(array, want.read(want.found)[name])
    asked = " ".join(hub.asked)
    assert "pytorch_model.bin" not in asked
    assert "modeling.py" not in asked
    assert resolved_commits() == {"org/small": first}


def test_what_is_in_the_cache_needs_no_network(hub, tmp_path, monkeypatch):
    old, new = put_llama(hub, tmp_path / "one"), put_llama(hub, tmp_path / "two")
    assert local_folder("org/small").name == new
    assert local_folder(f"org/small@{old}").name == old
    pin_commits({"org/small": old, "org/other": "../../etc"})  # as a resumed run does
    assert local_folder("org/small").name == old
    assert set(resolved_commits()) == {"org/small", f"org/small@{old}"}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pin_commits({"org/small": new})
    assert read_hf_config("org/small")["model_type"] == "llama"
    with pytest.raises(CheckpointError, match=r"HF_HUB_OFFLINE is set.*hf download org/other "):
        local_folder("org/other")
    Path("org/other").mkdir(parents=True)
    assert local_folder("org/other") == Path("org/other"), "a local folder comes first"
    for path in ("a/b/c", "./org/x", "org/model.safetensors", "/etc/x", "~/x"):
        assert local_folder(path) == Path(path)


def test_what_the_hub_refuses_says_what_to_type(hub, tmp_path, monkeypatch):
    put_llama(hub, tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"org/small@v9 has no revision v9. Name a branch"):
        local_folder("org/small@v9")
    with pytest.raises(CheckpointError, match=r"neither a local path nor a model.*set HF_TOKEN"):
        local_folder("org/smal")
    hub.gated.add("org/small")
    with pytest.raises(CheckpointError, match=r"is gated. Accept its terms at http.*set HF_TOKEN"):
        local_folder("org/small")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert local_folder("org/small").is_dir()
    hub.shutdown()
    hub.server_close()
    with pytest.raises(CheckpointError, match=r"the Hub is not asked \(ConnectError") as caught:
        local_folder("org/never")
    assert "hf_secret" not in str(caught.value)


def test_a_folder_is_pushed_as_it_is(hub, tmp_path, monkeypatch):
    folder = published.write_model(tmp_path / "out", published.golden("llama"))
    with pytest.raises(
        CheckpointError, match=r"upload to me/mine failed .*Give a token that may w"
    ):
        push_folder(folder, "me/mine", private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert push_folder(folder, "me/mine", private=True) == f"{hub.url}/me/mine"
    assert "private" in (hub.created.get("visibility"), *hub.created)
    assert hub.pushed == {x.name: x.read_bytes() for x in folder.iterdir()}
    with pytest.raises(CheckpointError, match="upload to mine/a/b failed"):
        push_folder(folder, "mine/a/b", private=False)


RUN = """
experiment: language
name: tuned
steps: 1
batch: 8
data: {kind: random, vocab: 31, context: 8}
model: {from: org/small}
optimizer: {kind: sgd, lr: 1.0e-30}
evaluate: {every: 0}
"""


@pytest.mark.thorough
def test_a_run_keeps_its_commit_and_is_pushed(hub, tmp_path, monkeypatch, capsys):
    first = put_llama(hub, tmp_path / "one")
    (tmp_path / "tuned.yaml").write_text(RUN)
    assert main(["run", "tuned.yaml"]) == 0
    assert f"starts from org/small at commit {first}" in capsys.readouterr().out
    put_llama(hub, tmp_path / "two")
    forget_commits(monkeypatch)  # as another process does
    assert main(["run", "tuned.yaml", "steps=2"]) == 0
    assert json.loads(Path("runs/tuned/run.json").read_text())["hub"] == {"org/small": first}

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main(["export", "tuned", "--to", "hf", "--push", "me/mine"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{hub.url}/me/mine"
    (tmp_path / "back").mkdir()
    for name, content in hub.pushed.items():
        (tmp_path / "back" / name).write_bytes(content)
    sent, back = PretrainedWeights(tmp_path / "one"), PretrainedWeights(tmp_path / "back")
    for name, array in sent.read(sent.found).items():
        np.testing.assert_array_equal(array, back.read(back.found)[name])
