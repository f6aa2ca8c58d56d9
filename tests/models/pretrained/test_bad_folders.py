"""What a folder of a published model may have wrong, and what the message says."""

import json
import re
import sys
import types

import numpy as np
import published_models as published
import pytest

from jtrain.errors import CheckpointError
from jtrain.models.pretrained.source import PretrainedWeights
from jtrain.models.transformer import Transformer


@pytest.fixture(name="golden", scope="module")
def _golden():
    return published.golden("llama")


def message(folder) -> str:
    with pytest.raises(CheckpointError) as found:
        PretrainedWeights(folder)
    return str(found.value)


def test_an_unknown_family_names_the_near_ones(golden, tmp_path):
    golden = {**golden, "config": {**golden["config"], "model_type": "lama"}}
    text = message(published.write_model(tmp_path, golden))
    assert "model_type='lama'" in text
    assert "did you mean llama?" in text


def test_all_tensors_that_do_not_fit_are_in_one_table(golden, tmp_path):
    layer = "model.layers.1"
    changes = {
        "model.norm.weight": None,
        f"{layer}.mlp.up_proj.weight": np.zeros((20, 16), np.float32),
        "model.layers.7.mlp.up_proj.weight": np.zeros((24, 16), np.float32),
    }
    text = message(published.write_model(tmp_path, golden, **changes))
    assert "has 3 tensors that do not fit the llama of config.json" in text
    assert re.search(r"model.norm.weight +is missing", text)
    assert re.search(r"1.mlp.up_proj.weight +is 20 x 16, and config.json says 24 x 16", text)
    assert re.search(r"7.mlp.up_proj.weight +is surplus", text)
    assert PretrainedWeights(published.write_model(tmp_path, golden)).found


def test_names_without_the_prefix_fit(golden, tmp_path):
    bare = {name: name.removeprefix("model.") for name in golden["tensors"]}
    arrays = published.tensors_of(golden)
    changes = {name: None for name in arrays} | {bare[name]: x for name, x in arrays.items()}
    changes["layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)  # of old files
    source = PretrainedWeights(published.write_model(tmp_path, golden, **changes))
    np.testing.assert_array_equal(source.read(source.found)["head"], arrays["lm_head.weight"])


@pytest.mark.parametrize(
    ("entry", "value"),
    [("hidden_act", "relu"), ("mlp_bias", True), ("rope_parameters", {"rope_type": "yarn"})],
)
def test_a_function_that_is_not_computed_is_refused(golden, tmp_path, entry, value):
    golden = {**golden, "config": {**golden["config"], entry: value}}
    text = message(published.write_model(tmp_path, golden))
    assert "jtrain computes only" in text
    assert (value["rope_type"] if isinstance(value, dict) else str(value)) in text


def test_a_config_that_lacks_a_size_or_is_broken(golden, tmp_path):
    folder = published.write_model(tmp_path, golden)
    config = {key: x for key, x in golden["config"].items() if key != "hidden_size"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "config.json of the family llama should have hidden_size" in message(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is no JSON" in message(folder)
    (folder / "config.json").write_text("[]")
    assert "holds a list" in message(folder)
    (folder / "config.json").unlink()
    assert "is no folder with a config.json and no .gguf file" in message(folder)


def test_a_truncated_file_is_refused(golden, tmp_path):
    folder = published.write_model(tmp_path, golden)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "is no complete file of tensors" in message(folder)
    assert "Download or write it again" in message(folder)


def test_a_pickle_is_refused_with_the_way_to_convert_it(golden, tmp_path):
    folder = published.write_model(tmp_path, golden)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    text = message(folder)
    assert "pytorch_model.bin is a pickle, and reading a pickle runs any program" in text
    assert "weights_only=True" in text
    command = re.search(r'python -c "(.*)"', text)
    assert command, text
    compile(command[1], "advice", "exec")
    assert "is a pickle" in message(folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").unlink()
    assert "no file of tensors. Download model.safetensors" in message(folder)


def test_one_file_is_made_of_several_pickles(golden, tmp_path, monkeypatch):
    folder = published.write_model(tmp_path, golden)
    (folder / "model.safetensors").unlink()
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for name in (*names, "optimizer.pt", "training_args.bin"):
        (folder / name).touch()
    text = message(folder)
    assert f"{names[0]} is a pickle" in text
    command = re.search(r'python -c "(.*)"', text)
    assert command, text
    saved = {}
    # torch is no dependency: this reader gives one tensor a file.
    tensor = types.SimpleNamespace(clone=lambda: tensor, contiguous=lambda: tensor)
    torch = types.SimpleNamespace(load=lambda path, weights_only: {path.name: tensor})
    save = types.SimpleNamespace(save_file=lambda found, path: saved.update({path: sorted(found)}))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "safetensors.torch", save)
    exec(command[1], {})
    assert saved == {str(folder / "model.safetensors"): names}
    for name in names:
        (folder / name).unlink()
    assert "no file of tensors. Download model.safetensors" in message(folder)


def test_several_files_need_an_index(golden, tmp_path):
    folder = published.write_model(tmp_path, golden)
    file = folder / "model.safetensors"
    (folder / "b.safetensors").write_bytes(file.read_bytes())
    file.rename(folder / "a.safetensors")
    assert "has a.safetensors, b.safetensors and no model.safetensors.index.json" in message(folder)


def test_weights_beside_which_others_belong_are_refused(golden, tmp_path):
    folder = published.write_model(tmp_path, golden)
    (folder / "adapter_config.json").write_text("{}")
    assert "would be left out. Merge it into the weights" in message(folder)
    (folder / "adapter_config.json").unlink()
    (folder / "model.safetensors.index.json").write_text("{")  # of an older save
    assert PretrainedWeights(folder).found
    whole = {"model.norm.weight": np.ones(16, np.int8)}  # their scale is somewhere else
    assert "is int8, and a weight is a floating number" in message(
        published.write_model(tmp_path, golden, **whole)
    )


def test_a_config_takes_the_values_and_those_beside_it_win(golden, tmp_path):
    folder = published.write_model(tmp_path, golden)
    model = Transformer(pretrained=str(folder), layers=1, dropout=0.1)
    assert (model.layers, model.width, model.kv_heads, model.dropout) == (1, 16, 2, 0.1)
    assert (model.norm, model.preset) == ("rms", "none")
    (folder / "config.json").unlink()
    values = {name: getattr(model, name) for name in Transformer.__pydantic_fields__}
    assert Transformer(**values) == model  # all values are given, and nothing is read


def test_a_model_of_another_kind_is_refused(tmp_path):
    folder = published.write_model(tmp_path, published.golden("bert"))
    with pytest.raises(ValueError, match="is a bert, which jtrain has as kind=encoder"):
        Transformer(pretrained=str(folder))
