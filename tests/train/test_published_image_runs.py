"""A run that starts from a published image classifier: a new head, other images, and its export."""

import json

import numpy as np
import published_models as published
import pytest
from comparison import bitwise
from image_files import write_fashion_mnist
from safetensors.numpy import load_file

from jtrain.cli import main

CONFIG = """
experiment: fashion_mnist
steps: 1
batch: 8
data: {kind: fashion_mnist, rows: 8}
model: {kind: KIND, from: hf}
optimizer: {kind: sgd, lr: 1.0e-30}
evaluate: {every: 0}
"""
NEW_HEAD = "init_from.exclude=[head/*]"


@pytest.fixture(name="start")
def _start(tmp_path, monkeypatch):
    """Return a function that writes a folder, data and a config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JTRAIN_DATA", str(tmp_path))
    write_fashion_mnist(tmp_path / "fashion-mnist")

    def start(kind: str):
        published.write_model(tmp_path / "hf", published.golden(kind))
        (tmp_path / "tuned.yaml").write_text(CONFIG.replace("KIND", kind))
        return tmp_path

    return start


@pytest.mark.thorough
def test_data_of_other_classes_need_a_new_head(start, capsys):
    start("vit")
    assert main(["run", "tuned.yaml"]) != 0
    told = capsys.readouterr().err
    assert "head/bias" in told
    assert "patches" not in told
    assert "For a new one, which starts by the seed: init_from.exclude='[head/*]'" in told


@pytest.mark.thorough
def test_images_are_not_resized_to_another_size_than_the_positions_have(start, capsys):
    start("vit")
    sizes = ["model.pixels.height=12", "model.pixels.width=12"]
    assert main(["run", "tuned.yaml", NEW_HEAD, *sizes]) != 0
    told = capsys.readouterr().err
    assert "positions" in told
    assert "Have them resized to that of the source: model.pixels.height and" in told


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "head"), [("vit", "classifier"), ("resnet", "classifier.1")])
def test_an_export_is_the_source_but_for_the_new_head(start, kind, head, capsys):
    folder, golden = start(kind), published.golden(kind)
    ends = {f"{head}.{end}": shape for end, shape in {"weight": (10, 16), "bias": (10,)}.items()}
    classes = {str(i): f"kind of wolf {i}" for i in range(10)}
    golden["config"] |= {"id2label": classes}  # as many as the data have, of another head
    published.write_model(
        folder / "hf", golden, **{n: published.draw(n, shape) for n, shape in ends.items()}
    )
    frozen = ["model.statistics=running"] if kind == "resnet" else []
    assert main(["run", "tuned.yaml", NEW_HEAD, *frozen]) == 0
    assert "no preprocessor_config.json says" in capsys.readouterr().out
    assert main(["export", "tuned", "back", "--to", "hf"]) == 0
    back, sent = (load_file(folder / name / "model.safetensors") for name in ("back", "hf"))
    sent = {name: x for name, x in sent.items() if not name.endswith("num_batches_tracked")}
    assert back.keys() == sent.keys()
    for name, array in sent.items():
        if name.startswith(f"{head}."):
            assert back[name].shape == (10, *array.shape[1:])
        else:
            assert bitwise(back[name], array), name
    config = json.loads((folder / "back/config.json").read_text())
    assert config["id2label"] == {str(i): f"LABEL_{i}" for i in range(10)}
    written = json.loads((folder / "back/preprocessor_config.json").read_text())
    size = {"height": 8, "width": 8} if kind == "vit" else None
    assert (written["do_resize"], written.get("size")) == (kind == "vit", size)


@pytest.mark.thorough
def test_frozen_layers_stay_and_the_head_is_trained(start):
    folder = start("resnet")
    groups = "optimizer.groups=[{match: head/*}, {match: '*', freeze: true}]"
    settings = [NEW_HEAD, groups, "model.statistics=running", "optimizer.lr=0.1"]
    assert main(["run", "tuned.yaml", *settings]) == 0
    assert main(["export", "tuned", "back", "--to", "hf"]) == 0
    back, sent = (load_file(folder / name / "model.safetensors") for name in ("back", "hf"))
    same = {name for name, x in back.items() if x.shape == sent[name].shape}
    assert {name for name in back if name not in same} == {
        "classifier.1.weight",
        "classifier.1.bias",
    }
    assert all(bitwise(back[name], sent[name]) for name in same)
    assert np.abs(back["classifier.1.bias"]).max() > 1e-3  # it starts at 0
