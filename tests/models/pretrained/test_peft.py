"""Adapters of the package peft: the terms of a run under the names of the family, and back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import published_models as published
import pytest
from comparison import assert_close, distance
from safetensors.numpy import load_file, save_file

from jtrain.core.pytree import named_leaves
from jtrain.errors import CheckpointError
from jtrain.finetune import Lora, build_adapter, read_adapter, write_peft_adapter
from jtrain.models.pretrained.source import PretrainedWeights

ALL = ("*/qkv/kernel", "*/out/kernel", "*/up/kernel", "*/down/kernel")


def write(tmp_path, name: str, *on: str):
    """Write an adapter of drawn terms; return its folder, and the weights that they add up to."""
    folder = published.write_model(tmp_path / name, published.golden(name))
    source = PretrainedWeights(folder)
    built = source.model.build()
    params, _ = published.read_weights(source)
    adapter = build_adapter(Lora(rank=3, alpha=6, on=on), params, built.dims, built.linear)
    terms, extra = adapter.attach((params, ()), jax.random.key(0))
    draw = np.random.default_rng(0)
    terms = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), jnp.float32), terms)
    out = tmp_path / f"{name}-lora"
    write_peft_adapter(out, adapter, terms, source.model, str(folder))
    return folder, out, named_leaves(adapter.join(terms, extra, merged=True))


SLOWER = [pytest.param(name, marks=pytest.mark.thorough) for name in ("llama31", "bert", "qwen2")]


@pytest.mark.parametrize("name", ["gpt2", *SLOWER])
def test_the_terms_are_those_of_the_published_modules(tmp_path, name):
    folder, out, merged = write(tmp_path, name, *ALL)
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (3, 6, name == "gpt2")
    assert config["base_model_name_or_path"] == str(folder)
    terms = load_file(out / "adapter_model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in terms if ".lora_A." in key]:
        a, b = terms[key], terms[key.replace("lora_A", "lora_B")]
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        ends = {module, module.rpartition(".")[2]}
        assert ends & set(config["target_modules"]), "peft finds the module"
        product = np.float32(2) * (b @ a)
        tensors[f"{module}.weight"] += product.T if name == "gpt2" else product
    (tmp_path / "sum").mkdir()
    save_file(tensors, tmp_path / "sum" / "model.safetensors")
    (tmp_path / "sum" / "config.json").write_text((folder / "config.json").read_text())
    for path in (tmp_path / "sum", out):
        source = PretrainedWeights(path)
        for leaf, array in source.read(source.found).items():
            assert_close(array, merged[leaf], 1e-6)


def test_modules_with_the_same_last_name_are_written_in_full(tmp_path):
    _, out, _ = write(tmp_path, "gpt2", "*/out/kernel")
    targets = json.loads((out / "adapter_config.json").read_text())["target_modules"]
    assert targets == ["transformer.h.0.attn.c_proj", "transformer.h.1.attn.c_proj"]


def test_an_adapter_of_another_base_names_the_module(tmp_path):
    folder, out, _ = write(tmp_path, "llama31", "*/out/kernel")
    other = published.write_model(tmp_path / "other", published.golden("gpt2"))
    config = json.loads((out / "adapter_config.json").read_text())
    change = lambda **x: (out / "adapter_config.json").write_text(json.dumps(config | x))
    change(base_model_name_or_path=str(other))
    with pytest.raises(
        CheckpointError, match=r"self_attn.o_proj.weight is not there.*Write the mo"
    ):
        PretrainedWeights(out)
    tensors = load_file(out / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
    save_file({**tensors, key: np.zeros((3, 20), np.float32)}, out / "adapter_model.safetensors")
    change()
    with pytest.raises(CheckpointError, match=r"B A of layers.0.self_attn.o_proj is 16 x 20, and"):
        PretrainedWeights(out)
    for entry, value in {"use_dora": True, "init_lora_weights": "pissa", "r": None}.items():
        change(**{entry: value})
        with pytest.raises(CheckpointError, match=f"has {entry}=|no numbers {entry} and"):
            PretrainedWeights(out)
    change(base_model_name_or_path=None)
    with pytest.raises(CheckpointError, match="Write the name, or the folder, of that model there"):
        PretrainedWeights(out)
    with pytest.raises(CheckpointError, match="has a low-rank term and is not a linear layer"):
        write(tmp_path / "again", "llama31", "tokens")
    assert PretrainedWeights(folder).found


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama31", marks=pytest.mark.thorough)])
def test_an_adapter_that_peft_wrote_gives_the_outputs_of_peft(tmp_path, name):
    golden = json.loads((published.GOLDEN.with_name("peft") / f"{name}.json").read_text())
    base = published.write_model(tmp_path / "base", published.golden(name))
    out = tmp_path / "theirs"
    out.mkdir()
    config = {**golden["config"], "base_model_name_or_path": str(base)}
    (out / "adapter_config.json").write_text(json.dumps(config))
    save_file(published.tensors_of(golden), out / "adapter_model.safetensors")
    source = PretrainedWeights(out)
    tokens = jnp.asarray(published.golden(name)["tokens"][:1], jnp.int32)
    params, _ = published.read_weights(source)
    got, _ = source.model.build().apply(params, {}, tokens)
    assert distance(got, np.asarray(golden["outputs"])) < 3e-6  # 1e-6 was measured
    for path in (out, out / "adapter_model.safetensors"):
        with pytest.raises(CheckpointError, match=f"is an adapter of peft.*init_from.path={out} "):
            read_adapter(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama31", "gpt2", "bert"])
def test_peft_computes_the_same_outputs(tmp_path, name):
    """Of the adapter as written here, and of one that peft writes, on fewer modules."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    ids = np.arange(12).reshape(2, 6) % 11
    inputs = jnp.asarray(ids, jnp.int32), jnp.ones(ids.shape, bool)
    auto = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
    load = lambda: auto.from_pretrained(folder, attn_implementation="eager").eval()

    def check(net, path):
        with torch.no_grad():
            want = net(input_ids=torch.tensor(ids))[0].numpy()
        source = PretrainedWeights(path)
        params, _ = published.read_weights(source)
        got, _ = source.model.build().apply(params, {}, *inputs[: 1 + (name == "bert")])
        assert distance(got, want) < 2e-6

    folder, out, _ = write(tmp_path, name, *ALL)
    check(peft.PeftModel.from_pretrained(load(), out).eval(), out)
    targets = {"gpt2": ["c_attn"], "bert": ["query", "value"]}.get(name, ["q_proj", "v_proj"])
    how = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False,
                          use_rslora=True)  # fmt: skip
    tuned = peft.get_peft_model(load(), how).eval()
    tuned.save_pretrained(tmp_path / "theirs")
    check(tuned, tmp_path / "theirs")
