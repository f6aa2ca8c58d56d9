"""What a folder of a published model may have wrong, and what the message says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

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
    [
        ("hidden_act", "relu"),
        ("rope_parameters", {"rope_type": "yarn"}),
    ],
)
def test_a_function_that_is_not_computed_is_refused(golden, tmp_path, entry, value):
    golden = {**golden, "config": {**golden["config"], entry: value}}
    text = message(published.write_model(tmp_path, golden))
    assert "jtrain computes only" in text
    assert (value["rope_type"] if isinstance(value, dict) else str(value)) in text


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


def test_a_config_takes_the_values_and_those_beside_it_win(golden, tmp_path):
    folder = published.write_model(tmp_path, golden)
    model = Transformer(pretrained=str(folder), layers=1, dropout=0.1)
    assert (model.layers, model.width, model.kv_heads, model.dropout) == (1, 16, 2, 0.1)
    assert (model.norm, model.preset) == ("rms", "none")
    (folder / "config.json").unlink()
    values = {name: getattr(model, name) for name in Transformer.__pydantic_fields__}
    assert Transformer(**values) == model  # all values are given, and nothing is read


READ = """
from pathlib import Path
from jtrain.models.pretrained.source import vocabulary_of
print(ascii(vocabulary_of(Path("."))))
"""


@pytest.mark.thorough
def test_a_tokenizer_is_utf8_in_any_locale(tmp_path: Path):
    tokens = {"\u0120the": 0, "gr\u00fcn": 1}
    text = json.dumps({"model": {"vocab": tokens}}, ensure_ascii=False)
    (tmp_path / "tokenizer.json").write_bytes(text.encode())
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = {**os.environ, **ascii_locale, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", READ]
    found = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert found.stdout.strip() == ascii(tokens), found.stderr
