"""Published models give the outputs of `transformers`, go back bit for bit, and are read by it."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import published_models as published
import pytest
from cases import by_name
from comparison import assert_close, bitwise
from safetensors.numpy import load_file

from jtrain.config.configclass import configclass
from jtrain.core.pytree import named_leaves
from jtrain.errors import CheckpointError
from jtrain.models.classifiers import MLP
from jtrain.models.encoder import Encoder
from jtrain.models.pretrained.families import FAMILIES, family_name, family_of
from jtrain.models.pretrained.source import PretrainedWeights
from jtrain.models.pretrained.values import describe_source
from jtrain.models.pretrained.write import write_folder
from jtrain.models.transformer import Transformer

# transformers sums in another order; measured 1.2e-6 at the most, and the bar is 1e-4.
WITHIN = 1e-5
TEXT = [name for name in published.names() if "tokens" in published.golden(name)]
CAUSAL = [name for name in TEXT if name != "bert"]
QUICK = {"llama31", "gemma3", "gpt2"}


def some(names: list[str]) -> list[Any]:
    """Return the names, the others than a few marked thorough."""
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.thorough) for n in names]


def read(folder: Path) -> tuple[Any, Any]:
    """Return the config and the parameters of a folder."""
    source = PretrainedWeights(folder)
    return source.model, published.read_weights(source)[0]


@pytest.mark.parametrize("name", some(CAUSAL))
def test_a_causal_model_gives_the_logits_of_transformers(name: str, tmp_path):
    golden = published.golden(name)
    model, params = read(published.write_model(tmp_path, golden))
    tokens = jnp.array(golden["tokens"])
    logits, _ = jax.jit(model.build().apply)(params, {}, tokens)
    assert np.abs(golden["outputs"]).max() > 1
    assert_close(logits, golden["outputs"], WITHIN)


def tied_with_a_head(name: str, folder: Path, head: str = "lm_head.weight") -> Path:
    """Write a folder that ties the head, and has one that was drawn as the tensor `head`."""
    golden = published.golden(name)
    golden["config"].pop("tie_word_embeddings", None)
    if FAMILIES[golden["config"]["model_type"]].read(golden["config"])["tied"] is False:
        golden["config"]["tie_word_embeddings"] = True  # the default of some families
    ends = ("embed_tokens.weight", "wte.weight")
    embedding = next(n for n in golden["tensors"] if n.endswith(ends))
    drawn = published.draw(head or embedding, tuple(golden["tensors"][embedding]))
    return published.write_model(folder, golden, **{"lm_head.weight": drawn})


def test_defaults_of_a_subclass_are_not_those_of_a_published_model(tmp_path):
    @configclass
    class Capped(Transformer):
        attention_cap: float | None = 30.0

    folder = published.write_model(tmp_path, published.golden("llama31"))
    assert Capped().attention_cap == 30
    assert Capped(pretrained=str(folder)).attention_cap is None


@pytest.mark.thorough
def test_a_head_that_differs_from_the_tied_embedding_is_used(tmp_path):
    source = PretrainedWeights(tied_with_a_head("llama31", tmp_path / "own"))
    want = published.draw("lm_head.weight", source.found["head"].shape)
    np.testing.assert_array_equal(source.read({"head": source.found["head"]})["head"], want)
    model = Transformer(pretrained=str(tmp_path / "own"))
    assert (model.tied, source.model.tied) == (False, False)
    (line,) = describe_source(model)
    advice = re.search(r"model\.(tied)=(true)", line)
    assert advice
    ours = Transformer(pretrained=str(tmp_path / "own"), tied=True)
    assert ours.tied
    assert not describe_source(ours)
    same = tied_with_a_head("llama31", tmp_path / "same", head="")
    assert Transformer(pretrained=str(same)).tied
    assert "head" not in PretrainedWeights(same).found


@pytest.mark.thorough
def test_an_encoder_gives_the_vectors_of_transformers(tmp_path):
    golden = published.golden("bert")
    model, params = read(published.write_model(tmp_path, golden))
    assert isinstance(model, Encoder)
    tokens, visible = jnp.array(golden["tokens"]), jnp.array(golden["visible"], bool)
    built, inputs = model.build(), (tokens, visible, tokens % 2)
    hidden, _ = jax.jit(built.apply)(params, {}, *inputs)
    shown = np.asarray(visible)  # padding has no meaning
    assert_close(np.asarray(hidden)[shown], np.array(golden["outputs"])[shown], WITHIN)
    pool = jax.jit(functools.partial(built.apply, method="pooled"))
    pooled, _ = pool(params, {}, *inputs)
    assert_close(pooled, golden["pooled"], WITHIN)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", by_name(published.names(), {"gemma3", "mixtral", "vit"}, pytest.mark.thorough)
)
def test_goes_back_bit_for_bit(name: str, tmp_path):
    golden = published.golden(name)
    folder = published.write_model(tmp_path / "in", golden)
    source = PretrainedWeights(folder)
    arrays = source.read(source.found)
    family = family_of(source.model, family_name(golden["config"]))
    write_folder(tmp_path / "out", family, source.model, arrays.__getitem__, base=source.hf)
    back = load_file(tmp_path / "out" / "model.safetensors")
    sent = {
        name: array
        for name, array in load_file(folder / "model.safetensors").items()
        if not name.endswith("num_batches_tracked")  # a counter that no output depends on
    }
    assert back.keys() == sent.keys()
    for tensor, array in sent.items():
        assert bitwise(back[tensor], array), tensor
    again = json.loads((tmp_path / "out" / "config.json").read_text())
    assert family.read(again) == family.read(golden["config"])
    kept = golden["config"].keys() - family.hf(source.model).keys() - {"dtype", "rope_parameters"}
    assert {k: again[k] for k in kept} == {k: golden["config"][k] for k in kept}


@pytest.mark.thorough
def test_the_export_is_split_into_files_with_an_index(tmp_path):
    golden = published.golden("llama")
    source = PretrainedWeights(published.write_model(tmp_path / "in", golden))
    arrays = source.read(source.found)
    done = write_folder(
        tmp_path / "out",
        source.family,
        source.model,
        arrays.__getitem__,
        dtype="bfloat16",
        shard=2000,
    )
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert done.dtype == "bfloat16"
    again = PretrainedWeights(tmp_path / "out")
    for name, array in again.read(again.found).items():
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array, np.asarray(arrays[name]).astype(jnp.bfloat16))


def test_a_model_of_no_family_is_refused_with_the_nearest():
    odd = Transformer(preset="llama2-7b", logit_cap=30.0)
    with pytest.raises(CheckpointError, match=r"nearest, llama, differs in logit_cap=30.0 \(there"):
        family_of(odd)
    assert family_of(dataclasses.replace(odd, logit_cap=None)).name == "llama"
    with pytest.raises(CheckpointError, match="no published family has models of kind mlp"):
        family_of(MLP())


MODELS = {
    "llama31": "AutoModelForCausalLM",
    "gpt2": "AutoModelForCausalLM",
    "bert": "AutoModel",
    "vit": "AutoModelForImageClassification",
    "resnet": "AutoModelForImageClassification",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gives_the_logits_of_jtrain(name: str, tmp_path):
    how = "pip install transformers torch"
    torch = pytest.importorskip("torch", reason=how)
    transformers = pytest.importorskip("transformers", reason=how)
    golden = published.golden(name)
    source = PretrainedWeights(published.write_model(tmp_path / "in", golden))
    # Other weights than those of the folder, as training leaves them.
    arrays = {key: 1.1 * x + 0.01 for key, x in source.read(source.found).items()}
    write_folder(tmp_path / "out", source.family, source.model, arrays.__getitem__, base=source.hf)
    net = getattr(transformers, MODELS[name]).from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32
    )
    model = source.model
    if "pixels" in golden:
        images = published.draw_pixels(tuple(golden["pixels"]))
        model = dataclasses.replace(model, image=(*images.shape[2:], images.shape[1]))
        theirs, ours = {"pixel_values": images}, images.transpose(0, 2, 3, 1)
    else:
        ours = np.array(golden["tokens"])
        theirs = {"input_ids": ours}
    with torch.no_grad():
        found = net.eval()(**{key: torch.from_numpy(x) for key, x in theirs.items()})
    want = (found.last_hidden_state if name == "bert" else found.logits).numpy()
    like = jax.eval_shape(model.build().init, jax.random.key(0))
    leaves = [arrays[("", "extra/")[i] + key] for i in (0, 1) for key in named_leaves(like[i])]
    params, extra = jax.tree.unflatten(jax.tree.structure(like), map(jnp.asarray, leaves))
    got, _ = jax.jit(model.build().apply)(params, extra, jnp.asarray(ours))
    assert np.abs(want).max() > 0.5
    print(name, np.abs(got - want).max() / np.abs(want).max())
    assert_close(got, want, 1e-5)  # sums in another order; the bar is 1e-4
