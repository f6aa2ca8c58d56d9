"""What a folder of a published model may have wrong, and the memory that reading takes."""

import functools
import json
import os
import re
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import published_models as published
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from plain_environ import run_python

from jtrain.errors import CheckpointError
from jtrain.models.pretrained.families import FAMILIES, build_model, family_name
from jtrain.models.pretrained.source import CLASSES, PretrainedWeights
from jtrain.models.pretrained.tensors_table import put_slices, release_host_memory
from jtrain.models.transformer import Transformer


@pytest.fixture(name="golden", scope="module")
def _golden():
    return published.golden("llama")


def message(folder) -> str:
    with pytest.raises(CheckpointError) as found:
        PretrainedWeights(folder)
    return str(found.value)


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
    ("entry", "value"), [("hidden_act", "relu"), ("rope_parameters", {"rope_type": "yarn"})]
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


@functools.cache
def config(name: str) -> dict[str, Any]:
    return published.golden(name)["config"]


def build(name: str, changes: dict[str, Any], *without: str) -> Any:
    """Return our config for a golden's config.json with some entries changed or left out."""
    hf = {key: x for key, x in config(name).items() if key not in without} | changes
    family = FAMILIES[family_name(hf)]
    return build_model(CLASSES[family.kind], family, hf)


LINEAR = {"rope_type": "linear", "factor": 2.0}
REFUSED = [
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type="),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types="),
    (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "layer_types": None,
        },
        "use_sliding_window=True",
    ),
    ("gemma2", {"layer_types": None, "sliding_window_pattern": 3}, "sliding_window_pattern=3"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx="),
    ("bert", {"is_decoder": True}, "is_decoder=True"),
    ("timm_vit", {"model_args": {"img_size": 256}}, "model_args="),
]


@pytest.mark.parametrize(("name", "changes", "entry"), REFUSED)
def test_an_entry_of_another_function_is_refused_by_name(name, changes, entry):
    with pytest.raises(CheckpointError) as error:
        build(name, changes)
    assert entry in str(error.value)


PASSED = [
    ("llama", {"rope_scaling": {"rope_type": "default"}, "quantization_config": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "layer_types": None}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0, "layer_types": None}),
    ("gpt2", {"num_hidden_layers": 2, "activation_function": "gelu_pytorch_tanh"}),
]


@pytest.mark.parametrize(("name", "changes"), PASSED)
def test_an_entry_without_an_effect_passes(name, changes):
    assert build(name, changes) == build(name, {})


def test_entries_have_the_priority_and_the_defaults_of_transformers():
    rope = {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}
    assert build("llama", rope).positions.scaling.factor == 2.0
    assert build("llama", rope).positions.base == 10000.0
    assert build("llama", {"rope_theta": 7.0}).positions.base == 10000.0  # that of the object
    context = build("llama31", {"original_max_position_embeddings": 8}).positions.scaling.context
    assert context == 8
    heads = {"num_attention_heads": 16, "head_dim": 4}
    assert build("mistral", heads, "num_key_value_heads").kv_heads == 8
    assert build("llama", heads, "num_key_value_heads").kv_heads == 16
    assert build("qwen3", {}, "head_dim").head_size == 128
    scaled = {"rope_scaling": {"factor": 4.0}}  # over the object of the layers without a window
    assert build("gemma3", scaled).positions.scaling.factor == 4.0


ROOT = Path(__file__).parents[3]
DEVICES = 4
MESH = jax.make_mesh((DEVICES,), ("fsdp",), devices=jax.devices()[:DEVICES])


def test_one_slice_is_on_the_host_beside_that_of_the_transfer_before():
    hosts: list[weakref.ref] = []

    def read(index: tuple[slice, ...]) -> np.ndarray:
        assert sum(host() is not None for host in hosts) <= 1
        rows = len(range(16)[index[0]])
        numbers = np.empty(rows * 1000 + 1, np.float32)
        hosts.append(weakref.ref(numbers))
        part = numbers[1:].reshape(rows, 1000)  # JAX copies what is not aligned to 64 bytes
        part[...] = index[0].start
        return part

    found = put_slices((16, 1000), NamedSharding(MESH, PartitionSpec("fsdp")), read)
    assert len(hosts) == DEVICES
    release_host_memory()
    assert all(host() is None for host in hosts)
    expected = np.repeat(np.arange(0, 16, 4, dtype=np.float32), 4)
    np.testing.assert_array_equal(np.asarray(found[:, 7]), expected, strict=True)


def test_replicas_are_read_once():
    calls, mesh = [], jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    array = np.arange(24, dtype=np.float32).reshape(4, 6)

    def read(index):
        calls.append(index)
        return array[index].copy()

    sharding = NamedSharding(mesh, PartitionSpec(None, "b"))
    found = put_slices(array.shape, sharding, read)
    assert len(calls) == 2
    assert found.sharding == sharding
    np.testing.assert_array_equal(np.asarray(found), array, strict=True)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), array[shard.index], strict=True)


@pytest.mark.thorough
def test_resident_memory_beyond_the_arrays_is_at_most_a_tensor():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    script = ROOT / "benchmarks" / "reading_weights.py"
    words = "--layers", "2", "--rounds", "1", "--json"
    [found] = json.loads(run_python(script, *words, env=environment).stdout)
    assert found["largest"] == pytest.approx(131.072)
    assert found["peak"] < found["largest"]
    assert found["end"] < found["largest"] / 4
